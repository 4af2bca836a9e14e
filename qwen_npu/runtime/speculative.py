"""Speculative decoding on pools of slots: draft, verify, accept; several sequences at once, joining and leaving.

A verify runs the last certain token and its drafts in one call and stores the state after each of them in its own slot.
Rejecting a draft undoes nothing and copies nothing: the next call reads at the slot of the last accepted token and
writes the row's slots again; the KV is rolled back by position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from qwen_npu.errors import SlotError, StateError, UsageError
from qwen_npu.ledger.events import now_ns
from qwen_npu.rgdr.pool import Batch, SlotTable
from qwen_npu.runtime.chooser import TokenChooser, greedy
from qwen_npu.runtime.context import RunContext
from qwen_npu.runtime.drafts import Drafter, PromptLookup
from qwen_npu.runtime.inputs import Feed, choose_bucket
from qwen_npu.runtime.meter import Meter, told
from qwen_npu.runtime.peeks import tell_peek
from qwen_npu.runtime.prompt import finished, prompt_stages
from qwen_npu.runtime.results import StepResult
from qwen_npu.runtime.stages import PrefillResult
from qwen_npu.runtime.states import StateArrays, hand_over
from qwen_npu.runtime.verify import VerifyGraphs

MOST_DRAFTS = 7
"""The op takes at most 8 tokens of a sequence in one call: the certain one and 7 drafts."""


@dataclass
class Member:
    """One sequence of a group.

    Attributes:
        row: its row in the batch and in the KV.
        sequence: its id in the slot table.
        tokens: how many tokens its states hold.
        delta: what its positions add (see `positions.py`).
        prompt_tokens: length of its prompt.
        chooser: its answer so far; `chooser.stop` says that it has ended.
        drafted, accepted, verifies: sums over its verifies.
    """

    row: int
    sequence: int
    tokens: int
    delta: int
    prompt_tokens: int
    chooser: TokenChooser
    drafter: Drafter
    drafted: int = 0
    accepted: int = 0
    verifies: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return self.chooser.tokens


class SpeculativeGroup:
    """Up to `sequences` sequences that decode together on one set of pools.

    The graph writes every row's slots, so there are exactly as many slots as rows need: a row without a sequence writes
    to slots that are free. A sequence that has ended keeps its states until the group's next step.

    Args:
        context: gives bundle, driver and numerics; the device must keep tensors resident. `Session.group` makes one.
        drafts: K, most drafts a verify; a sequence's row has K + 1 slots.
        sequences: rows of the batch.
        poison: fill the slots of a sequence that leaves with NaN.

    Raises:
        UsageError: K outside 1..7, fewer than one sequence, or a target without resident tensors.
    """

    def __init__(self, context: RunContext, *, drafts: int, sequences: int = 1, poison: bool = True) -> None:
        if not 1 <= drafts <= MOST_DRAFTS:
            raise UsageError(f"{drafts} drafts a verify", expected=f"1..{MOST_DRAFTS}")
        if sequences < 1:
            raise UsageError(f"a group of {sequences} sequences", expected="at least 1")
        if "resident" not in context.driver.capabilities:
            raise UsageError(
                f"speculative decoding on {context.driver.device}, which has no resident tensors",
                expected="a device that keeps the pools: 'ascend:N'",
            )
        self._context = context
        self._driver = context.driver
        self._width = drafts + 1
        self._poison = poison
        self._capacity = context.bundle.capacity
        self._steps = 0
        self._rows: list[Member | None] = [None] * sequences
        self._leaving: list[tuple[Member, tuple[int, ...]]] = []
        self.table = SlotTable(sequences * self._width, self._width, place=self._driver)
        self._graphs = VerifyGraphs(context, self._width, sequences, self.table.slots)

    @property
    def build_ms(self) -> float:
        """Time spent on loading and building models so far."""
        return self._graphs.build_ms

    @property
    def members(self) -> tuple[Member, ...]:
        """The sequences of the group, by row."""
        return tuple([member for member in self._rows if member is not None])

    @property
    def tokens(self) -> int:
        """Tokens that the first member's states hold."""
        return self.members[0].tokens if self.members else 0

    # -- joining and leaving

    def join(
        self,
        prompt: str | Sequence[int],
        image: Any = None,
        *,
        max_new_tokens: int = 64,
        ignore_eos: bool = False,
        drafter: Drafter | None = None,
    ) -> Member:
        """Runs vision and prefill for a new sequence and puts its states into slots of its own.

        Raises:
            SlotError: every row is taken. Others as `Session.stream`.
        """
        self._free_row()
        context = self._context
        feed = context.inputs.feed(prompt, image)
        bucket = choose_bucket(len(feed.tokens), context.bundle.buckets, context.bundle.capacity)
        chooser = context.chooser(max_new_tokens, ignore_eos=ignore_eos)
        prefill = finished(prompt_stages(context, feed, bucket, chooser))
        return self.admit(feed, prefill, bucket, chooser, drafter)

    def admit(
        self, feed: Feed, prefill: PrefillResult, bucket: int, chooser: TokenChooser, drafter: Drafter | None = None
    ) -> Member:
        """Puts a prefilled sequence into a free row and the first slot of its row of slots."""
        row = self._free_row()
        self._listen()
        states = hand_over(prefill.states, prefill.pads, bucket, self._capacity)
        sequence = self.table.allocate(f"sequence in row {row}")
        tokens = len(feed.tokens)
        member = Member(row, sequence, tokens, feed.delta, tokens, chooser, drafter or PromptLookup())
        self._graphs.write(row, self.table.row(sequence)[0], states)
        self._graphs.see(row, 0, self._capacity, False)
        self._graphs.see(row, 0, tokens, True)
        member.drafter.extend(feed.tokens.tolist())
        member.drafter.extend(chooser.tokens)
        self._rows[row] = member
        return member

    def leave(self, member: Member) -> None:
        """Ends a sequence: its slots are freed and poisoned, at once or when the verify under way has ended.

        Raises:
            SlotError: it has left already.
        """
        if self._rows[member.row] is not member:
            raise SlotError(f"the sequence in row {member.row} has left already", expected="a member of the group")
        self._listen()
        slots = self.table.row(member.sequence)
        if self.table.free(member.sequence):
            self._vacate(member, slots)
        else:
            self._leaving.append((member, slots))

    def _listen(self) -> None:
        """Slot events go to the recording, if there is one: without it they are not even made."""
        self.table.sink = self._driver.sink

    def _free_row(self) -> int:
        for row, member in enumerate(self._rows):
            if member is None:
                return row
        raise SlotError(
            f"all {len(self._rows)} rows of the group hold a sequence",
            expected="a free row",
            fix="let a sequence leave first, or make a group of more sequences",
        )

    def _vacate(self, member: Member, slots: Sequence[int]) -> None:
        self._rows[member.row] = None
        self._graphs.see(member.row, 0, self._capacity, False)
        if self._poison:
            for slot in slots:
                self._graphs.write(member.row, slot, self._graphs.nan_states())
                detail = {"slot": slot, "generation": self.table.generation(slot), "poison": True}
                self._driver.emit("slot_write", buffer=self.table.name, detail=detail)

    # -- one step

    def step(self) -> StepResult:
        """Drafts, verifies and accepts for every member that has not ended; those that have leave first.

        Returns:
            one StepResult for all: `drafted` and `accepted` are sums, `tokens`, `token` and `text` the first member's.

        Raises:
            UsageError: no member is active.
        """
        for member in self.members:
            if member.chooser.stop:
                self.leave(member)
        active = self.members
        if not active:
            raise UsageError("no sequence of the group is active", expected="a member that has not ended")
        self._listen()
        driver = self._driver
        driver.stage, driver.step = "verify", self._steps
        meter = Meter(driver)
        length = self._draft(active)
        batch, logits, predict_ms = self._verify(active, length)
        results = [self._accept(member, logits[member.row]) for member in active]
        self._settle(batch, [len(result["tokens"]) for result in results])
        self._steps += 1
        step = meter.step(
            "verify",
            driver.step,
            predict_ms=predict_ms,
            drafted=sum([len(member.drafts) for member in active]),
            accepted=sum([len(result["tokens"]) - 1 for result in results]),
            **results[0],
        )
        told(meter, step, active[0].prompt_tokens)
        if self._context.peek:
            self._look(active)
        return step

    def _draft(self, active: Sequence[Member]) -> int:
        """Draws every member's drafts. Returns how many tokens the verify takes: the row's width, or 1 without drafts.

        Short drafts are padded to the width; where a member has fewer positions left than that, nobody drafts.
        """
        room = self._capacity - max([member.tokens for member in active]) >= self._width
        length = 1
        for member in active:
            limit = min(self._width - 1, member.chooser.remaining_tokens - 1) if room else 0
            member.drafts = member.drafter.draft(limit)[:limit] if limit > 0 else []
            if member.drafts:
                length = self._width
            if self._driver.recording:
                self._tell("draft", member, tokens=member.drafts)
        return length

    def _verify(self, active: Sequence[Member], length: int) -> tuple[Batch, np.ndarray, float]:
        """Runs the graph. Returns the slot table's batch, logits [B, length, vocab] and predict_ms."""
        start = now_ns()
        feed = self._graphs.feed(length)
        batch = self.table.begin([member.sequence for member in active], [length] * len(active))
        try:
            for member, slots, accepted in zip(active, batch.slots, batch.depths, strict=True):
                fed = (member.chooser.token, *member.drafts)
                feed.row(member.row, fed, member.tokens, member.delta, slots, accepted)
            if len(active) < len(self._rows):
                spare = iter(self.table.free_slots)
                for row, empty in enumerate(self._rows):
                    if empty is None:
                        feed.empty_row(row, [next(spare) for _ in range(self._width)])
            self._graphs.predict(length)
        except BaseException:
            self.table.abandon(batch)
            raise
        predict_ms = (now_ns() - start) / 1e6
        return batch, self._graphs.logits(length), predict_ms

    def _accept(self, member: Member, logits: np.ndarray) -> dict[str, Any]:
        """Takes the choices that are proven: a draft is right where it is the choice after the token before it."""
        choices = greedy(logits[: 1 + len(member.drafts)]).tolist()
        right = 0
        while right < len(member.drafts) and member.drafts[right] == choices[right]:
            right += 1
        full = member.tokens + right + 1 >= self._capacity
        taken = member.chooser.take(choices[: right + 1], full=full)
        count = len(taken["tokens"])
        if member.chooser.want_logits:
            taken["logits"] = logits[:count]
        self._graphs.see(member.row, member.tokens, member.tokens + count, True)
        member.tokens += count
        member.drafted += len(member.drafts)
        member.accepted += count - 1
        member.verifies += 1
        member.drafter.extend(taken["tokens"])
        if self._driver.recording:
            self._tell("verify", member, accepted=count - 1, tokens=list(taken["tokens"]))
        return taken

    def _settle(self, batch: Batch, taken: Sequence[int]) -> None:
        """Each sequence goes on from the slot of its last accepted token: that is the whole of the rollback."""
        self.table.end(batch, taken)
        for member, slots in self._leaving:
            self._vacate(member, slots)
        self._leaving.clear()

    def _tell(self, kind: Literal["draft", "verify"], member: Member, **facts: Any) -> None:
        facts |= {"sequence": member.sequence, "row": member.row, "drafted": len(member.drafts)}
        self._driver.emit(kind, detail=facts)

    # -- states

    def _look(self, active: Sequence[Member]) -> None:
        """Peeks at the slot each member goes on from; the ledger gets the first member's, as without drafts."""
        start = now_ns()
        slots = [self.table.read_slot(member.sequence) for member in active]
        conv, recurrent, kv = self._graphs.peek(slots, self._newest())
        first = active[0].row
        tell_peek(self._driver, start, {"conv": conv[:, 0], "recurrent": recurrent[:, 0], "kv": kv[:, first]})

    def sweep(self) -> np.ndarray:
        """Peeks at every slot of the pools, on request: recurrent figures [linear layer, slot, head, 3].

        The last axis is norm, largest magnitude and count of non-finite values; the ledger gets them as "pool.FIGURE".
        """
        start = now_ns()
        _, recurrent, _ = self._graphs.peek(range(self.table.slots), self._newest())
        tell_peek(self._driver, start, {"pool": recurrent})
        return recurrent

    def _newest(self) -> list[int]:
        return [0 if member is None else member.tokens - 1 for member in self._rows]

    def read(self, member: Member | None = None) -> StateArrays:
        """A member's states on the host (the first member's if not given): an explicit download of whole pools."""
        members = self.members
        if member is None:
            if not members:
                raise StateError("the group holds no sequence", expected="a member")
            member = members[0]
        return self._graphs.read(member.row, self.table.read_slot(member.sequence))

    def close_models(self) -> None:
        """Releases the graphs; the states stay readable until `free`."""
        self._graphs.close_models()

    def free(self) -> None:
        """Releases the graphs and gives pools and KV back."""
        self._graphs.free()
