"""One step as plain data: what the manager asks of the device, and what it is told of the result.

The runner executes a plan in this order: zero, copy (all reads before all writes), forward. Items
0 never appear in it, and no item is both source and target.
"""

import enum
from dataclasses import dataclass, field


class Pass(enum.Enum):
    """How a row runs, which decides where its states can be kept."""

    PREFILL = "prefill"  # all tokens are known and computed; exports states on the way
    DECODE = "decode"  # one token, or up to `num_tokens` in a loop on the device
    VERIFY = "verify"  # an anchor and drafts; the slot is brought up to date by the next step


@dataclass(frozen=True)
class PageCopy:
    """Copy the first `num_tokens` rows of `source`; the rest of `target` becomes zero (C-5)."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True)
class SlotCopy:
    """Copy the state at `position` tokens. Where the source still holds verify records, they are
    folded up to that position, in the copy only."""

    source: int
    target: int
    position: int


@dataclass(frozen=True)
class Export:
    """Write the state after `position` tokens (context included) to `slot` during the pass."""

    position: int
    slot: int


@dataclass
class RowPlan:
    """One request's part of a step. Positions in tokens of its sequence.

    start: tokens before this row; an upper bound while `exact` is False, that is while the number
    of tokens of an earlier row is known to the device only.
    new_pages: appended to its page table from index `first_new_page` on.
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    kind: Pass
    exact: bool
    first_new_page: int
    new_pages: tuple[int, ...]
    exports: tuple[Export, ...]


@dataclass
class StepPlan:
    """Everything one step does to the two pools."""

    step_id: int
    zero_pages: list[int] = field(default_factory=list)
    zero_slots: list[int] = field(default_factory=list)
    page_copies: list[PageCopy] = field(default_factory=list)
    slot_copies: list[SlotCopy] = field(default_factory=list)
    rows: list[RowPlan] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """There is nothing to dispatch, and the manager expects nothing."""
        return not (
            self.rows or self.zero_pages or self.zero_slots or self.page_copies or self.slot_copies
        )


@dataclass(frozen=True)
class RowResult:
    """What a row did. num_computed: tokens that are in its memory now, rejected drafts left out.

    Before it is passed on, the final tokens among the sampled ones are appended to the request's
    chain. finite: the row's logits and the norm of its state are finite.
    """

    num_computed: int
    finite: bool = True
