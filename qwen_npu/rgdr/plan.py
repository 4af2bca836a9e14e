"""What one call of the op reads and writes, and every check of its integers. Knows nothing of the arrays computed on.

A plan is made before anything is written: either all of it holds, or an error names the sequence and the allowed range.
`kernels/native/src/plan.cpp` makes the same plan for graphs; a test holds the two together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from qwen_npu.errors import OpError

MAX_TOKENS = 8
"""Tokens of one sequence in one call: MAX_MTP, which sizes the on-chip buffers of the 310P kernel."""


@dataclass(slots=True)
class Plan:
    """Per sequence: first token, tokens to run (0: none), slot to start from. Per token: slot to write, or -1.

    Attributes:
        blank: token ranges whose out rows are zero (sequences on the pad slot).
        refused: token ranges whose out rows are NaN (sequences that failed a check under on_error="skip").
        problems: why, by sequence.
    """

    start: list[int]
    length: list[int]
    read: list[int]
    write: list[int]
    blank: list[tuple[int, int]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    problems: dict[int, OpError] = field(default_factory=dict)

    def packed(self) -> array[int]:
        """start, length, read and write, one after another, as the native kernel takes them."""
        return array("q", self.start + self.length + self.read + self.write)


def plan_recurrent(
    lengths: Sequence[int],
    indices: Sequence[int] | None,
    rows: Sequence[Sequence[int]] | None,
    accepted: Sequence[int] | None,
    tokens: int,
    slots: int,
    pad_slot: int | None = None,
    skip: bool = False,
) -> Plan:
    """Plans one call of RecurrentGatedDeltaRule (the contract stands in kernels/README.md).

    Args:
        lengths: [B] tokens of each sequence; their sum is `tokens`.
        indices: [tokens] flat slots, or None when `rows` is given.
        rows: [B][W] slots, W >= every length.
        accepted: [B] or None; a sequence goes on from position accepted - 1 of its row, 0 reads like 1.
        tokens: T, the number of packed tokens.
        slots: S, the number of slots in the pool.
        pad_slot: a sequence whose slots are all this one is left out.
        skip: note what is wrong in `problems` and leave that sequence out, instead of raising it.

    Raises:
        OpError: the first thing that is wrong, unless `skip`.
    """
    problems: dict[int, OpError] = {}
    spans: list[tuple[int, int]] = []
    end = 0
    for i, n in enumerate(lengths):
        if not 1 <= n <= MAX_TOKENS:
            problems[i] = OpError(
                f"sequence {i}: actual_seq_lengths is {n}",
                expected=f"a length (not a prefix sum) in 1..{MAX_TOKENS}",
                fix=f"split longer sequences into calls of at most {MAX_TOKENS} tokens, and leave empty ones out",
            )
            if not skip:
                raise problems[i]
        spans.append((end, end + max(n, 0)))
        end += max(n, 0)
    if end != tokens:
        wrong_sum = OpError(
            f"actual_seq_lengths add up to {end}, but there are {tokens} tokens",
            expected="their sum to be the first axis of query",
            fix="give the length of each sequence in tokens",
        )
        if not skip:
            raise wrong_sum
        for i, (_, last) in enumerate(spans):
            if last > tokens:
                problems.setdefault(i, wrong_sum)

    read = [0] * len(spans)
    write = [-1] * tokens
    padded: set[int] = set()
    for i, (first, last) in enumerate(spans):
        if i in problems:
            continue
        n = last - first
        row = rows[i] if rows is not None else indices[first:last]  # type: ignore[index]
        if pad_slot is not None and all(slot == pad_slot for slot in row):
            padded.add(i)
            continue
        try:
            depth = 1 if accepted is None else accepted[i]
            read[i] = _read_slot(i, n, row, depth, slots, pad_slot)
        except OpError as error:
            if not skip:
                raise
            problems[i] = error
            continue
        write[first:last] = row[:n]
    if len(spans) > 1:
        clashes = _clashes(spans, read, write, problems.keys() | padded)
        if clashes and not skip:
            raise next(iter(clashes.values()))
        problems.update(clashes)

    plan = Plan([first for first, _ in spans], [last - first for first, last in spans], read, write)
    for i in padded:
        plan.length[i] = 0
        plan.blank.append(spans[i])
    for i in problems:
        first, last = spans[i]
        plan.start[i] = plan.length[i] = plan.read[i] = 0
        first, last = min(first, tokens), min(last, tokens)
        write[first:last] = [-1] * (last - first)
        plan.refused.append((first, last))
    if end < tokens:
        plan.refused.append((end, tokens))  # tokens of no sequence
    plan.problems = problems
    return plan


def _read_slot(i: int, n: int, row: Sequence[int], accepted: int, slots: int, pad_slot: int | None) -> int:
    """The slot that sequence i starts from; checks every slot that the call uses of its row."""
    width = len(row)
    if n > width:
        raise OpError(
            f"sequence {i}: {n} tokens, but its row has {width} slots",
            expected="a slot for the state after each token",
            fix="make rows as wide as the longest sequence",
        )
    if not 0 <= accepted <= width:
        raise OpError(
            f"sequence {i}: num_accepted_tokens is {accepted}",
            expected=f"0..{width}",
            fix="with a short last draft pass rows [B, W]: then up to W may be accepted"
            if accepted > width
            else "pass the number of accepted tokens, the certain one included",
        )
    column = max(accepted, 1) - 1
    for j in range(n) if column < n else (*range(n), column):
        slot = row[j]
        if not 0 <= slot < slots:
            raise OpError(
                f"sequence {i}: slot {slot} at position {j}",
                expected=f"0..{slots - 1}: the pool has {slots} slots",
                fix="pass slots of this pool; pad sequences need pad_slot",
            )
        if slot == pad_slot:
            raise OpError(
                f"sequence {i}: the pad slot {slot} at position {j} among others",
                expected="all slots of a sequence to be pad_slot, or none",
                fix="give the sequence a row of its own slots",
            )
    return row[column]


def _clashes(spans: list[tuple[int, int]], read: list[int], write: list[int], left_out: set[int]) -> dict[int, OpError]:
    """Sequences that write a slot another one writes or starts from; both sides of each clash."""
    found: dict[int, OpError] = {}
    owner: dict[int, int] = {}
    for i, (first, last) in enumerate(spans):
        if i in left_out:
            continue
        for slot in write[first:last]:
            other = owner.setdefault(slot, i)
            if other != i:
                error = OpError(
                    f"slot {slot} is written by sequences {other} and {i}",
                    expected="each slot to belong to one sequence",
                    fix="give every sequence its own row of slots; flat indices of sequences shorter than their row "
                    "run into the next row, pass rows [B, W] instead",
                )
                found.setdefault(other, error)
                found.setdefault(i, error)
    for i in range(len(spans)):
        if i in left_out:
            continue
        other = owner.get(read[i], i)
        if other != i:
            error = OpError(
                f"sequence {i} starts from slot {read[i]}, which sequence {other} writes",
                expected="a sequence to start from a slot of its own row",
                fix="check num_accepted_tokens and the rows of both sequences",
            )
            found.setdefault(i, error)
            found.setdefault(other, error)
    return found


def plan_chunk(lengths: Sequence[int], tokens: int, states: int) -> Plan:
    """Plans ChunkGatedDeltaRule: sequence i goes from state i to state i, over any number of tokens.

    Raises:
        OpError: another number of states than of lengths, a negative length, or a sum that is not `tokens`.
    """
    if len(lengths) != states:
        raise OpError(
            f"{len(lengths)} lengths for {states} initial states",
            expected="one length for each state",
            fix="pass actual_seq_lengths [B] and initial_state [B, NV, DV, DK]",
        )
    start: list[int] = []
    write = [-1] * tokens
    end = 0
    for i, n in enumerate(lengths):
        if n < 0:
            raise OpError(
                f"sequence {i}: actual_seq_lengths is {n}", expected="0 or more", fix="give a length in tokens"
            )
        start.append(end)
        end += n
        if n > 0 and end <= tokens:
            write[end - 1] = i
    if end != tokens:
        raise OpError(
            f"actual_seq_lengths add up to {end}, but there are {tokens} tokens",
            expected="their sum to be the first axis of query",
            fix="give the length of each sequence in tokens",
        )
    return Plan(start, list(lengths), list(range(states)), write)
