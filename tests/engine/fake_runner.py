"""A device of hashes: memory whose content says which tokens were folded into it.

It runs the engine's schedules like the real runner, without jax. The token after a sequence is a
function of the fold that the sequence's own memory holds, so that whoever reads a wrong page, a
wrong state or a wrong row gets wrong tokens.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from k3jax.config import K3Config
from k3jax.engine.scheduler import RowOutput, Schedule
from tests.micro import MICRO

VOCAB = 32
STOP = 1
CONFIG: K3Config = MICRO.replace(vocab_size=VOCAB, max_position_embeddings=4096)


def model() -> SimpleNamespace:
    """What an engine asks of a model before its runner."""
    return SimpleNamespace(config=CONFIG, dtype=np.dtype(np.float32), mesh=None)


def fold(value: int, token: int) -> int:
    """The memory after one more token."""
    return (value * 6364136223846793005 + token * 1442695040888963407 + 1) % 2**64


def next_token(value: int, seed: int) -> int:
    """What the model says after this memory."""
    return ((value ^ (seed * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93 % 2**64 >> 40) % VOCAB


def oracle(prompt: list[int], max_tokens: int, stops: set[int], seed: int = 0) -> list[int]:
    """The tokens that a request must get, whatever else happens."""
    value, tokens = 0, []
    for token in prompt:
        value = fold(value, token)
    while len(tokens) < max_tokens:
        tokens.append(next_token(value, seed))
        if tokens[-1] in stops:
            break
        value = fold(value, tokens[-1])
    return tokens


@dataclass
class Row:
    """What the device's tables hold of a row."""

    table: list[int] = field(default_factory=list)
    slot: int = 0
    length: int = 0
    max_length: int = 0
    stopped: bool = True
    last: int = 0
    stops: frozenset[int] = frozenset()
    seed: int = 0


@dataclass
class FakeStep:
    schedule: Schedule
    results: list[RowOutput]


class FakeRunner:
    """The interface of `k3jax.engine.runner.Runner`."""

    fail = None  # (call number, "dispatch" or "results"): raises there, once
    poison: int | None = None  # a token whose memory is not finite

    def __init__(self, model, sizes, profile, options, *, exports_per_segment, **_):
        self.sizes, self.profile, self.options = sizes, profile, options
        self.exports_per_segment = exports_per_segment
        self.weights = "weights"
        self.calls = 0
        self.restart()

    def restart(self) -> None:
        size = self.sizes.page_size
        self.cells = [[-1] * size for _ in range(self.sizes.num_pages)]
        self.states = [(-1, -1)] * self.sizes.num_slots  # position, fold
        self.rows = [Row() for _ in range(self.sizes.num_rows + 1)]

    def dispatch(self, schedule: Schedule) -> FakeStep:
        self.calls += 1
        if self.fail == (self.calls, "dispatch"):
            raise RuntimeError("the device is broken")
        self._move(schedule.plan)
        if schedule.prefill:
            shape = self.profile.mixed_shape(
                len(schedule.decode),
                sum(row.num_tokens for row in schedule.prefill),
                len(schedule.prefill),
            )
            assert all(row.num_tokens == 1 for row in schedule.decode), shape
        elif schedule.decode:
            assert self.profile.decode_shape(len(schedule.decode))
        used = [row.sequence.row for row in (*schedule.decode, *schedule.prefill)]
        slots = [row.sequence.slot for row in (*schedule.decode, *schedule.prefill)]
        assert len({*used}) == len(used) and 0 not in used
        assert len({*slots}) == len(slots) and 0 not in slots
        results = [self._decode(row) for row in schedule.decode]
        results += [self._prefill(row) for row in schedule.prefill]
        return FakeStep(schedule, results)

    def results(self, step: FakeStep) -> list[RowOutput]:
        if self.fail == (self.calls, "results"):
            self.calls += 1
            raise RuntimeError("the device is broken")
        return step.results

    def _move(self, plan) -> None:
        for page in plan.zero_pages:
            self.cells[page] = [0] * self.sizes.page_size
        for slot in plan.zero_slots:
            self.states[slot] = (0, 0)
        for copy in plan.page_copies:
            cells = self.cells[copy.source][: copy.num_tokens]
            self.cells[copy.target] = cells + [0] * (self.sizes.page_size - copy.num_tokens)
        for copy in plan.slot_copies:
            assert self.states[copy.source][0] == copy.position, "a copy of another position"
            self.states[copy.target] = self.states[copy.source]

    def _read(self, row: Row) -> int:
        """The row's memory, which must be whole: pages and state of the same tokens."""
        position, value = self.states[row.slot] if row.length else (0, 0)
        assert position == row.length, f"the state is at {position}, the row at {row.length}"
        size = self.sizes.page_size
        if row.length:
            at = row.length - 1
            assert self.cells[row.table[at // size]][at % size] == value, "pages and state differ"
        return value

    def _write(self, row: Row, token: int) -> int:
        """Computes one token."""
        value = self._read(row)
        value = -7 if token == self.poison or value == -7 else fold(value, token)
        size = self.sizes.page_size
        self.cells[row.table[row.length // size]][row.length % size] = value
        row.length += 1
        self.states[row.slot] = (row.length, value)
        return value

    def _sample(self, row: Row, value: int) -> int:
        row.last = next_token(value, row.seed)
        row.stopped = row.last in row.stops or row.length + 1 >= row.max_length or value == -7
        return row.last

    def _decode(self, scheduled) -> RowOutput:
        row = self.rows[scheduled.sequence.row]
        for column, page in enumerate(scheduled.plan.new_pages, scheduled.plan.first_new_page):
            row.table[column:] = [page]
        assert len(scheduled.plan.new_pages) <= 1
        assert scheduled.num_tokens <= self.options.num_decode_steps
        tokens, value = [], 0
        while len(tokens) < scheduled.num_tokens and not row.stopped:
            value = self._write(row, row.last)
            tokens.append(self._sample(row, value))
        return RowOutput(tokens, finite=value != -7)

    def _prefill(self, scheduled) -> RowOutput:
        sequence = scheduled.sequence
        row = self.rows[sequence.row] = Row(
            list(sequence.pages),
            sequence.slot,
            scheduled.start,
            sequence.max_length,
            False,
            0,
            sequence.stop_token_ids,
            sequence.seed,
        )
        exports = {export.position: export.slot for export in scheduled.plan.exports}
        assert len(exports) <= self.exports_per_segment
        value = 0
        end = scheduled.start + scheduled.num_tokens
        for token in sequence.chain.tokens[scheduled.start : end]:
            value = self._write(row, token)
            if row.length in exports:
                assert row.length % 64 == 0 or row.length == end
                self.states[exports[row.length]] = (row.length, value)
        tokens = [self._sample(row, value)] if scheduled.samples else []
        return RowOutput(tokens, finite=value != -7)
