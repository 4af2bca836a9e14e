"""A client of the vendor's package alone: vision, prefill and decode, the states resident on the device.

    python client_mindspore_lite.py DIR --feed FEED.npz --device-id 0 --steps 16

DIR holds vision-8x8-device.mindir, prefill-device.mindir and decode_fixed-device.mindir. Prints the tokens as JSON.
Knows nothing of this workbench: it is what a user of the box would write, and it runs on the emulated device by its
name alone.
"""

import argparse
import gc
import json
from pathlib import Path

import mindspore_lite as mslite
import numpy as np

NUMPY = {
    mslite.DataType.FLOAT16: np.float16,
    mslite.DataType.FLOAT32: np.float32,
    mslite.DataType.INT32: np.int32,
    mslite.DataType.INT64: np.int64,
}


def load(path, context):
    model = mslite.Model()
    model.build_from_file(str(path), mslite.ModelType.MINDIR, context)
    return model


def feed(model, arrays):
    """Host tensors in the dtypes that the model asks for."""
    infos = model.get_inputs()
    cast = [np.ascontiguousarray(a.astype(NUMPY[i.dtype])) for a, i in zip(arrays, infos, strict=True)]
    if [list(a.shape) for a in cast] != [list(i.shape) for i in infos]:
        model.resize(infos, [list(a.shape) for a in cast])
    return [mslite.Tensor(a) for a in cast]


def run_vision(path, context, pixels):
    model = load(path, context)
    try:
        return model.predict(feed(model, [pixels]))[0].get_data_to_numpy().copy()
    finally:
        del model
        gc.collect()


def run_prefill(path, context, ids, positions, embeds, bucket):
    """Left-padded to the bucket; the pads' rows of the KV are dropped."""
    pads = bucket - len(ids)
    model = load(path, context)
    try:
        arrays = [
            np.pad(ids, (pads, 0))[None],
            np.pad(np.ones(len(ids)), (pads, 0))[None],
            np.pad(positions, ((0, 0), (pads, 0)))[:, None],
            embeds,
        ]
        logits, conv, recurrent, kv = [t.get_data_to_numpy().copy() for t in model.predict(feed(model, arrays))]
        return int(logits[0, -1].argmax()), conv, recurrent, kv[:, :, :, pads:]
    finally:
        del model
        gc.collect()


def run_decode(path, context, device, token, states, length, delta, steps):
    """Every step passes the last step's device tensors back; only the logits come to the host."""
    model = load(path, context)
    metas = model.get_outputs()
    capacity = model.get_inputs()[1].shape[1]
    conv, recurrent, kv = states
    kv = np.pad(kv, ((0, 0), (0, 0), (0, 0), (0, capacity - kv.shape[3]), (0, 0)))
    live = [mslite.Tensor(np.ascontiguousarray(a), device=device) for a in (conv, recurrent, kv)]
    scratch = [mslite.Tensor(shape=list(m.shape), dtype=m.dtype, device=device) for m in metas[1:]]
    logits = mslite.Tensor(shape=list(metas[0].shape), dtype=metas[0].dtype, device=device)
    kinds = [NUMPY[i.dtype] for i in model.get_inputs()[:3]]
    mask = np.zeros((1, capacity), kinds[1])
    mask[:, :length] = 1
    tokens = [token]
    for step in range(steps):
        mask[0, length + step] = 1
        position = np.array([length + step] + [length + step + delta] * 3, kinds[2]).reshape(4, 1, 1)
        host = [np.array([[tokens[-1]]], kinds[0]), mask, position]
        model.predict([mslite.Tensor(a) for a in host] + live, [logits, *scratch])
        live, scratch = scratch, live
        tokens.append(int(logits.get_data_to_numpy().reshape(-1).argmax()))
    return tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device-id", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--bucket", type=int, default=64)
    parser.add_argument("--feed", type=Path, required=True, help="npz: ids, positions, pixel_values")
    options = parser.parse_args()
    context = mslite.Context()
    context.target = ["ascend"]
    context.ascend.device_id = options.device_id
    given = np.load(options.feed)
    ids, positions = given["ids"], given["positions"]
    embeds = run_vision(options.directory / "vision-8x8-device.mindir", context, given["pixel_values"])
    path = options.directory / "prefill-device.mindir"
    token, *states = run_prefill(path, context, ids, positions, embeds, options.bucket)
    delta = int(positions.max()) + 1 - len(ids)
    path = options.directory / "decode_fixed-device.mindir"
    device = f"ascend:{options.device_id}"
    print(json.dumps(run_decode(path, context, device, token, states, len(ids), delta, options.steps)))


if __name__ == "__main__":
    main()
