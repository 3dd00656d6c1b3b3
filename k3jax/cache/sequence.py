"""The manager's own records: what a live request holds, and what a step under way will leave."""

import enum
import sys
from dataclasses import dataclass, field

from k3jax.cache.index import Node
from k3jax.cache.pages import Pool
from k3jax.cache.report import CacheReport
from k3jax.cache.request import CacheRequest
from k3jax.cache.retention import Checkpoint, Kind, RetentionPlan
from k3jax.cache.step import Export, PageCopy, Pass, RowPlan, RowResult, SlotCopy


class Fence(enum.Enum):
    """How far a snapshot is on its way into the index; lookups see only published ones."""

    PLANNED = "planned"  # its step is being put together
    WRITTEN = "written"  # its step was dispatched without error
    VERIFIED = "verified"  # its row came back finite; kept aside for the end of the answer
    PUBLISHED = "published"
    DROPPED = "dropped"  # and its slot given back, or taken over by a later snapshot


@dataclass(eq=False, slots=True)
class Snapshot:
    """A state on its way into the index, in a slot of its own."""

    sequence: "Sequence"
    checkpoint: Checkpoint
    slot: int
    fence: Fence = Fence.PLANNED
    keep: bool = True  # a state kept aside is published only if the request ends well

    @property
    def position(self) -> int:
        return self.checkpoint.position


@dataclass(eq=False, slots=True)
class Row:
    """A request's part of one step, with everything that must be undone if the step fails."""

    sequence: "Sequence"
    kind: Pass = Pass.PREFILL
    start: int = 0
    num_tokens: int = 0
    exact_start: bool = True  # the host knows where it starts
    zero_slot: bool = False
    first_new_page: int = 0
    new_pages: list[int] = field(default_factory=list)
    page_copies: list[PageCopy] = field(default_factory=list)
    slot_copies: list[SlotCopy] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    held: list[tuple[Pool, int]] = field(default_factory=list)  # sources, until dispatched
    plan: RowPlan | None = None  # where tokens are scheduled

    @property
    def exact_end(self) -> bool:
        """The host knows where it will end: all of its tokens will be computed."""
        return self.kind is Pass.PREFILL or self.num_tokens <= 1

    def finish_planning(self) -> RowPlan:
        """The row as the runner sees it."""
        self.plan = RowPlan(
            request_id=self.sequence.request_id,
            slot=self.sequence.slot,
            start=self.start,
            num_tokens=self.num_tokens,
            kind=self.kind,
            exact=self.exact_start,
            first_new_page=self.first_new_page,
            new_pages=tuple(self.new_pages),
            exports=tuple(self.exports),
        )
        return self.plan

    def check(self, result: RowResult | None) -> None:
        """Refuses a result that does not fit the row."""
        sequence = self.sequence
        if not self.num_tokens or sequence.gone or (sequence.leaving and result is None):
            return
        if result is None:
            raise ValueError(f"the result of request {sequence.request_id} is missing")
        low = self.num_tokens if self.kind is Pass.PREFILL else 0
        if result.finite and not low <= result.num_computed <= self.num_tokens:
            raise ValueError(
                f"request {sequence.request_id} computed {result.num_computed} of a row of "
                f"{self.num_tokens} tokens"
            )

    def release_held(self) -> None:
        for pool, item in self.held:
            pool.release(item)
        self.held.clear()


@dataclass(eq=False, slots=True)
class StepRecord:
    """A step that is being put together, or under way."""

    step_id: int
    rows: dict["Sequence", Row] = field(default_factory=dict)
    zero_pages: list[int] = field(default_factory=list)
    zero_slots: list[int] = field(default_factory=list)
    dispatched: bool = False

    def row(self, sequence: "Sequence") -> Row:
        """The request's row, made if there is none yet."""
        if sequence not in self.rows:
            self.rows[sequence] = Row(sequence, start=sequence.num_scheduled)
        return self.rows[sequence]


@dataclass(eq=False, slots=True)
class Sequence:
    """What an admitted request holds, and how far it is. All positions in tokens.

    One notion of progress (S-1): pages and running slot both represent [0, num_scheduled) once
    the steps under way are done; [0, num_computed) came back finite.
    """

    request: CacheRequest
    slot: int
    pages: list[int]
    retention: RetentionPlan
    report: CacheReport
    num_hit: int = 0  # taken from the cache at this admission
    num_computed: int = 0
    num_scheduled: int = 0  # an upper bound while a row under way is not exact
    rows: list[Row] = field(default_factory=list)  # of steps under way, the oldest first
    last_kind: Pass = Pass.PREFILL
    verify_start: int = 0  # num_computed before the last verify row
    last_checkpoint: int = 0  # states up to here are taken care of
    next_due: int = 0  # no state is due before the slot stands here
    tail: Snapshot | None = None  # the latest state kept aside for the end of the answer
    source: Node | None = None  # what it resumed from
    tip: Node | None = None  # the deepest node that it published or found published
    num_published: int = 0  # units
    has_duplicates: bool = False  # some units were published before with other pages
    proven: bool = False  # a row came back finite since it resumed
    publishable: bool = True
    leaving: bool = False  # aborted, while a step under way still writes for it
    gone: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_final(self) -> int:
        """Tokens that are computed, came back finite, and are final."""
        return min(self.num_computed, len(self.request.chain))

    @property
    def exact(self) -> bool:
        """The host knows the position that the running slot will have after the steps under way."""
        return all(row.exact_end for row in self.rows)

    def due(self) -> list[Checkpoint]:
        """States to copy before the next row runs: the running slot stands at such a position, or
        verify records can be folded up to it. Only where all tokens are known (C-10, C-11)."""
        here = self.num_scheduled
        if here < self.next_due or not self.exact:
            return []
        foldable = self.last_kind is Pass.VERIFY and not self.rows
        first = self.verify_start if foldable else here - 1
        last = min(here, len(self.request.chain))
        found = self.retention.between(max(first, self.last_checkpoint), last)
        ahead = self.retention.next_after(last)
        self.next_due = ahead.position if ahead is not None else sys.maxsize
        return [c for c in found if c.kind is not Kind.DECODE_END or c is found[-1]]
