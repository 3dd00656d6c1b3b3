"""What the cache did for a request, in words, and what it did altogether, in numbers."""

from collections import Counter, deque
from dataclasses import dataclass, field

from k3jax.cache.request import Hit, Miss

CHECKPOINTS = 64  # the latest ones are kept in a report


@dataclass
class CacheReport:
    """Why a prefix hit or missed, and what became of the states to keep. Holds no tokens."""

    request_id: str
    num_tokens: int
    match_unit: int
    limit: int  # longest prefix that could have hit
    hit: Hit = field(default_factory=Hit)
    num_admissions: int = 0  # more than one: it was preempted in between
    num_deferrals: int = 0
    pinned: bool | None = None  # None: not asked for
    closed: bool = False  # the request has ended
    checkpoints: deque[tuple[int, str, str]] = field(
        default_factory=lambda: deque(maxlen=CHECKPOINTS)
    )  # position, kind, outcome

    def note(self, position: int, kind: str, outcome: str) -> None:
        """Adds what became of a checkpoint; a later outcome replaces an earlier one."""
        for index, (at, _, _) in enumerate(reversed(self.checkpoints)):
            if at == position:
                self.checkpoints[-1 - index] = (position, kind, outcome)
                return
            if at < position:
                break
        self.checkpoints.append((position, kind, outcome))

    def __str__(self) -> str:
        hit = self.hit
        lines = [f"{hit.num_tokens} of {self.num_tokens} tokens were taken from the cache."]
        if hit.reason is None:
            lines.append(
                f"That is the most that can hit in units of {self.match_unit}: the last token is "
                "always computed."
            )
        else:
            cause = f" ({hit.detail})" if hit.detail else ""
            end = f" after token {hit.attention_tokens}" if hit.attention_tokens else ""
            lines.append(f"Not more, because{end} {hit.reason.value}{cause}.")
        if hit.junction is not None:
            lines.append(
                f"{hit.junction - hit.num_tokens} tokens with pages but no state are computed "
                f"again; a state is kept at {hit.junction} for the next request."
            )
        if self.num_deferrals:
            lines.append(f"It waited {self.num_deferrals} steps for a prefix being written.")
        if self.num_admissions > 1:
            lines.append(f"It was preempted and admitted {self.num_admissions} times.")
        if self.pinned is not None:
            lines.append("Its prefix is pinned." if self.pinned else "It could not be pinned.")
        lines += [f"State at {at} ({kind}): {outcome}." for at, kind, outcome in self.checkpoints]
        return "\n".join(lines)


@dataclass
class CacheStats:
    """Counts since the start. Tokens and lookups of the first schedule of each request only."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0  # resumed: pages and state
    attention_hit_tokens: int = 0  # pages alone would have hit
    misses: Counter[Miss] = field(default_factory=Counter)
    snapshots: Counter[str] = field(default_factory=Counter)  # published, by kind
    skipped_snapshots: Counter[str] = field(default_factory=Counter)  # by reason
    page_copies: int = 0
    deferrals: int = 0
    pins_refused: int = 0
    nonfinite_rows: int = 0
