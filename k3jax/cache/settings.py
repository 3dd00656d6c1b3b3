"""Sizes and policies of the cache, checked once, and how memory is split between its two pools."""

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from k3jax.errors import ConfigError

RetentionInterval = int | Literal["dense"] | None
RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


@dataclass(frozen=True)
class CacheSettings:
    """Everything that shapes the cache. Pool sizes in items, all other sizes in tokens.

    Three sizes are kept apart. `page_size`: what is allocated. `match_unit`: what is hashed, and
    where a prefix may hit. `scheduler_alignment`: where a prefill chunk may end.
    """

    num_pages: int  # MLA pages in the pool, the reserved page 0 included
    num_slots: int  # KDA slots in the pool, the reserved slot 0 included
    page_size: int = 64
    match_unit: int = 64  # a multiple or a divisor of page_size
    kda_chunk: int = 64  # a prefill can export its state at multiples of this, and at its end
    scheduler_alignment: int = 0  # 0: the least common multiple of match_unit and kda_chunk
    enable_prefix_caching: bool = True
    retention_interval: RetentionInterval = None  # None: 0, or dense with draft_drops_last_unit
    decode_end: bool = True  # keep the last state of a finished request for its next turn
    draft_drops_last_unit: bool = False  # the drafter needs hidden states of one unit before a hit
    exports_per_segment: int = 2  # states that one prefill pass can export for one request
    min_gain: int = 0  # tokens a hit must grow by to wait one step for it; 0: four pages
    max_pinned_fraction: float = 0.2  # of either pool

    def __post_init__(self):
        for name in ("page_size", "match_unit", "kda_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("num_pages", "num_slots"):
            if not 2 <= getattr(self, name) < 2**31:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least 2 (item 0 is reserved) and fit "
                    "an int32"
                )
        if self.page_size % self.match_unit and self.match_unit % self.page_size:
            raise ConfigError(
                f"match_unit={self.match_unit} must be a multiple or a divisor of "
                f"page_size={self.page_size}"
            )
        least = math.lcm(self.match_unit, self.kda_chunk)
        object.__setattr__(self, "scheduler_alignment", self.scheduler_alignment or least)
        if self.scheduler_alignment < 1 or self.scheduler_alignment % least:
            raise ConfigError(
                f"scheduler_alignment={self.scheduler_alignment} must be a multiple of {least}, "
                f"the least common multiple of match_unit and kda_chunk"
            )
        interval = self.retention_interval
        if interval is None:
            interval = "dense" if self.draft_drops_last_unit else 0
            object.__setattr__(self, "retention_interval", interval)
        if interval != "dense" and (
            isinstance(interval, bool) or not isinstance(interval, int) or interval < 0
        ):
            raise ConfigError(
                f"retention_interval={interval!r} must be 'dense' or a number of tokens from 0"
            )
        for name in ("exports_per_segment", "min_gain"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        object.__setattr__(self, "min_gain", self.min_gain or 4 * self.page_size)
        if not 0 <= self.max_pinned_fraction <= 1:
            raise ConfigError(f"max_pinned_fraction={self.max_pinned_fraction} must be in [0, 1]")

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def describe(self) -> str:
        """One line for the log at start."""
        return (
            f"at most {self.num_slots - 1} sequences or snapshots in "
            f"{self.num_slots - 1} slots, {(self.num_pages - 1) * self.page_size} tokens in "
            f"{self.num_pages - 1} pages of {self.page_size}; prefixes match in units of "
            f"{self.match_unit}, retention interval {self.retention_interval}"
        )


def parse_retention_interval(
    text: str | None, *, environ: Mapping[str, str] = os.environ
) -> RetentionInterval:
    """The value of `--prefix-cache-retention-interval`: "dense", a number of tokens, or unset.

    Without the flag, vLLM's environment variable of the same meaning counts, with a warning.
    """
    name = "--prefix-cache-retention-interval"
    if text is None and (text := environ.get(RETENTION_VARIABLE)) is not None:
        name = RETENTION_VARIABLE
        warnings.warn(
            f"{name} is deprecated: use --prefix-cache-retention-interval",
            DeprecationWarning,
            stacklevel=2,
        )
    if text is None:
        return None
    if text == "dense":
        return "dense"
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} {text!r}: must be 'dense' or a number of tokens from 0")
    return int(text)


def split_memory(
    total_bytes: int,
    *,
    slot_bytes: int,
    page_bytes: int,
    page_size: int = 64,
    expected_request_len: int = 8192,
    slots_per_request: float = 2.0,
) -> tuple[int, int]:
    """(num_pages, num_slots), the reserved items included, that fill `total_bytes`.

    The two pools run out together when requests are `expected_request_len` tokens long and each
    takes `slots_per_request` slots: one to run in, the others for snapshots that are kept.
    """
    slots = slots_per_request * slot_bytes
    pages = -(-expected_request_len // page_size) * page_bytes
    free = total_bytes - 2 * slot_bytes - 2 * page_bytes  # one reserved and one usable of each
    if free < 0:
        raise ConfigError(
            f"{total_bytes} bytes hold no cache: the smallest has two slots of {slot_bytes} and "
            f"two pages of {page_bytes} bytes"
        )
    num_slots = 2 + int(free * slots / (slots + pages)) // slot_bytes
    num_pages = (total_bytes - num_slots * slot_bytes) // page_bytes
    return num_pages, num_slots
