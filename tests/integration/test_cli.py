"""The command line as a user meets it: text and tables, one JSON object, and mistakes without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_npu.cli import main
from qwen_npu.data import image_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


PROMPT = ("run", "--prompt", "Describe this image.", "--image", str(image_path("two_shapes")), "--driver", "emulator")


def test_run_streams_the_text_and_then_tells_the_costs(capsys):
    code, out, _ = run(capsys, *PROMPT, "--max-new-tokens", "6")
    assert code == 0
    for words in ("vision", "prefill", "decode", "predict", "wall", "host to device 4,116", "peak device bytes"):
        assert words in out
    assert "not an NPU's" in out


def test_run_json_is_one_object_with_the_agreed_fields(capsys):
    code, out, _ = run(capsys, *PROMPT, "--max-new-tokens", "6", "--json")
    facts = json.loads(out)
    assert code == 0
    assert set(facts) >= {
        *("tokens", "text", "prompt_tokens", "stages", "decode", "traffic", "peak_device_bytes", "driver", "device")
    }
    assert set(facts["decode"]) >= {"predict_ms", "wall_ms", "upload_ms"}
    assert set(facts["traffic"]) >= {"host_to_device_bytes", "device_to_host_bytes"}
    assert facts["driver"] == "emulator"
    assert set(facts["stages"]) == {"vision", "prefill"}


def test_the_ways_of_running_agree(capsys):
    ways = [(), ("--state", "host"), ("--kv", "growing"), ("--speculate", "3"), ("--device", "ascend:3")]
    answers = {
        tuple(
            json.loads(run(capsys, *PROMPT, "--max-new-tokens", "8", "--numerics", "f32", "--json", *way)[1])["tokens"]
        )
        for way in ways
    }
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--image", "missing.png"), "does not exist"),
        (("--image", __file__), "not a picture"),
        (("--device", "gpu:0"), "unknown device 'gpu:0'"),
        (("--bundle", "no/such/place"), "no/such/place"),
        (("--driver", "torch"), "unknown driver 'torch'"),
        (("--state", "elsewhere"), "state is 'elsewhere'"),
        (("--kv", "paged"), "kv is 'paged'"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("--speculate", "9"), "speculate is 9"),
        (("--prompt", ""), "prompt is empty"),
        (("--prompt", "word " * 900), "at most 512"),
    ],
)
def test_a_mistake_is_said_in_one_line_with_exit_code_2(capsys, arguments, words):
    code, _, err = run(capsys, "run", "--prompt", "hello", "--driver", "emulator", *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_a_recording_can_be_summarised_replayed_traced_and_compared(capsys, tmp_path):
    ledgers = [str(tmp_path / name) for name in ("a.ledger", "b.ledger")]
    for ledger, state in zip(ledgers, ("resident", "host"), strict=True):
        assert run(capsys, *PROMPT, "--max-new-tokens", "6", "--state", state, "--record", ledger)[0] == 0
    code, out, _ = run(capsys, "summary", ledgers[0])
    assert code == 0
    assert "WRONG" not in out
    assert run(capsys, "replay", ledgers[0])[1] == run(capsys, "replay", ledgers[1])[1]
    assert run(capsys, "diff", ledgers[0], ledgers[0])[0] == 0
    assert run(capsys, "diff", ledgers[0], ledgers[1])[0] == 1
    trace = json.loads(run(capsys, "trace", ledgers[0], "--json")[1])["path"]
    assert json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]
    code, _, err = run(capsys, "summary", str(tmp_path / "none.ledger"))
    assert code == 2
    assert "none.ledger" in err


def test_the_module_runs_as_a_program_and_survives_a_reader_that_leaves():
    command = [sys.executable, "-m", "qwen_npu.cli", "run", "--prompt", "hello", "--max-new-tokens", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 0
