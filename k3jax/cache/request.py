"""What the cache is told about a request, and what it answers."""

import enum
import math
from dataclasses import dataclass, field

from k3jax.cache.hashing import HashChain
from k3jax.cache.index import Node
from k3jax.errors import RequestError


@dataclass(eq=False)
class CacheRequest:
    """What the cache needs to know of a request; it lives as long as the request.

    checkpoints: token positions whose state the client asks to keep, rounded down to
    `scheduler_alignment`. pin_ttl_s: seconds to protect them (the end of the prompt, if there are
    none) from eviction. priority: items of lower priority are evicted first.
    read_cache: False computes the whole prompt, as prompt_logprobs needs.
    num_cached_tokens: tokens not computed at the first schedule; a preemption keeps it (C-2).
    """

    request_id: str
    chain: HashChain
    num_prompt_tokens: int
    checkpoints: tuple[int, ...] = ()
    pin_ttl_s: float | None = None
    priority: int = 0
    read_cache: bool = True
    num_cached_tokens: int | None = None

    def __post_init__(self):
        if not 1 <= self.num_prompt_tokens <= len(self.chain):
            raise RequestError("the prompt must have at least one token", field="prompt")
        if self.pin_ttl_s is not None and not 0 < self.pin_ttl_s < math.inf:
            raise RequestError(
                "cache_pin_ttl_s must be above 0 and finite", field="cache_pin_ttl_s"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError("cache_priority must be an integer", field="cache_priority")
        if not -100 <= self.priority <= 100:
            raise RequestError("cache_priority must be within -100 and 100", field="cache_priority")
        for position in self.checkpoints:
            if not 0 <= position <= self.num_prompt_tokens:
                raise RequestError(
                    f"cache_checkpoints: {position} is not a position of the prompt",
                    field="cache_checkpoints",
                )


@dataclass(frozen=True)
class Hit:
    """What the cache holds of a prompt. Token counts are multiples of `match_unit`.

    A request resumes at `num_tokens`, where pages and a state exist (C-1). Pages may reach further
    (`attention_tokens`); that difference is computed again, since KDA layers need every token.
    """

    num_tokens: int = 0
    attention_tokens: int = 0
    pending_tokens: int = 0  # longest boundary that steps under way are about to publish
    reason: "Miss | None" = None  # why the hit is not longer; None: it is as long as can be
    detail: str = ""  # cause of an eviction, where that is the reason
    tier: str = "device"
    node: Node | None = field(default=None, repr=False)

    @property
    def junction(self) -> int | None:
        """A prefix seen twice without a state at its end: the place for a snapshot."""
        return self.attention_tokens if self.attention_tokens > self.num_tokens else None


class Miss(enum.Enum):
    """Why a hit is not longer."""

    DISABLED = "prefix caching is switched off"
    NOT_READ = "this request asked for every prompt position to be computed"
    SHORT = "the prompt has no complete match unit before its last token"
    ROOT = "nothing is cached for this model version, dtype, adapter and salt"
    UNSEEN = "no earlier request had these tokens here"
    EVICTED = "these tokens were cached but have been removed"
    NO_ROOM = "what was cached left no room to go on"
    NO_STATE = "pages reach further, but no recurrent state was kept there"
    STATE_EVICTED = "pages reach further, but the recurrent state there has been removed"


@dataclass(frozen=True)
class Admission:
    """The request holds memory now: it goes on at `num_cached_tokens`, in `slot`, with `pages`."""

    num_cached_tokens: int
    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Defer:
    """Waiting for the steps under way lengthens the hit to `pending_tokens` (C-9)."""

    hit: Hit
    pending_tokens: int


@dataclass(frozen=True)
class NoSpace:
    """Nothing was changed; so many items are missing, evictable ones counted as available."""

    pages: int = 0
    slots: int = 0
