from __future__ import annotations

import json

import pytest

from qwen_npu.cli import main
from qwen_npu.data import tiny_checkpoint
from qwen_npu.errors import UsageError
from qwen_npu.planner import count_parameters, make_plan
from qwen_npu.spec import ModelSpec, preset
from tests.unit.test_spec import CONFIG


def test_the_published_sizes_of_the_4b_model():
    plan = make_plan("4b", "300i-duo", 4096)
    assert round(plan.states["conv"] / 2**20, 1) == 1.1
    assert plan.states["recurrent"] == 48 * 2**20
    assert plan.states["kv_per_token"] == 32 * 2**10
    assert plan.states["kv"] == 4096 * 32 * 2**10
    assert all(plan.fits.values())


def test_parameters_are_those_of_the_names():
    """0.8B and 4B are named after their size."""
    assert 0.8e9 < sum(count_parameters(preset("0.8b")).values()) < 0.9e9
    assert 4.2e9 < count_parameters(preset("4b"))["language"] < 4.3e9


def test_an_untied_head_costs_another_vocabulary():
    untied = ModelSpec.from_config(CONFIG)
    tied = ModelSpec.from_config({**CONFIG, "tie_word_embeddings": True})
    difference = count_parameters(untied)["language"] - count_parameters(tied)["language"]
    assert difference == untied.vocab * untied.hidden


def test_the_longest_capacity_fits_and_one_token_more_does_not():
    longest = make_plan("4b", "300i-duo", 1).longest_capacity_tokens
    assert make_plan("4b", "300i-duo", longest).fits["decode"]
    assert not make_plan("4b", "300i-duo", longest + 1).fits["decode"]


def test_pools_grow_with_drafts_and_sequences():
    one = make_plan("4b", "300i-duo", 1024, drafts=1).speculation
    many = make_plan("4b", "300i-duo", 1024, drafts=3, sequences=4).speculation
    assert many["state_pools"] == 8 * one["state_pools"]
    assert many["kv_halves"] == 4 * one["kv_halves"]


@pytest.mark.parametrize(
    "arguments",
    [("4b", "a100", 4096), ("4b", "300i-duo", 0), ("9b", "300i-duo", 16)],
    ids=["device", "capacity", "model"],
)
def test_what_cannot_be_planned_is_refused(arguments):
    with pytest.raises(Exception, match=r"Expected"):
        make_plan(*arguments)
    with pytest.raises(UsageError):
        make_plan("4b", "300i-duo", 16, drafts=8)


def test_the_plan_of_the_tiny_model_is_what_a_run_allocates():
    """To the byte: all buffers of a decoding session, and of one with drafts."""
    from qwen_npu.bundle import open_bundle
    from qwen_npu.runtime.session import Session

    bundle = open_bundle("tiny")
    plan = make_plan(tiny_checkpoint(), "300i-duo", bundle.capacity, drafts=3)
    with Session(bundle, driver="emulator") as plain, Session(bundle, driver="emulator", speculate=3) as drafting:
        for session in (plain, drafting):
            session.generate([5, 6, 7, 5, 6, 7, 5, 6], max_new_tokens=12, ignore_eos=True)
        assert plain.driver.live_bytes == plan.decode["state_halves"] + plan.decode["logits"]
        pools = sum(size for name, size in plan.speculation.items() if name not in ("weights", "logits"))
        width = drafting.speculate + 1
        used = {pools + tokens * bundle.spec.logits_bytes() for tokens in (1, width, 1 + width)}
        assert drafting.driver.live_bytes in used


def test_the_command_prints_states_as_json(capsys):
    assert main(["plan", "--model", "4b", "--device", "300i-duo", "--capacity", "4096", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["states"]["recurrent"] == 48 * 2**20
