"""One pool of numbered items: MLA pages, or KDA slots. Who holds them, and who goes first.

Every item is in exactly one place (C-6): reserved (item 0, never handed out: padding reads and
writes it), free, referenced (by live requests, transfers or pins), or idle: unreferenced, but
published under a hash and so kept until its place is needed.
"""

from collections import OrderedDict
from dataclasses import dataclass

Rank = tuple[int, bool]  # (priority, needed by a snapshot): the smallest is evicted first


@dataclass(frozen=True)
class PoolCounts:
    """Items by place; they add up to the size of the pool."""

    free: int
    referenced: int
    idle: int
    reserved: int = 1

    @property
    def total(self) -> int:
        return self.free + self.referenced + self.idle + self.reserved


class Pool:
    """Reference counts and eviction order of items 1 .. size-1. Every operation is O(1)."""

    def __init__(self, size: int):
        self.size = size
        self._references = [0] * size
        self._free = list(range(size - 1, 0, -1))
        self._rank: list[Rank | None] = [None] * size  # of published items
        self._idle: dict[Rank, OrderedDict[int, None]] = {}  # least recently used first
        self._num_idle = 0
        self._quarantined: set[int] = set()
        self._to_zero: list[int] = []

    # Counts.

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Items that can be taken, those that must be evicted before included."""
        return len(self._free) + self._num_idle

    def counts(self) -> PoolCounts:
        free, idle = len(self._free), self._num_idle
        return PoolCounts(free, self.size - 1 - free - idle, idle)

    def references(self, item: int) -> int:
        return self._references[item]

    def is_idle(self, item: int) -> bool:
        return self._references[item] == 0 and self._rank[item] is not None

    def free_items(self) -> set[int]:
        return set(self._free)

    def idle_items(self) -> set[int]:
        return {item for queue in self._idle.values() for item in queue}

    # Holding.

    def take(self) -> int:
        """A free item, with one reference. Its bytes are whatever the last owner left."""
        item = self._free.pop()
        self._references[item] = 1
        return item

    def retain(self, item: int) -> None:
        """One reference more, of a published or referenced item."""
        if self._references[item] == 0:
            self._leave_idle(item)
        self._references[item] += 1

    def release(self, item: int) -> None:
        """One reference less; the last one makes the item idle if it is published, else free."""
        if self._references[item] < 1:
            raise RuntimeError(f"item {item} is released, but nobody holds it")
        self._references[item] -= 1
        if self._references[item] == 0:
            self._enter_idle_or_free(item)

    # Publication and order.

    def publish(self, item: int, rank: Rank) -> None:
        """From now on the item is kept when nobody holds it; or changes its rank."""
        idle = self.is_idle(item)
        if idle and self._rank[item] == rank:
            return
        if idle:
            self._leave_idle(item)
        self._rank[item] = rank
        if idle:
            self._enter_idle_or_free(item)

    def unpublish(self, item: int) -> None:
        """The item has no hash any more: free if nobody holds it, else as soon as nobody does."""
        idle = self.is_idle(item)
        if idle:
            self._leave_idle(item)
        self._rank[item] = None
        if idle:
            self._enter_idle_or_free(item)

    def touch(self, item: int) -> None:
        """Makes an idle item the most recently used of its rank."""
        if self.is_idle(item):
            rank = self._rank[item]
            assert rank is not None
            self._idle[rank].move_to_end(item)

    def oldest(self) -> int | None:
        """The idle item to evict: lowest priority, needed by no snapshot, least recently used."""
        if not self._idle:
            return None
        return next(iter(self._idle[min(self._idle)]))

    # Quarantine.

    def quarantine(self, item: int) -> None:
        """The item may hold non-finite numbers: it is zeroed as soon as nobody holds it (C-7)."""
        self._quarantined.add(item)

    def is_quarantined(self, item: int) -> bool:
        return item in self._quarantined

    def take_to_zero(self) -> list[int]:
        """Items to zero before anything of the next step is written."""
        items, self._to_zero = self._to_zero, []
        return items

    def zero_again(self, items: list[int]) -> None:
        """The step that should have zeroed these did not run."""
        self._to_zero.extend(items)

    def _leave_idle(self, item: int) -> None:
        rank = self._rank[item]
        if rank is None or item not in self._idle.get(rank, ()):
            raise RuntimeError(f"item {item} is neither held nor published")
        queue = self._idle[rank]
        del queue[item]
        if not queue:
            del self._idle[rank]
        self._num_idle -= 1

    def _enter_idle_or_free(self, item: int) -> None:
        rank = self._rank[item]
        if rank is not None:
            self._idle.setdefault(rank, OrderedDict())[item] = None
            self._num_idle += 1
            return
        self._free.append(item)
        if item in self._quarantined:
            self._quarantined.remove(item)
            self._to_zero.append(item)
