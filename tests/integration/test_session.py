"""The staged runtime on the emulated device: golden answers, exact bytes, and every mistake a user can make."""

from __future__ import annotations

import gc
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import qwen_npu.emulator
from qwen_npu import contract, data
from qwen_npu.bundle import build_bundle, open_bundle
from qwen_npu.errors import CapacityError, ContractError, DriverError, ImageError, PromptError, StateError, UsageError
from qwen_npu.runtime.inputs import TextStream
from qwen_npu.runtime.session import Session
from tests.golden import golden_prompts

EDGES = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512)


def session(**options) -> Session:
    return Session(open_bundle("tiny"), **{"driver": "emulator", **options})


def vendor_facade() -> types.ModuleType:
    """A module with the vendor's names alone: nothing of what only the emulator knows."""
    facade = types.ModuleType("mindspore_lite_facade")
    for name in ("Tensor", "TensorMeta", "Model", "Context", "DataType", "Format", "ModelType"):
        setattr(facade, name, getattr(qwen_npu.emulator, name))
    return facade


def ids(length: int) -> list[int]:
    """A prompt of exactly `length` tokens."""
    text = [token for prompt in golden_prompts() if prompt.image is None for token in prompt.prompt_tokens]
    return (text * (length // len(text) + 1))[:length]


# answers


@pytest.mark.parametrize(("state", "kv"), [("resident", "fixed"), ("host", "growing")])
def test_golden_answers_in_f32(state, kv):
    for prompt in golden_prompts()[::9]:
        with session(numerics="f32", state=state, kv=kv) as open_session:
            result = open_session.generate(prompt.prompt_tokens, prompt.image, max_new_tokens=len(prompt.tokens))
        assert list(result.tokens) == prompt.tokens
        assert result.prompt_tokens == len(prompt.prompt_tokens)


@pytest.mark.full
@pytest.mark.parametrize(
    ("state", "kv"), [("resident", "fixed"), ("resident", "growing"), ("host", "fixed"), ("host", "growing")]
)
def test_all_golden_answers_in_f32_and_on_device(state, kv):
    for prompt in golden_prompts():
        options = {"max_new_tokens": len(prompt.tokens)}
        with session(numerics="f32", state=state, kv=kv) as exact, session(state=state, kv=kv) as device:
            assert list(exact.generate(prompt.prompt_tokens, prompt.image, **options).tokens) == prompt.tokens
            tokens = list(device.generate(prompt.prompt_tokens, prompt.image, **options).tokens)
            assert tokens[: len(prompt.clear_tokens)] == prompt.clear_tokens


def test_teacher_forcing_feeds_the_given_tokens_and_reports_the_choices():
    prompt = golden_prompts()[0]
    with session(numerics="f32") as open_session:
        forced = open_session.generate(prompt.prompt_tokens, prompt.image, force_tokens=prompt.tokens, logits=True)
    assert list(forced.tokens) == prompt.tokens
    assert all(step.logits.argmax() == step.token for step in forced.steps if step.token is not None)


@pytest.mark.parametrize("length", EDGES)
def test_a_left_padded_prompt_gives_the_states_of_an_unpadded_one(length):
    """Around every bucket edge: a bundle whose only bucket is the prompt's own length needs no padding."""
    exact = build_bundle(data.tiny_checkpoint(), buckets=(length,), capacity=1024)
    states, tokens = [], []
    for bundle in (exact, open_bundle("tiny")):
        with Session(bundle, driver="emulator", numerics="f32") as open_session:
            result = open_session.generate(ids(length), max_new_tokens=3, ignore_eos=True)
            tokens.append(result.tokens)
            states.append(open_session.read_states())
    assert tokens[0] == tokens[1]
    for unpadded, padded in zip(*states, strict=True):
        assert np.abs(unpadded - padded).max() <= 1e-5 * max(1, np.abs(unpadded).max())


# bytes


@pytest.mark.parametrize("numerics", ["device", "f32"])
@pytest.mark.parametrize("kv", ["fixed", "growing"])
def test_resident_moves_small_integers_up_and_logits_down(kv, numerics):
    with session(kv=kv, numerics=numerics) as open_session:
        result = open_session.generate(ids(40), max_new_tokens=8, ignore_eos=True)
        spec, capacity = open_session.bundle.spec, open_session.bundle.capacity
    assert len(result.decode_steps) == 7
    for step in result.decode_steps:
        tokens = 40 + step.step + 1
        assert step.host_to_device_bytes == spec.step_input_bytes(capacity if kv == "fixed" else tokens)
        assert step.device_to_host_bytes == spec.logits_bytes(numerics=numerics)
        assert step.allocated_bytes == (0 if kv == "fixed" else spec.kv_bytes(tokens, numerics=numerics))


def test_states_cross_once_when_decoding_begins():
    with session() as open_session:
        result = open_session.generate(ids(40), max_new_tokens=4, ignore_eos=True)
        spec, capacity = open_session.bundle.spec, open_session.bundle.capacity
    upload = result.stage("upload")
    assert upload.host_to_device_bytes == spec.state_bytes(capacity)
    assert upload.allocated_bytes == 2 * spec.state_bytes(capacity) + spec.logits_bytes()


@pytest.mark.parametrize(
    "options",
    [{}, {"state": "host"}, {"kv": "growing"}, {"peek": True}, {"speculate": 3}],
    ids=lambda options: "-".join(options) or "default",
)
def test_closing_a_session_gives_all_device_memory_back_at_once(options):
    """Without a garbage collection: in a process that holds much it would take longer than the stages."""
    from qwen_npu.emulator import instrument

    gc.collect()
    before = instrument.memory("ascend:0").live_bytes
    gc.disable()
    try:
        with session(**options) as open_session, open_session.record():
            open_session.generate(ids(40), max_new_tokens=4, ignore_eos=True)
            assert (instrument.memory("ascend:0").live_bytes > before) == (options.get("state") != "host")
        assert instrument.memory("ascend:0").live_bytes == before
    finally:
        gc.enable()


def test_one_model_is_alive_at_a_time():
    prompt = next(prompt for prompt in golden_prompts() if prompt.image)
    with session() as open_session, open_session.record() as ledger:
        open_session.generate(prompt.prompt_tokens, prompt.image, max_new_tokens=3)
    stages = [(event.kind, event.stage) for kind in ("stage_begin", "stage_end") for event in ledger.events(kind)]
    assert len(stages) == 6
    alive, order = 0, sorted((*ledger.events("stage_begin"), *ledger.events("stage_end")), key=lambda event: event.seq)
    for event in order:
        alive += 1 if event.kind == "stage_begin" else -1
        assert alive <= 1


def test_the_vendors_methods_alone_are_enough():
    """Session through a facade: same tokens; what is not observable there is said."""
    prompt = golden_prompts()[0]
    with session() as known, session(driver=vendor_facade()) as facade:
        wanted = known.generate(prompt.prompt_tokens, prompt.image, max_new_tokens=8)
        with facade.record() as ledger:
            result = facade.generate(prompt.prompt_tokens, prompt.image, max_new_tokens=8)
        assert result.tokens == wanted.tokens
        assert result.peak_source == "observed"
        assert wanted.peak_source == "emulator"
        assert "addresses" not in facade.driver.capabilities
    assert all(buffer.address is None for buffer in ledger.buffers())


def test_on_a_cpu_target_states_stay_on_the_host_and_it_says_so():
    prompt = golden_prompts()[0]
    with session(device="cpu", numerics="f32") as open_session:
        result = open_session.generate(prompt.prompt_tokens, prompt.image, max_new_tokens=len(prompt.tokens))
    assert list(result.tokens) == prompt.tokens
    assert "kept on the host" in result.notes[0]


def test_states_stay_readable_after_the_end_and_go_with_the_next_generation():
    with session() as open_session:
        with pytest.raises(StateError, match="no states"):
            open_session.read_states()
        generation = open_session.stream(ids(20), max_new_tokens=4, ignore_eos=True)
        for _ in generation:
            pass
        assert open_session.state_tokens == 23
        assert open_session.read_states().kv[..., 22, :].any()
        assert not open_session.read_states().kv[..., 23:, :].any()
        open_session.stream(ids(20))
        assert open_session.state_tokens == 0


def test_a_generation_left_early_releases_its_model():
    with session() as open_session:
        generation = open_session.stream(ids(20), max_new_tokens=50, ignore_eos=True)
        for step in generation:
            if step.step == 2:
                break
        generation.close()
        assert open_session.state_tokens == 23
        assert len(generation.result().tokens) == 4


def norms(states) -> np.ndarray:
    return np.linalg.norm(
        states.recurrent[:, 0].reshape(*states.recurrent.shape[:1], states.recurrent.shape[2], -1), axis=-1
    )


@pytest.mark.parametrize("options", [{"kv": "fixed"}, {"kv": "growing"}, {"speculate": 3}])
def test_peeks_are_the_norms_of_the_states_and_cost_no_residency(options):
    with session(numerics="f32", peek=True, **options) as open_session, open_session.record() as ledger:
        for step in open_session.stream(ids(40), max_new_tokens=8, ignore_eos=True):
            if step.step < 0:
                continue
            newest = ledger.peeks("recurrent.norm")[-1]
            assert newest.step == step.step
            assert np.allclose(newest.array, norms(open_session.read_states()), rtol=1e-5)
            assert step.device_to_host_bytes % open_session.bundle.spec.logits_bytes(numerics="f32") == 0
        assert not ledger.peeks("recurrent.nonfinite")[-1].array.any()


def test_a_sweep_shows_which_slots_are_poisoned():
    with session(numerics="f32") as open_session:
        group = open_session.group(drafts=2, sequences=2)
        first = group.join(ids(20), max_new_tokens=8, ignore_eos=True)
        row = group.table.row(group.join(ids(30), max_new_tokens=8, ignore_eos=True).sequence)
        group.step()
        poisoned = group.table.row(first.sequence)
        group.leave(first)
        unreal = group.sweep()[..., 2].sum(axis=(0, 2))
        assert all(unreal[slot] for slot in poisoned)
        assert not unreal[row[0]]
        group.free()


# mistakes


def test_a_prompt_beyond_the_last_bucket_is_refused_before_anything_is_loaded(monkeypatch):
    with session() as open_session:
        monkeypatch.setattr(open_session.driver, "load", None)
        with pytest.raises(PromptError, match=r"513 tokens.*at most 512"):
            open_session.generate(ids(513))


def test_a_prompt_that_leaves_no_room_is_refused():
    small = build_bundle(data.tiny_checkpoint(), buckets=(32,), capacity=32)
    with Session(small, driver="emulator") as open_session:
        with pytest.raises(CapacityError, match="no room"):
            open_session.generate(ids(32))
        result = open_session.generate(ids(30), max_new_tokens=10, ignore_eos=True)
    assert result.stop == "capacity"
    assert len(result.tokens) == 3


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "empty"), (" \n", "empty"), ([], "prompt of"), ([0.5], "float64"), ([-1], "-1"), ([10**6], "1000000")],
)
def test_a_prompt_that_is_none(prompt, words):
    with session() as open_session, pytest.raises(PromptError, match=words):
        open_session.generate(prompt)


