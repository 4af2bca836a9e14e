"""Writes the golden cases (npz) as the flat file that the C++ tests read; the standard library is enough.

Usage: golden_to_cases.py OUT NPZ [NPZ ..]   A file that is not there is left out, but one must be.
The formats: arrays.h, and NumPy's own description of .npy (a text header, then the bytes).
"""

from __future__ import annotations

import ast
import io
import struct
import sys
import zipfile
from pathlib import Path

TYPES = {"<f2": 0, "<f4": 2, "<f8": 3, "<i4": 4, "<i8": 5}
NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "lens": "lengths",
    "idx": "indices",
    "acc": "accepted",
}


def read_npy(raw: bytes) -> tuple[str, tuple[int, ...], bytes]:
    stream = io.BytesIO(raw)
    if stream.read(6) != b"\x93NUMPY":
        raise SystemExit("not an .npy member")
    major = stream.read(2)[0]
    (length,) = struct.unpack("<H", stream.read(2)) if major == 1 else struct.unpack("<I", stream.read(4))
    header = ast.literal_eval(stream.read(length).decode("latin1"))
    if header["fortran_order"]:
        raise SystemExit("Fortran order")
    return header["descr"], header["shape"], stream.read()


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def main(target: str, *sources: str) -> None:
    cases: dict[str, dict[str, bytes]] = {}
    for source in sources:
        if not Path(source).is_file():
            continue
        with zipfile.ZipFile(source) as archive:
            for member in archive.namelist():
                case, key = member.removesuffix(".npy").split("/")
                descr, shape, data = read_npy(archive.read(member))
                head = struct.pack("<II", TYPES[descr], len(shape)) + struct.pack(f"<{len(shape)}q", *shape)
                cases.setdefault(case, {})[NAMES.get(key, key)] = head + data
    if not cases:
        raise SystemExit(f"none of {', '.join(sources)} is there")
    out = [b"QNTWIN1\0", struct.pack("<I", len(cases))]
    for case, arrays in sorted(cases.items()):
        out += [text(case), struct.pack("<I", len(arrays))]
        for key, body in sorted(arrays.items()):
            out += [text(key), body]
    Path(target).write_bytes(b"".join(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
