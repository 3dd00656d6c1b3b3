"""What was stored and removed, for routers that follow the cache and for tiers behind it."""

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CacheEvent:
    """One change of the index.

    action: "stored", "removed" or "cleared". group: "mla" (a unit's pages) or "kda" (a state).
    items: page ids or the slot id. A removed item keeps its bytes until the next step runs: a tier
    that wants them reads them before that step is dispatched.
    """

    action: str
    group: str
    hash: bytes = b""
    parent: bytes | None = None  # None: the first unit
    num_tokens: int = 0  # of the prefix up to here
    items: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    adapter: tuple[str, int | str] | None = None
    cause: str = ""

    def to_vllm(self, match_unit: int) -> dict[str, Any] | None:
        """The event with vLLM's names; None for states, for which vLLM has no event."""
        if self.action == "cleared":
            return {"type": "AllBlocksCleared"}
        if self.group != "mla":
            return None
        if self.action == "removed":
            return {"type": "BlockRemoved", "block_hashes": [self.hash], "medium": "GPU"}
        return {
            "type": "BlockStored",
            "block_hashes": [self.hash],
            "parent_block_hash": self.parent,
            "token_ids": list(self.token_ids),
            "block_size": match_unit,
            "lora_id": self.adapter and self.adapter[0],
            "medium": "GPU",
        }


class EventLog:
    """Events since they were last taken; the oldest are dropped when nobody takes them."""

    def __init__(self, *, enabled: bool, capacity: int = 65536):
        self.enabled = enabled
        self.dropped = 0
        self._events: deque[CacheEvent] = deque()
        self._capacity = capacity

    def record(self, event: CacheEvent) -> None:
        if not self.enabled:
            return
        if len(self._events) == self._capacity:
            self._events.popleft()
            self.dropped += 1
        self._events.append(event)

    def take(self) -> list[CacheEvent]:
        events = list(self._events)
        self._events.clear()
        return events
