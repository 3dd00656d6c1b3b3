"""What the cache did for a request, in words, and what it did altogether, in numbers."""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field, replace

from k3jax.cache.request import CacheRequest, Hit, Miss
from k3jax.cache.retention import hit_limit
from k3jax.cache.settings import CacheSettings

CHECKPOINTS = 64  # the latest ones are kept in a report
REPORTS = 1024  # those of the latest requests are kept


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
    # Units and states that left the index, by group ("mla", "kda") and cause.
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    page_copies: int = 0
    deferrals: int = 0
    pins_refused: int = 0
    nonfinite_rows: int = 0

    def count(self, report: CacheReport) -> None:
        """Adds what the first schedule of a request took from the cache."""
        hit = report.hit
        self.queries += 1
        self.hits += hit.num_tokens > 0
        self.query_tokens += report.num_tokens
        self.hit_tokens += hit.num_tokens
        self.attention_hit_tokens += hit.attention_tokens
        if hit.reason is not None:
            self.misses[hit.reason] += 1


class Reports:
    """The reports of requests of late, by id."""

    def __init__(self, settings: CacheSettings):
        self._settings = settings
        self._reports: OrderedDict[str, CacheReport] = OrderedDict()

    def get(self, request_id: str) -> CacheReport | None:
        return self._reports.get(request_id)

    def new(self, request: CacheRequest, hit: Hit) -> CacheReport:
        """A report that is not kept."""
        return CacheReport(
            request_id=request.request_id,
            num_tokens=len(request.chain),
            match_unit=self._settings.match_unit,
            limit=hit_limit(self._settings, len(request.chain)),
            hit=replace(hit, node=None),  # nodes would keep others in memory
        )

    def update(self, request: CacheRequest, hit: Hit) -> CacheReport:
        """The request's report with its latest lookup; a new one if it is a new request."""
        report, old = self.new(request, hit), self._reports.get(request.request_id)
        if old is not None and not old.closed:
            old.num_tokens, old.limit, old.hit = report.num_tokens, report.limit, report.hit
            return old
        self._reports[request.request_id] = report
        self._reports.move_to_end(request.request_id)
        if len(self._reports) > REPORTS:
            self._reports.popitem(last=False)
        return report
