"""The scheduler: which request computes how many tokens in the next step.

Plain Python on the host. There is no prefill phase and no decode phase: a request that has known
tokens left to compute gets a piece of them, any other gets its next token, all under one budget of
tokens. Memory is the cache manager's; the device is the runner's.

    schedule -> Schedule -> (runner) -> dispatched -> commit with each row's tokens, or fail

One step may be dispatched before the one before it is committed: the ids that a step samples stay
on the device, where the next step finds them by row.
"""

import bisect
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from k3jax.cache import (
    Admission,
    CacheManager,
    CacheRequest,
    HashChain,
    NoSpace,
    Pass,
    RowPlan,
    RowResult,
    StepPlan,
)
from k3jax.engine.request import SamplingParams
from k3jax.errors import EngineError


class Status(enum.Enum):
    """Where a sequence stands. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class SequenceState:
    """One sequence that is generated: what it asks for, its tokens, and how far it is.

    Its known tokens, prompt and output, are those of the hash chain. num_scheduled tokens are
    computed once all steps under way are done; num_expected counts those that these steps will
    sample as well, unless it stops before. What it generates is fed back on the device, so that
    only tokens known when it started to run (prefill_len) are ever sent there.
    """

    cache: CacheRequest
    params: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    priority: int = 0
    arrival: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    status: Status = Status.WAITING
    row: int = 0  # of the device's tables, while it runs
    slot: int = 0
    pages: Sequence[int] = ()  # a view of its page table
    prefill_len: int = 0
    num_scheduled: int = 0
    num_expected: int = 0
    is_new: bool = True  # the device does not know this row yet
    num_overtaken: int = 0  # later arrivals that were admitted before it
    num_preemptions: int = 0
    num_device_errors: int = 0

    @property
    def request_id(self) -> str:
        """The scheduler's own name for it, never used twice."""
        return self.cache.request_id

    @property
    def chain(self) -> HashChain:
        """All known tokens."""
        return self.cache.chain

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that were given, not generated."""
        return self.cache.num_prompt_tokens

    @property
    def max_length(self) -> int:
        """Tokens at which it ends, whatever it generates."""
        return self.cache.num_prompt_tokens + self.params.max_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens to send to the device that no step computes yet."""
        return max(0, self.prefill_len - self.num_scheduled)


@dataclass(frozen=True)
class DecodeRow:
    """A sequence generates up to `num_tokens` tokens. plan: its memory in this step."""

    sequence: SequenceState
    num_tokens: int
    plan: RowPlan


@dataclass(frozen=True)
class PrefillRow:
    """A sequence computes known tokens [start, start + num_tokens). samples: these are the last
    of them, so the next one is chosen. is_first: the device learns about this row."""

    sequence: SequenceState
    start: int
    num_tokens: int
    samples: bool
    is_first: bool
    plan: RowPlan


@dataclass(frozen=True)
class Schedule:
    """One step: what moves in the cache, and the rows that compute."""

    plan: StepPlan
    decode: list[DecodeRow]
    prefill: list[PrefillRow]

    @property
    def rows(self) -> list[DecodeRow | PrefillRow]:
        """All of them, in the order of the step's results: those that decode first."""
        return [*self.decode, *self.prefill]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token at its position, its rank there (1 is the likeliest), and the
    likeliest alternatives, (token id, logprob) each."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass
class RowOutput:
    """What a step did for one row: the tokens it chose, in order; finite: its numbers are."""

    token_ids: list[int]
    finite: bool = True
    logprobs: list[TokenLogprobs] | None = None  # of these tokens, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens, likewise
    first_prompt_position: int = 1  # of the first of these


@dataclass(frozen=True)
class Taken:
    """The first `num_tokens` of the new tokens count; `ends`: the sequence is complete."""

    num_tokens: int
    ends: bool


@dataclass(frozen=True)
class SchedulerSettings:
    """Limits of a step, checked against each other where they are made (`EngineConfig`)."""

    max_num_seqs: int
    max_num_batched_tokens: int  # tokens of one step, decodes included
    max_prefill_rows: int  # sequences whose known tokens one step computes
    num_decode_steps: int = 8  # tokens that one step may generate for a row when nothing waits
    policy: str = "fcfs"  # or "priority"
    max_overtakes: int = 256  # under "priority": then a request is served whatever its class


