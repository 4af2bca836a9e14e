from __future__ import annotations

import json

import numpy as np
import pytest

from qwen_npu.errors import UsageError
from qwen_npu.ledger.diff import diff, diff_instants
from qwen_npu.ledger.store import Ledger
from tests.unit.ledger.runs import KV_TOKEN_BYTES, PROMPT, Run, norms, peeks, recorded


def run_with_peeks(layer: int | None = None, head: int | None = None, value: float = 0.0, at: int = 2) -> Ledger:
    ledger = Ledger()
    peeks(
        ledger,
        ({"recurrent.norm": norms(step, layer if step >= at else None, head, value)} for step in range(4)),
    )
    return ledger


def test_a_run_equals_itself() -> None:
    facts = diff(recorded(4), recorded(4))
    assert facts["equal"]
    assert facts["first_token"] is None
    json.dumps(facts)


def test_two_policies_of_one_model() -> None:
    facts = diff(recorded(3), recorded(3, kv="growing"))
    assert not facts["equal"]
    assert facts["meta"] == {"kv": {"before": "fixed", "after": "growing"}}
    assert facts["buffers"]["only_before"] == ["kv.a", "kv.b"]
    assert facts["buffers"]["only_after"] == ["kv"]
    assert facts["first_token"] is None
    assert facts["traffic"]["H2D"]["before"] - facts["traffic"]["H2D"]["after"] == (16 - PROMPT) * KV_TOKEN_BYTES


def test_the_first_token_that_differs() -> None:
    ledgers = []
    for tokens in ([10, 11, 12, 13], [10, 11, 99, 13]):
        ledger = Ledger()
        Run(ledger).generate(4, tokens)
        ledgers.append(ledger)
    facts = diff(*ledgers)
    assert facts["first_token"] == {"number": 3, "stage": "decode", "step": 2, "before": 12, "after": 99}
    assert not facts["equal"]


def test_a_run_that_ended_earlier() -> None:
    facts = diff(recorded(3), recorded(2))
    assert facts["first_token"] == {"number": 3, "stage": "decode", "step": 2, "before": 12, "after": None}


def test_the_first_layer_and_head_that_differ() -> None:
    facts = diff(run_with_peeks(), run_with_peeks(1, 3, 310.5))
    first = facts["first_peek"]
    assert (first["name"], first["step"], first["layer"], first["head"]) == ("recurrent.norm", 2, 1, 3)
    assert (first["before"], first["after"], first["max_abs"]) == (312.0, 310.5, 1.5)
    changed = facts["peeks"]["changed"]["recurrent.norm"]
    assert changed == {"max_abs": 2.5, "steps": 2, "first_step": 2, "run": 0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_further_than_any_distance(value: float) -> None:
    facts = diff(run_with_peeks(), run_with_peeks(0, 0, value))
    assert facts["first_peek"]["max_abs"] is None
    assert facts["first_peek"]["after"] == str(np.float64(value))
    assert facts["peeks"]["changed"]["recurrent.norm"]["max_abs"] is None
    json.dumps(facts, allow_nan=False)
    assert diff(run_with_peeks(0, 0, value), run_with_peeks(0, 0, value))["equal"]


def test_peeks_of_one_run_only_and_of_another_shape() -> None:
    one, other = Ledger(), Ledger()
    peeks(one, iter([{"a": np.ones(2), "b": np.ones(2)}, {"b": np.ones(2)}]))
    peeks(other, iter([{"b": np.ones(3), "c": np.ones(1)}]))
    facts = diff(one, other)
    assert facts["peeks"]["only_before"] == ["a", "b of run 0, step 1"]
    assert facts["peeks"]["only_after"] == ["c"]
    assert facts["first_peek"]["before"] == [2]


def test_two_instants_of_one_run() -> None:
    ledger = recorded(3, kv="growing")
    facts = diff_instants(ledger, 2, 4)
    assert (facts["before"], facts["after"]) == ("decode 0", "decode 2")
    assert facts["buffers"]["only_before"] == ["kv#1"]
    assert facts["buffers"]["only_after"] == ["kv#3"]
    assert facts["live"] == {}  # two steps: the halves are back
    assert facts["text"] == " t11 t12"
    assert diff_instants(ledger, 2, 3)["live"]["conv"] == {"before": "conv.b", "after": "conv.a"}
    assert diff_instants(ledger, 2, 3)["buffers"]["changed"]["conv.a#0"]["role"]["after"] == "live"
    with pytest.raises(UsageError):
        diff_instants(ledger, 3, 2)
