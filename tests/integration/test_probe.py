"""The vendor's own behaviour, step by step, against the emulator under policy "vendor"."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

PROBE = Path(__file__).parents[1] / "data" / "probe"
LARGEST_NUMBER_OF_DIFFERENCES = 40


def load_probe() -> ModuleType:
    """The probe as a module, for its own rules of comparison. It reads its arguments when it is imported."""
    spec = importlib.util.spec_from_file_location("mslite_probe", PROBE / "probe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, ["probe.py", "--compare", "want", "got"]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    return module


def test_every_step_equals_the_vendors_but_for_the_list(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    got_path = tmp_path / "got.json"
    # onnxruntime is loaded once, before the probe forks a process for each case.
    code = "import runpy, sys, onnxruntime; runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = [
        "--module",
        "qwen_npu.emulator",
        "--ext-mindir",
        ".onnx",
        "--ext-lite",
        ".onnx",
        "--out",
        str(got_path),
    ]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[0] = {str(PROBE / 'probe.py')!r}; {code}", *arguments],
        env={**os.environ, "QWEN_NPU_EMULATOR_POLICY": "vendor"},
        check=True,
        timeout=300,
    )
    probe = load_probe()
    want = json.loads((PROBE / "expected_2025_07.json").read_text())
    got = json.loads(got_path.read_text())
    reasons: dict[str, str] = json.loads((PROBE / "differences.json").read_text())

    compared, different = 0, set[str]()
    for case, steps in want.items():
        if case == "__meta__" or case in probe.UNSTABLE:
            continue
        crashed = "__crash__" in steps
        for step in sorted(set(steps) | set(got[case])):
            if crashed and (step == "__crash__" or step not in steps):
                continue  # where the vendor's process dies there is nothing to equal
            compared += 1
            if probe.norm(steps.get(step)) != probe.norm(got[case].get(step)):
                different.add(f"{case} | {step}")

    equal = compared - len(different)
    record_property("summary", f"probe: {equal} of {compared} steps equal the vendor's, {len(different)} differ")
    assert compared > 800
    assert different == set(reasons), "each difference has a reason in differences.json, and no reason is left over"
    assert len(different) <= LARGEST_NUMBER_OF_DIFFERENCES
    assert all(reasons.values())
