from __future__ import annotations

import inspect

import pytest

from qwen_npu import errors
from qwen_npu.errors import OpError, OpTypeError, WorkbenchError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, WorkbenchError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_was_expected_and_what_to_do(kind):
    error = kind("the picture is 0x0", expected="at least one pixel", fix="use another file")
    assert str(error) == "the picture is 0x0. Expected: at least one pixel. What to do: use another file."
    assert kind.__doc__


def test_errors_of_the_op_are_also_the_built_in_kinds():
    assert issubclass(OpError, ValueError)
    assert issubclass(OpTypeError, TypeError)


def test_the_package_imports_nothing_heavy():
    import subprocess
    import sys

    heavy = {
        "numpy.testing",
        "onnx",
        "onnxruntime",
        "plotly",
        "ipywidgets",
        "papermill",
        "PIL",
        "tokenizers",
        "jinja2",
        "torch",
    }
    code = f"import sys, qwen_npu; print(*sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_the_public_names_exist():
    import qwen_npu

    for name in qwen_npu.__all__:
        assert getattr(qwen_npu, name) is not None
    with pytest.raises(AttributeError, match="Session"):
        qwen_npu.sesion  # noqa: B018
