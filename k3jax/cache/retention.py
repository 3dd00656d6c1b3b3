"""Which recurrent states are kept, and for how long they are protected.

Pages are published at every unit; a state costs as much as thousands of tokens, so that states
are kept at few positions: where a prompt ends, where prefixes were seen to part, where an answer
ends, where the client asks, and at regular intervals if so configured.
"""

import enum
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from k3jax.cache.index import Node
from k3jax.cache.pages import Pool
from k3jax.cache.settings import CacheSettings


class Kind(enum.Enum):
    """Why a state is kept. Where several reasons meet, the first of this list names it."""

    DIRECTED = "directed"  # the client named the position
    PROMPT_END = "prompt_end"
    JUNCTION = "junction"  # a second request shared the prefix up to here
    INTERVAL = "interval"
    DECODE_END = "decode_end"


class Checkpoint(NamedTuple):
    """A position, in tokens, and why its state is kept."""

    position: int
    kind: Kind


@dataclass(frozen=True)
class RetentionPlan:
    """Positions at which the state of one request is kept, whatever the chunks it is computed in.

    fixed: semantic checkpoints, ascending. interval: tokens, 0 for none. decode_from: from here on
    the latest unit boundary is kept aside for the end of the answer.
    """

    fixed: tuple[Checkpoint, ...]
    interval: int
    alignment: int
    unit: int
    decode_from: int | None

    def next_after(self, position: int, *, decode_end: bool = True) -> Checkpoint | None:
        """The first checkpoint behind `position`; O(number of fixed checkpoints)."""
        found = [checkpoint for checkpoint in self.fixed if checkpoint.position > position][:1]
        if self.interval:
            # The last aligned position of each interval that has one.
            aligned = (position // self.alignment + 1) * self.alignment
            ends = -(-aligned // self.interval) * self.interval
            found.append(Checkpoint(ends // self.alignment * self.alignment, Kind.INTERVAL))
        if decode_end and self.decode_from is not None:
            crossing = max(position + 1, self.decode_from)
            found.append(Checkpoint(-(-crossing // self.unit) * self.unit, Kind.DECODE_END))
        order = list(Kind)
        return min(found, key=lambda c: (c.position, order.index(c.kind)), default=None)

    def between(self, after: int, last: int, *, decode_end: bool = True) -> list[Checkpoint]:
        """Checkpoints in (after, last]."""
        found = []
        checkpoint = self.next_after(after, decode_end=decode_end)
        while checkpoint is not None and checkpoint.position <= last:
            found.append(checkpoint)
            checkpoint = self.next_after(checkpoint.position, decode_end=decode_end)
        return found


def plan_retention(
    settings: CacheSettings,
    num_prompt_tokens: int,
    *,
    junction: int | None = None,
    directed: Iterable[int] = (),
) -> RetentionPlan:
    """The plan of a request from the settings and what its lookup found.

    The end of the prompt is rounded down so that one token is left to compute, and by one unit
    more for drafters that need hidden states before a hit.
    """
    unit, alignment = settings.match_unit, settings.scheduler_alignment
    end = prompt_end(settings, num_prompt_tokens)
    semantic = [Checkpoint(end, Kind.PROMPT_END)]
    semantic += [Checkpoint(p // alignment * alignment, Kind.DIRECTED) for p in directed]
    semantic += [Checkpoint(junction, Kind.JUNCTION)] if junction else []
    order = list(Kind)
    fixed: dict[int, Checkpoint] = {}
    for checkpoint in sorted(semantic, key=lambda c: order.index(c.kind)):
        if checkpoint.position > 0:
            fixed.setdefault(checkpoint.position, checkpoint)
    interval = settings.retention_interval
    assert interval is not None  # resolved by CacheSettings
    return RetentionPlan(
        fixed=tuple(sorted(fixed.values(), key=lambda c: c.position)),
        interval=alignment if interval == "dense" else int(interval),
        alignment=alignment,
        unit=unit,
        decode_from=num_prompt_tokens if settings.decode_end else None,
    )


def hit_limit(settings: CacheSettings, num_tokens: int) -> int:
    """The longest prefix of `num_tokens` that may be taken from the cache, in tokens."""
    return num_tokens - 1 - settings.match_unit * settings.draft_drops_last_unit


def prompt_end(settings: CacheSettings, num_prompt_tokens: int) -> int:
    """The last unit boundary at which the same prompt may hit; 0 if there is none."""
    unit = settings.match_unit
    return max(0, hit_limit(settings, num_prompt_tokens) // unit * unit)


@dataclass
class _Pin:
    expires: float
    pages: list[int]
    slot: int


@dataclass
class Pins:
    """Prefixes protected from eviction until a time, at most a fraction of either pool."""

    pages: Pool
    slots: Pool
    max_fraction: float
    clock: Callable[[], float]
    _pins: dict[Node, _Pin] = field(default_factory=dict)
    _pinned: Counter[int] = field(default_factory=Counter)  # pins of each pinned page
    _queue: list[tuple[float, int, Node]] = field(default_factory=list)
    _serial: int = 0

    @property
    def num_pages(self) -> int:
        return len(self._pinned)

    @property
    def num_slots(self) -> int:
        return len(self._pins)

    def holds(self) -> Iterable[tuple[list[int], int]]:
        """(pages, slot) of every pin."""
        return ((pin.pages, pin.slot) for pin in self._pins.values())

    def pin(self, node: Node, pages: list[int], ttl_s: float) -> bool:
        """Protects the snapshot at `node` and its pages for `ttl_s`; False if the share is full."""
        assert node.slot is not None
        expires = self.clock() + ttl_s
        pin = self._pins.get(node)
        if pin is not None:
            pin.expires = max(pin.expires, expires)
            return True
        new = sum(page not in self._pinned for page in pages)
        if len(self._pins) + 1 > self.max_fraction * (self.slots.size - 1):
            return False
        if len(self._pinned) + new > self.max_fraction * (self.pages.size - 1):
            return False
        for page in pages:
            self.pages.retain(page)
        self._pinned.update(pages)
        self.slots.retain(node.slot)
        self._pins[node] = _Pin(expires, pages, node.slot)
        self._push(node, expires)
        return True

    def expire(self) -> None:
        """Ends the protection of what has had its time."""
        now = self.clock()
        while self._queue and self._queue[0][0] <= now:
            _, _, node = heapq.heappop(self._queue)
            pin = self._pins.get(node)
            if pin is not None and pin.expires <= now:
                self._release(node)
            elif pin is not None:  # prolonged since
                self._push(node, pin.expires)

    def release_dead(self) -> None:
        """Ends the protection of prefixes that no longer have a hash."""
        for node in [node for node in self._pins if not node.alive]:
            self._release(node)

    def release_all(self) -> None:
        """Ends all protection, for when a lone request has no room otherwise."""
        for node in list(self._pins):
            self._release(node)

    def _push(self, node: Node, expires: float) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (expires, self._serial, node))

    def _release(self, node: Node) -> None:
        pin = self._pins.pop(node)
        self.slots.release(pin.slot)
        for page in reversed(pin.pages):
            self.pages.release(page)
            self._pinned[page] -= 1
            if not self._pinned[page]:
                del self._pinned[page]