@dataclass
class SchedulerStats:
    """Counters since the start."""

    preemptions: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Scheduler:
    """Waiting and running sequences over one cache manager. Not thread-safe."""

    def __init__(self, settings: SchedulerSettings, cache: CacheManager):
        self.settings = settings
        self.cache = cache
        self.stats = SchedulerStats()
        self.running: list[SequenceState] = []  # in order of precedence
        self.waiting: list[SequenceState] = []  # likewise
        self._free_rows = list(range(settings.max_num_seqs, 0, -1))  # row 0 is for padding
        self._under_way: dict[int, Schedule] = {}
        self._num_steps = 1
        self.is_starved = False  # a row found no memory: commit everything, then schedule again

    # Requests.

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence."""
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=self._precedence)

    def finish(self, sequence: SequenceState) -> None:
        """It ended by itself: its latest state is kept for a next turn."""
        if sequence.status is Status.RUNNING:
            self.cache.finish(sequence.request_id)
        self._leave(sequence)

    def abort(self, sequence: SequenceState) -> None:
        """Ends a sequence in any state; nothing happens if it has ended already (S-3)."""
        if sequence.status is Status.RUNNING:
            self.cache.abort(sequence.request_id)
        self._leave(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def _stop_running(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = sequence.slot = 0
        sequence.pages = ()

    def _precedence(self, sequence: SequenceState) -> tuple[int, int]:
        """Smaller goes first: the class (vLLM: a lower value is more urgent), then the arrival."""
        if self.settings.policy == "fcfs":
            return 0, sequence.arrival
        if sequence.num_overtaken >= self.settings.max_overtakes:
            return -(2**31), sequence.arrival  # S-6
        return sequence.priority, sequence.arrival

    @property
    def num_free_rows(self) -> int:
        """So many sequences may run beside those that do."""
        return len(self._free_rows)

    @property
    def has_work(self) -> bool:
        """Some sequence has not ended."""
        return bool(self.running or self.waiting)

    # A step.

    def schedule(self) -> Schedule | None:
        """The next step, or None if there is nothing to compute now.

        Rows that decode come first in the budget, then known tokens of running sequences, then
        waiting sequences. Sequences are preempted only when no step is under way: else `is_starved`
        asks to commit first, since a preempted sequence must know its tokens.
        """
        self.is_starved = False
        self.cache.begin_step()
        step = _Pass(self.settings.max_num_batched_tokens)
        decoding = [s for s in self.running if self._decodes(s)][: step.budget]
        step.budget -= len(decoding)
        for sequence in list(self.running):
            self._schedule_prefill(sequence, step)
        self._admit(step)
        self._adapt_steps(bool(step.prefill))
        for sequence in decoding:
            self._schedule_decode(sequence, step)
        plan = self.cache.end_step()
        if plan.empty:
            return None
        schedule = Schedule(plan, list(step.decode.values()), list(step.prefill.values()))
        for row in schedule.prefill:
            row.sequence.is_new = False
        self.stats.steps += 1
        self.stats.prefill_tokens += sum(row.num_tokens for row in schedule.prefill)
        self._under_way[plan.step_id] = schedule
        return schedule

    def _adapt_steps(self, has_prefill: bool) -> None:
        """Tokens of a decode row: one beside a prefill; more and more while nothing else comes.

        While others wait for a row or for memory, a sequence that ends should be seen soon.
        """
        limit = self.settings.num_decode_steps
        if has_prefill:
            self._num_steps = 1
        else:
            self._num_steps = min(2 * self._num_steps, -(-limit // 2) if self.waiting else limit)

    def _decodes(self, sequence: SequenceState) -> bool:
        """All its known tokens are on their way, and it may generate more."""
        return not sequence.num_uncomputed and sequence.num_expected < sequence.max_length

    def _schedule_decode(self, sequence: SequenceState, step: "_Pass") -> None:
        if sequence.status is not Status.RUNNING:  # preempted in this pass
            return
        count = min(self._num_steps, sequence.max_length - sequence.num_expected)
        count = self.cache.clip(sequence.request_id, count, Pass.DECODE)
        plan = self._extend(sequence, count, Pass.DECODE, step)
        if plan is not None:
            sequence.num_scheduled += count
            sequence.num_expected += count
            step.decode[sequence] = DecodeRow(sequence, count, plan)

    def _schedule_prefill(self, sequence: SequenceState, step: "_Pass") -> None:
        """Schedules the next piece of its known tokens, if there are any and the budget allows."""
        if (
            sequence.status is not Status.RUNNING
            or not sequence.num_uncomputed
            or len(step.prefill) >= self.settings.max_prefill_rows
        ):
            return
        count = min(step.budget, sequence.num_uncomputed)
        count = self.cache.clip(sequence.request_id, count) if count else 0
        plan = self._extend(sequence, count, Pass.PREFILL, step) if count else None
        if plan is None:
            return
        start = sequence.num_scheduled
        sequence.num_scheduled += count
        samples = not sequence.num_uncomputed
        sequence.num_expected = sequence.prefill_len + samples
        step.budget -= count
        row = PrefillRow(sequence, start, count, samples, sequence.is_new, plan)
        step.prefill[sequence] = row

    def _extend(
        self, sequence: SequenceState, count: int, kind: Pass, step: "_Pass"
    ) -> RowPlan | None:
        """Memory for the next `count` tokens. The last in precedence give theirs up for it."""
        while True:
            answer = self.cache.extend(sequence.request_id, count, kind)
            if isinstance(answer, RowPlan):
                return answer
            if self._under_way:
                self.is_starved = True
                return None
            victim = self.running[-1]
            step.remove(victim)
            self.preempt(victim)
            if victim is sequence:
                return None

    def preempt(self, sequence: SequenceState) -> None:
        """Takes its memory; it waits, in front of its class, to go on from what is cached.

        No step may be under way for it.
        """
        self.cache.preempt(sequence.request_id)
        self.stats.preemptions += 1
        sequence.num_preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: SequenceState) -> None:
        self._stop_running(sequence)
        self.add(sequence)

    def _admit(self, step: "_Pass") -> None:
        """Starts waiting sequences, in order of precedence, as far as everything suffices.

        One starts only if its known tokens fit beside what the running ones still need for theirs
        and one more page for each: so that no prompt is begun in vain (S-4).
        """
        settings = self.cache.settings
        for sequence in list(self.waiting):
            if (
                self.is_starved
                or not self._free_rows
                or len(step.prefill) >= self.settings.max_prefill_rows
            ):
                return
            hit = self.cache.lookup(sequence.cache)
            left = len(sequence.chain) - hit.num_tokens
            if step.budget < min(left, settings.scheduler_alignment):
                return
            promised = sum(1 + settings.pages_for(other.num_uncomputed) for other in self.running)
            answer = self.cache.reserve(
                sequence.cache, hit, num_tokens=left + promised * settings.page_size
            )
            if isinstance(answer, NoSpace):
                return
            if isinstance(answer, Admission):  # else deferred for one step: others go before it
                self._start(sequence, answer)
                self._schedule_prefill(sequence, step)

    def _start(self, sequence: SequenceState, admission: Admission) -> None:
        self.waiting.remove(sequence)
        if self.settings.policy != "fcfs":
            for other in self.waiting:
                other.num_overtaken += other.arrival < sequence.arrival
            self.waiting.sort(key=self._precedence)
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        sequence.slot = admission.slot
        sequence.pages = self.cache.page_table(sequence.request_id)
        sequence.prefill_len = sequence.num_expected = len(sequence.chain)
        sequence.num_scheduled = admission.num_cached_tokens
        sequence.is_new = True
        bisect.insort(self.running, sequence, key=self._precedence)

    # After a step.

    def dispatched(self, schedule: Schedule) -> None:
        """The device has taken the step."""
        self.cache.dispatched(schedule.plan.step_id)

    def commit(
        self,
        schedule: Schedule,
        results: Sequence[RowOutput],
        take: Callable[[SequenceState, RowOutput], Taken],
    ) -> None:
        """Takes in the results of the oldest step under way, those of decode rows first.

        `take` is given what each sequence that has not ended got, and says how many of the tokens
        count and whether it ends with them; those behind its end are forgotten (C-12). A sequence
        whose numbers are not finite gets none, and ends as `take` is told.
        """
        del self._under_way[schedule.plan.step_id]
        ended: list[SequenceState] = []
        computed: dict[str, RowResult] = {}
        for row, result in zip(schedule.rows, results, strict=True):
            sequence = row.sequence
            count = len(result.token_ids) if isinstance(row, DecodeRow) else row.num_tokens
            computed[sequence.request_id] = RowResult(count, result.finite)
            if sequence.status is not Status.RUNNING:
                continue
            taken = take(sequence, result)
            if not result.finite:
                continue  # the cache finds it below
            if isinstance(row, DecodeRow):
                self.stats.decode_tokens += count
            sequence.chain.extend(result.token_ids[: taken.num_tokens])
            if taken.ends:
                ended.append(sequence)
            if count < row.num_tokens and sequence not in ended:
                raise EngineError(
                    f"the device ended {sequence.request_id} after {count} tokens, the host did not"
                )
        for request_id in self.cache.commit(schedule.plan.step_id, computed):
            sequence = next(s for s in self.running if s.request_id == request_id)
            self._stop_running(sequence)  # the cache has taken everything back
            sequence.status = Status.FINISHED
        for sequence in ended:
            if sequence.status is Status.RUNNING:
                self.finish(sequence)

    def restart(self) -> list[SequenceState]:
        """The device has lost its memory: everything that ran waits to be computed again.

        Returns these sequences.
        """
        self._under_way.clear()
        self.cache.restart()
        lost = list(self.running)
        for sequence in lost:
            sequence.num_device_errors += 1
            self._requeue(sequence)
        return lost


class _Pass:
    """What one scheduling pass has put together so far."""

    def __init__(self, budget: int):
        self.budget = budget
        self.decode: dict[SequenceState, DecodeRow] = {}
        self.prefill: dict[SequenceState, PrefillRow] = {}

    def remove(self, sequence: SequenceState) -> None:
        """A sequence was preempted; its tokens return to the budget."""
        self.decode.pop(sequence, None)
        row = self.prefill.pop(sequence, None)
        if row is not None:
            self.budget += row.num_tokens
