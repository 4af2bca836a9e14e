"""Speculative decoding against decoding without drafts: same tokens, same states, at every depth and interleaving."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen_npu import data
from qwen_npu.bundle import open_bundle
from qwen_npu.errors import SlotError, UsageError
from qwen_npu.rgdr.pool import SlotTable
from qwen_npu.runtime.drafts import PromptLookup, ScriptedDrafter
from qwen_npu.runtime.inputs import choose_bucket
from qwen_npu.runtime.prompt import finished, prompt_stages
from qwen_npu.runtime.results import GenerateResult
from qwen_npu.runtime.session import Session
from qwen_npu.runtime.speculative import Member, SpeculativeGroup
from qwen_npu.runtime.states import StateArrays
from tests.golden import Golden, golden_prompts

QUICK = 6
STEPS = 24
"""Tokens of an answer in tests that go on after its end."""


def quick_prompts() -> tuple[Golden, ...]:
    """A few of the prompts: short ones and long ones, with and without a picture."""
    prompts = golden_prompts()
    return prompts[:: max(1, len(prompts) // QUICK)]


def session(numerics: str = "f32", **options) -> Session:
    return Session(open_bundle("tiny"), driver="emulator", numerics=numerics, **options)


def wrong(token: int) -> int:
    return (token + 1) % 300


def scripted(answer, right) -> ScriptedDrafter:
    """Drafts from the known answer; `right` is the depth of the first wrong draft, or a function of the call."""
    return ScriptedDrafter(answer, right=right if callable(right) else lambda call: right, wrong=wrong)


def run(prompt: Golden, numerics: str, drafts: int, drafter=None, **options) -> GenerateResult:
    with session(numerics, speculate=drafts) as open_session:
        options = {"max_new_tokens": len(prompt.tokens), **options}
        return open_session.generate(prompt.prompt_tokens, prompt.image, drafter=drafter, **options)


@cache
def plain(prompt_name: str, numerics: str, ignore_eos: bool = True) -> tuple[int, ...]:
    """Tokens without drafts, going on after the end."""
    prompt = named(prompt_name)
    with session(numerics) as open_session:
        return open_session.generate(
            prompt.prompt_tokens, prompt.image, max_new_tokens=STEPS, ignore_eos=ignore_eos
        ).tokens


def named(name: str) -> Golden:
    return next(prompt for prompt in golden_prompts() if prompt.name == name)


# tokens


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_prompt_lookup_changes_no_token(drafts):
    for prompt in quick_prompts():
        assert list(run(prompt, "f32", drafts).tokens) == prompt.tokens


@pytest.mark.parametrize(("drafts", "right"), [(1, 0), (3, 0), (3, 2), (7, 3), (7, 7)])
def test_drafts_that_are_wrong_at_a_depth_change_no_token(drafts, right):
    for prompt in quick_prompts():
        assert list(run(prompt, "f32", drafts, scripted(prompt.tokens, right)).tokens) == prompt.tokens


def test_a_wrong_draft_at_every_depth_in_turn_on_device_numerics():
    for prompt in quick_prompts():
        drafter = scripted(prompt.tokens, lambda call: call % 4)
        tokens = list(run(prompt, "device", 3, drafter).tokens)
        assert tokens[: len(prompt.clear_tokens)] == prompt.clear_tokens


def test_an_accepted_draft_and_then_no_draft_at_all():
    """The state must come from the accepted slot, not from the first, although the next call has one token."""
    prompt = max(quick_prompts(), key=lambda golden: len(golden.tokens))
    drafter = ScriptedDrafter(prompt.tokens, drafts=lambda call: 3 if call % 2 == 0 else 0)
    result = run(prompt, "f32", 3, drafter)
    assert list(result.tokens) == prompt.tokens
    assert any(step.accepted for step in result.decode_steps)
    assert any(step.drafted == 0 for step in result.decode_steps)


def test_no_number_is_skipped_when_counting():
    counting = [prompt for prompt in golden_prompts() if "count" in prompt.name]
    assert len(counting) > 2
    for prompt in sorted(counting, key=lambda golden: len(golden.tokens))[-2:]:
        assert list(run(prompt, "f32", 7).tokens) == prompt.tokens


def test_the_end_of_text_inside_a_draft_ends_the_states_there():
    for prompt in quick_prompts()[:3]:
        with session(speculate=7) as drafted, session() as undrafted:
            options = {"max_new_tokens": len(prompt.tokens) + 8}
            beyond = [*prompt.tokens, 1, 2, 3, 4, 5, 6, 7]
            given = drafted.generate(prompt.prompt_tokens, prompt.image, drafter=ScriptedDrafter(beyond), **options)
            reference = undrafted.generate(prompt.prompt_tokens, prompt.image, **options)
            assert given.stop == reference.stop == "end"
            assert given.tokens == reference.tokens
            assert drafted.state_tokens == undrafted.state_tokens
            assert_equal_states(drafted.read_states(), undrafted.read_states(), undrafted.state_tokens)


def test_the_limit_cuts_a_draft_short():
    prompt = max(quick_prompts(), key=lambda golden: len(golden.tokens))
    for limit in range(1, 10):
        result = run(prompt, "f32", 7, ScriptedDrafter(prompt.tokens), max_new_tokens=limit)
        assert list(result.tokens) == prompt.tokens[:limit]


def test_a_full_cache_stops_as_without_drafts():
    prompt = quick_prompts()[0]
    length = len(prompt.prompt_tokens)
    bundle = open_bundle(data.tiny_checkpoint(), capacity=length + 9, buckets=(length,))
    answers = []
    for drafts in (0, 7):
        with Session(bundle, driver="emulator", numerics="f32", speculate=drafts) as small:
            result = small.generate(prompt.prompt_tokens, prompt.image, max_new_tokens=100, ignore_eos=True)
            assert result.stop == "capacity"
            answers.append(result.tokens)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 10


# states


def assert_equal_states(ours: StateArrays, reference: StateArrays, tokens: int) -> None:
    """f32: within 1e-5 of the largest value. What lies behind the last token is never read, and not compared."""
    pairs = [(ours.conv, reference.conv), (ours.recurrent, reference.recurrent)]
    pairs.append((ours.kv[..., :tokens, :], reference.kv[..., :tokens, :]))
    for given, wanted in pairs:
        assert given.shape == wanted.shape
        assert np.abs(given - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_after_every_accept_the_states_are_those_of_a_run_that_never_drafted(drafts):
    prompt = quick_prompts()[1]
    answer = plain(prompt.name, "f32")
    reference = states_along(prompt)
    depths = set()
    for right in range(drafts + 1):
        with session(speculate=drafts) as drafted:
            drafter = scripted(answer, right)
            options = {"max_new_tokens": STEPS, "ignore_eos": True, "drafter": drafter}
            for step in drafted.stream(prompt.prompt_tokens, prompt.image, **options):
                if step.stage == "verify":
                    depths.add(step.accepted)
                    wanted = reference[drafted.state_tokens]
                    assert_equal_states(drafted.read_states(), wanted, drafted.state_tokens)
    assert depths >= set(range(drafts + 1))


def states_along(prompt: Golden) -> dict[int, StateArrays]:
    """States without drafts by number of tokens."""
    along = {}
    with session() as undrafted:
        options = {"max_new_tokens": STEPS, "ignore_eos": True}
        for _ in undrafted.stream(prompt.prompt_tokens, prompt.image, **options):
            if undrafted.state_tokens:
                along[undrafted.state_tokens] = undrafted.read_states()
    return along


def test_one_call_of_up_to_eight_tokens_equals_as_many_single_steps():
    """Logits and all three states, with drafts that are all right."""
    prompt = quick_prompts()[1]
    answer = plain(prompt.name, "f32")
    options = {"max_new_tokens": 9, "ignore_eos": True, "logits": True}
    with session() as undrafted, session(speculate=7) as drafted:
        single = undrafted.generate(prompt.prompt_tokens, prompt.image, **options)
        once = drafted.generate(prompt.prompt_tokens, prompt.image, drafter=ScriptedDrafter(answer), **options)
        (verify,) = once.decode_steps
        assert len(verify.tokens) == 8
        wanted = np.stack([step.logits for step in single.decode_steps])
        assert np.abs(verify.logits - wanted).max() <= 1e-4
        assert_equal_states(drafted.read_states(), undrafted.read_states(), undrafted.state_tokens)


# several sequences


def admitted(group: SpeculativeGroup, open_session: Session, prompt: Golden, drafter=None, **options) -> Member:
    """Joins with the prefill of an earlier call: what a test of many sequences spends its time on otherwise."""
    feed, prefill, bucket, first = prefilled(open_session, prompt)
    chooser = open_session.context.chooser(options.pop("max_new_tokens", STEPS), **{"ignore_eos": True, **options})
    chooser.take([first])
    return group.admit(feed, prefill, bucket, chooser, drafter)


_PREFILLED: dict[tuple[str, str], tuple] = {}


def prefilled(open_session: Session, prompt: Golden):
    key = (prompt.name, open_session.context.numerics)
    if key not in _PREFILLED:
        feed = open_session.inputs.feed(prompt.prompt_tokens, prompt.image)
        bundle = open_session.bundle
        bucket = choose_bucket(len(feed.tokens), bundle.buckets, bundle.capacity)
        chooser = open_session.context.chooser(1)
        result = finished(prompt_stages(open_session.context, feed, bucket, chooser))
        _PREFILLED[key] = (feed, result, bucket, chooser.tokens[0])
    return _PREFILLED[key]


def in_turns(numerics: str, drafts: int, sequences: int, drafter_of) -> dict[str, list[int]]:
    """The answer of every golden prompt by name; each joins as soon as another has left its row."""
    answers: dict[str, list[int]] = {}
    waiting = list(golden_prompts())
    with session(numerics) as open_session:
        group = open_session.group(drafts=drafts, sequences=sequences)
        names: dict[int, str] = {}
        while waiting or group.members:
            while waiting and len(group.members) < sequences:
                prompt = waiting.pop(0)
                options = {"max_new_tokens": len(prompt.tokens), "ignore_eos": False}
                names[admitted(group, open_session, prompt, drafter_of(prompt), **options).sequence] = prompt.name
            if any(not member.chooser.stop for member in group.members):
                group.step()
            for member in group.members:
                if member.chooser.stop:
                    answers[names[member.sequence]] = member.answer
                    group.leave(member)
        group.free()
        assert open_session.driver.live_bytes == 0
    return answers


@pytest.mark.full
@pytest.mark.parametrize(("drafts", "sequences"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 2), (7, 3), (7, 4)])
def test_every_golden_prompt_with_lookup_and_with_every_depth(drafts, sequences):
    prompts = {prompt.name: prompt for prompt in golden_prompts()}
    tokens = {name: prompt.tokens for name, prompt in prompts.items()}
    assert in_turns("f32", drafts, sequences, lambda _: PromptLookup()) == tokens
    every_depth = in_turns(
        "f32", drafts, sequences, lambda prompt: scripted(prompt.tokens, lambda call: call % (drafts + 1))
    )
    assert every_depth == tokens
    device = in_turns("device", drafts, sequences, lambda _: PromptLookup())
    for name, prompt in prompts.items():
        assert device[name][: len(prompt.clear_tokens)] == prompt.clear_tokens


def test_four_sequences_with_drafts_of_their_own_give_their_own_answers():
    prompts = quick_prompts()[:4]
    with session() as open_session:
        group = open_session.group(drafts=3, sequences=4)
        members = []
        for row, prompt in enumerate(prompts):
            drafter = scripted(plain(prompt.name, "f32"), row)
            members.append(admitted(group, open_session, prompt, drafter))
        while any(not member.chooser.stop for member in members):
            group.step()
        for member, prompt in zip(members, prompts, strict=True):
            assert tuple(member.answer) == plain(prompt.name, "f32")
        group.free()
        assert open_session.driver.live_bytes == 0


def test_a_slot_used_again_carries_nothing_over_and_has_a_new_generation():
    """29 unrelated prompts through one row: each answer is its own."""
    prompts = golden_prompts()
    with session() as open_session:
        group = open_session.group(drafts=2)
        for turn in range(29):
            prompt = quick_prompts()[turn % len(quick_prompts())]
            member = admitted(group, open_session, prompt, max_new_tokens=6)
            assert [group.table.generation(slot) for slot in group.table.row(member.sequence)] == [turn + 1] * 3
            while not member.chooser.stop:
                group.step()
            assert tuple(member.answer) == plain(prompt.name, "f32")[:6]
            group.leave(member)
        group.free()
    assert prompts


def test_freed_slots_hold_nan_and_no_answer_shows_it():
    prompt = quick_prompts()[0]
    with session() as open_session:
        group = open_session.group(drafts=2, sequences=2)
        first, second = (admitted(group, open_session, prompt) for _ in range(2))
        group.step()
        slots = group.table.row(first.sequence)
        group.leave(first)
        read = [group._graphs.read(first.row, slot) for slot in slots]
        assert all(np.isnan(states.recurrent).all() and np.isnan(states.conv).all() for states in read)
        third = admitted(group, open_session, prompt)
        while not (second.chooser.stop and third.chooser.stop):
            group.step()
        assert tuple(second.answer) == tuple(third.answer) == plain(prompt.name, "f32")
        group.free()


def test_a_sequence_freed_while_it_is_verified_keeps_its_slots_until_the_end(monkeypatch):
    """No write may reach a slot that someone else could own by then."""
    prompt = quick_prompts()[0]
    with session() as open_session:
        group = open_session.group(drafts=2, sequences=2)
        leaving, staying = (admitted(group, open_session, prompt) for _ in range(2))
        slots = group.table.row(leaving.sequence)
        predict = group._graphs.predict

        def leave_meanwhile(length):
            group.leave(leaving)
            assert not set(slots) & set(group.table.free_slots)
            predict(length)

        monkeypatch.setattr(group._graphs, "predict", leave_meanwhile)
        group.step()
        monkeypatch.undo()
        assert set(slots) <= set(group.table.free_slots)
        assert np.isnan(group._graphs.read(leaving.row, slots[0]).recurrent).all()
        with pytest.raises(SlotError, match="left already"):
            group.leave(leaving)
        while not staying.chooser.stop:
            group.step()
        assert tuple(staying.answer) == plain(prompt.name, "f32")
        group.free()


def test_a_group_refuses_one_sequence_too_many_and_a_step_without_any():
    prompt = quick_prompts()[0]
    with session() as open_session:
        group = open_session.group(drafts=1)
        with pytest.raises(UsageError, match="no sequence"):
            group.step()
        admitted(group, open_session, prompt)
        with pytest.raises(SlotError, match="all 1 rows"):
            group.join(prompt.prompt_tokens, prompt.image)
        group.free()


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": 8},
        {"speculate": -1},
        {"speculate": 2, "kv": "growing"},
        {"speculate": 2, "state": "host"},
        {"speculate": 2, "device": "cpu"},
    ],
)
def test_settings_that_cannot_speculate_are_refused(options):
    with pytest.raises(UsageError, match="speculat"):
        session(**options)


@cache
def machine_session() -> Session:
    """One for every example of the machines: each makes a group of its own, which gives all its memory back."""
    return session()


class Interleavings(RuleBasedStateMachine):
    """Any order of joining, stepping (right, wrong, short and no drafts) and leaving; every answer is its own."""

    drafts = 3
    sequences = 3

    @initialize()
    def start(self):
        self.session = machine_session()
        self.group = self.session.group(drafts=self.drafts, sequences=self.sequences)
        self.members: list[tuple[Member, tuple[int, ...]]] = []

    @precondition(lambda self: len(self.group.members) < self.sequences)
    @rule(which=st.integers(0, QUICK - 1), right=st.integers(0, 3), most=st.integers(0, 3), limit=st.integers(2, STEPS))
    def join(self, which, right, most, limit):
        prompt = quick_prompts()[which % len(quick_prompts())]
        answer = plain(prompt.name, "f32")
        drafter = ScriptedDrafter(answer, right=lambda call: (call + right) % 4, wrong=wrong, drafts=lambda call: most)
        member = admitted(self.group, self.session, prompt, drafter, max_new_tokens=limit)
        self.members.append((member, answer[:limit]))

    @precondition(lambda self: any(not member.chooser.stop for member in self.group.members))
    @rule()
    def step(self):
        before = {member.row: (member.tokens, len(member.answer)) for member in self.group.members}
        self.group.step()
        for member in self.group.members:
            tokens, answered = before[member.row]
            assert member.tokens - tokens == len(member.answer) - answered >= 1

    @precondition(lambda self: self.group.members)
    @rule(which=st.integers(0, 2))
    def leave(self, which):
        members = self.group.members
        self.group.leave(members[which % len(members)])

    @invariant()
    def answers_are_their_own(self):
        for member, answer in getattr(self, "members", ()):
            assert tuple(member.answer) == answer[: len(member.answer)]

    @invariant()
    def every_slot_is_accounted_for(self):
        if not hasattr(self, "group"):
            return
        table: SlotTable = self.group.table
        live = [slot for member in self.group.members for slot in table.row(member.sequence)]
        assert sorted([*table.free_slots, *live, *table.snapshot_slots]) == list(range(table.slots))
        for member in self.group.members:
            assert 1 <= table.accepted(member.sequence) <= table.width

    def teardown(self):
        if hasattr(self, "group"):
            self.group.free()
            assert self.session.driver.live_bytes == 0


class ManyInterleavings(Interleavings):
    pass


QUICK_MACHINE = settings(
    max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = QUICK_MACHINE
TestManyInterleavings = pytest.mark.full(ManyInterleavings.TestCase)
TestManyInterleavings.settings = settings(QUICK_MACHINE, max_examples=150, stateful_step_count=40, derandomize=False)


# what a step moves, and that a fault shows


def test_a_step_copies_no_pool():
    prompt = quick_prompts()[0]
    with session(numerics="device", speculate=3) as open_session:
        spec, bundle = open_session.bundle.spec, open_session.bundle
        with open_session.record() as ledger:
            drafter = scripted(plain(prompt.name, "device"), 1)
            options = {"max_new_tokens": STEPS, "ignore_eos": True, "drafter": drafter}
            result = open_session.generate(prompt.prompt_tokens, prompt.image, **options)
        for step in result.decode_steps:
            length = 4 if step.drafted else 1
            assert step.host_to_device_bytes == 4 * (length + bundle.capacity + 4 * length + 1 + 4 + 1)
            assert step.device_to_host_bytes == length * spec.logits_bytes()
        first = result.decode_steps[0].step
        copies = [
            event
            for kind in ("upload", "download", "allocate")
            for event in ledger.events(kind=kind, stage="verify")
            if event.step > first and "pool" in event.buffer
        ]
        assert copies == []


def test_without_the_rollback_the_answer_is_another(monkeypatch):
    """The seeded fault: every step goes on from the first slot, whatever was accepted."""
    begin = SlotTable.begin
    monkeypatch.setattr(
        SlotTable, "begin", lambda self, *step: dataclasses.replace(begin(self, *step), depths=(1,) * len(step[0]))
    )
    prompt = max(quick_prompts(), key=lambda golden: len(golden.tokens))
    result = run(prompt, "f32", 3, scripted(prompt.tokens, lambda call: call % 4))
    assert list(result.tokens) != prompt.tokens


# drafting


def test_lookup_continues_a_repetition_and_finds_nothing_new():
    lookup = PromptLookup(longest=3, shortest=2)
    lookup.extend([1, 2, 3, 9, 1, 2])
    assert lookup.draft(2) == [3, 9]
    lookup.extend([7, 8])
    assert lookup.draft(2) == []
    lookup.extend([5, 5, 5])
    assert lookup.draft(4) == [5, 5, 5, 5]


def test_lookup_prefers_the_longer_and_the_later_match():
    lookup = PromptLookup(longest=3, shortest=1)
    lookup.extend([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    assert lookup.draft(1) == [4]
    lookup.extend([9, 2, 3])
    assert lookup.draft(1) == [5]