def test_an_image_token_in_the_text_is_refused_with_both_numbers():
    with session() as open_session, pytest.raises(PromptError, match=r"1 image tokens.*gives 0"):
        open_session.generate("What is <|image_pad|>?")


def test_an_unreadable_picture_is_refused(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"GIF89a")
    with session() as open_session, pytest.raises(ImageError):
        open_session.generate("Describe this image.", tmp_path / "bad.png")


@pytest.mark.parametrize("size", [(1, 1), (4000, 20), (128, 128)])
def test_any_readable_picture_gets_an_answer(size):
    with session() as open_session:
        result = open_session.generate("Describe this image.", Image.new("RGB", size, "red"), max_new_tokens=4)
    assert result.tokens
    assert bool(result.notes) == (size != (128, 128))


@pytest.mark.parametrize("options", [{"state": "both"}, {"kv": "paged"}, {"numerics": "f8"}])
def test_unknown_settings_are_refused(options):
    with pytest.raises(UsageError):
        session(**options)


def test_no_tokens_wanted_is_refused():
    with session() as open_session, pytest.raises(UsageError, match="max_new_tokens is 0"):
        open_session.generate("hello", max_new_tokens=0)


def test_prefill_and_decode_of_different_capacity_are_refused(monkeypatch):
    """A foreign prefill graph that pads its own cache to another capacity."""
    from qwen_npu.runtime import prompt

    def padding_prefill(*arguments):
        result = run_prefill(*arguments)
        kv = np.zeros((*result.states.kv.shape[:3], 2048, result.states.kv.shape[4]), result.states.kv.dtype)
        return result._replace(states=result.states._replace(kv=kv))

    run_prefill = prompt.run_prefill
    monkeypatch.setattr(prompt, "run_prefill", padding_prefill)
    with session() as open_session, pytest.raises(CapacityError, match=r"2048 tokens.*1024"):
        open_session.generate(ids(40), ignore_eos=True)


def test_a_model_with_other_tensors_is_refused(monkeypatch):
    bundle = open_bundle("tiny")
    monkeypatch.setattr(type(bundle), "contract", lambda self, *_, **__: contract.vision(bundle.spec, "device", (8, 8)))
    with session() as open_session, pytest.raises(ContractError, match="4 inputs"):
        open_session.generate("hello")


def test_a_model_that_was_not_converted_says_what_to_run(tmp_path):
    bundle = build_bundle(data.tiny_checkpoint(), tmp_path / "bundle")
    for graph in Path(bundle.directory).glob("*.onnx"):
        graph.unlink()
    with Session(bundle, driver=vendor_facade()) as open_session, pytest.raises(DriverError, match="qwen-npu convert"):
        open_session.generate("hello")


# text


def test_text_comes_in_whole_characters():
    text = "数到五 🙂 done"
    with session() as open_session:
        stream = TextStream(open_session.inputs)
        tokens = open_session.inputs.tokenizer.encode(text, add_special_tokens=False).ids
        pieces = [stream.push(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
