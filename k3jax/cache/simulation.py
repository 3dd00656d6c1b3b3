"""A device made of token hashes, and random traffic on it: a model of what the cache must do.

Every page cell and every state holds a hash of all the tokens folded into it. Whenever a request
is computed, all that it reads must be the fold of its own tokens. That one comparison finds stale
pages, states restored from the wrong place, snapshots nobody wrote, tenants mixed, drafts or
overrun tokens that were published: it stands for C-1, C-3, C-4, C-5, C-8 to C-14, C-16 and C-17.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from k3jax.cache.hashing import HashChain, Root
from k3jax.cache.invariants import check_invariants
from k3jax.cache.manager import CacheManager
from k3jax.cache.request import Admission, CacheRequest, Defer, Hit
from k3jax.cache.settings import CacheSettings
from k3jax.cache.step import Pass, RowPlan, RowResult, StepPlan

GARBAGE = -1  # what memory holds before anybody wrote to it
ZERO = -2
NOT_FINITE = -3
_MASK = (1 << 61) - 1


def fold(value: int, token: int) -> int:
    """The state after one more token."""
    return ((value ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK


@dataclass
class State:
    """A slot: the fold of some tokens, and records of a verify pass that are not folded in yet."""

    position: int = 0
    value: int = GARBAGE
    records: list[int] = field(default_factory=list)  # folds after each further committed token

    def at(self, position: int) -> "State":
        """The state with its records folded up to a position."""
        if position == self.position:
            return State(position, self.value)
        return State(position, self.records[position - self.position - 1])


@dataclass(eq=False)
class Client:
    """A request and the device's view of it, which may be ahead of what the host knows."""

    request: CacheRequest
    max_len: int
    folds: list[int] = field(default_factory=list)  # folds[t]: after t tokens
    truth: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    admission: int = 0  # counts them: results of an earlier one are void
    running: bool = False
    ill: bool = False  # something of it is not finite; the host may not know yet
    hit: Hit | None = None

    def tell_truth(self, tokens: list[int]) -> None:
        for token in tokens:
            self.truth.append(token)
            self.folds.append(fold(self.folds[-1], token))


@dataclass
class Result:
    """What the device will tell of one row."""

    client: Client
    admission: int
    num_computed: int
    sampled: list[int]
    finite: bool
    num_tokens: int


class Simulation:
    """A cache manager, a device of hashes, and clients, driven by a source of choices.

    choose(n): a number in [0, n). depth: steps that may be dispatched before the first of them is
    committed. not_finite: some rows come back so. max_len: tokens of a request, 0 for as many as
    fit. Every method that is a verb of the traffic may be called at any time.
    """

    def __init__(
        self,
        settings: CacheSettings,
        choose: Callable[[int], int],
        *,
        depth: int = 1,
        not_finite: bool = True,
        max_len: int = 0,
    ):
        self.settings = settings
        self.choose = choose
        self.depth = depth
        self.not_finite = not_finite
        self.now = 0.0
        self.manager = CacheManager(settings, clock=lambda: self.now)
        self.cells = [[GARBAGE] * settings.page_size for _ in range(settings.num_pages)]
        self.states = [State() for _ in range(settings.num_slots)]
        self.clients: dict[str, Client] = {}
        self.results: dict[int, list[Result]] = {}  # of steps under way, by step
        self.transcripts: list[tuple[Root, list[int]]] = []  # of finished requests
        self.operations = 0
        self.num_requests = 0
        self.weight_version = 0
        room = (settings.num_pages - 1) * settings.page_size
        self.capacity = min(room, max_len or room)

    # Traffic.

    def submit(self) -> None:
        """A new request: a stretch of one of two documents, or a transcript, and its own end."""
        if self.transcripts and self.choose(2):
            root, start = self.transcripts[self.choose(len(self.transcripts))]
        else:
            salt = (None, "a")[self.choose(4) == 0]
            root = Root("model", self.weight_version, cache_salt=salt)
            document = self.choose(2)
            start = [(7 * t * (document + 3) + t // 5) % 5 for t in range(self.capacity)]
            start = start[: 1 + self.capacity * (1 + self.choose(6)) // 8 + self.choose(3)]
        tokens = [*start[: self.capacity - 3], *(self.choose(2) for _ in range(self.choose(3)))]
        self.num_requests += 1
        chain = HashChain(root, self.settings.match_unit, tokens)
        request = CacheRequest(
            f"r{self.num_requests}",
            chain,
            num_prompt_tokens=len(tokens),
            checkpoints=(self.choose(len(tokens)),) if self.choose(4) == 0 else (),
            pin_ttl_s=5.0 if self.choose(4) == 0 else None,
            priority=(0, 0, 1, -1)[self.choose(4)],
            read_cache=self.choose(16) > 0,
        )
        room = self.capacity - len(tokens)
        client = Client(request, len(tokens) + 1 + self.choose(min(room, 24)))
        self.manager.check_fits(len(tokens), client.max_len - len(tokens))
        self.clients[request.request_id] = client

    def step(self) -> None:
        """One scheduling pass with whatever happens in it, dispatched or failed."""
        self._await_results()
        self.operations += 1
        self.manager.begin_step()
        for client in list(self.clients.values()):
            match self.choose(32):
                case 0:
                    pass
                case 1 if client.running:
                    self.preempt(client)
                case 2:
                    self.abort(client)
                case 3:
                    client.hit = self.manager.lookup(client.request)  # used in a later pass
                case _:
                    self._admit_or_extend(client)
        while self.clients and self.choose(16) == 0:  # after it was scheduled
            client = list(self.clients.values())[self.choose(len(self.clients))]
            if client.running and self.choose(2):
                self.preempt(client)
            else:
                self.abort(client)
        plan = self.manager.end_step()
        if plan.empty:
            return
        self._check_plan(plan)
        if self.choose(48) == 0:
            self.fail(plan.step_id)
            return
        self.execute(plan)
        self.manager.dispatched(plan.step_id)
        if self.depth == 0:
            self.commit()

    def commit(self) -> None:
        """The results of the oldest step reach the host, which may stop requests."""
        if not self.results:
            return
        self.operations += 1
        step_id = min(self.results)
        results: dict[str, RowResult] = {}
        finished = []
        for result in self.results.pop(step_id):
            client, request = result.client, result.client.request
            live = self._is_live(result)
            if not live and self.choose(3) == 0:
                continue  # the host threw it away
            results[request.request_id] = RowResult(result.num_computed, result.finite)
            if not live or not result.finite:
                continue
            client.num_scheduled -= result.num_tokens - result.num_computed
            sampled = result.sampled[: client.max_len - len(request.chain)]
            stop = len(sampled) - self.choose(len(sampled) + 1) if self.choose(10) == 0 else None
            request.chain.extend(sampled[:stop])
            if stop is not None or len(request.chain) >= client.max_len:
                finished.append(client)
        for request_id in self.manager.commit(step_id, results):
            del self.clients[request_id]
        for client in finished:
            if self.clients.get(client.request.request_id) is client:
                self.finish(client)

    def finish(self, client: Client) -> None:
        self.operations += 1
        self.manager.finish(client.request.request_id)
        del self.clients[client.request.request_id]
        chain = client.request.chain
        self.transcripts = [(chain.root, list(chain.tokens)), *self.transcripts][:4]

    def abort(self, client: Client) -> None:
        self.operations += 1
        assert self.manager.abort(client.request.request_id) == client.running
        assert not self.manager.abort(client.request.request_id)  # S-3
        del self.clients[client.request.request_id]

    def preempt(self, client: Client) -> None:
        self.operations += 1
        self.manager.preempt(client.request.request_id)
        self._wait_again(client)

    def fail(self, step_id: int) -> None:
        """A step, and those after it, did not run."""
        self.operations += 1
        for request_id in self.manager.fail(step_id):
            self._wait_again(self.clients[request_id])
        for later in [s for s in self.results if s >= step_id]:
            del self.results[later]

    def restart(self) -> None:
        """The device lost its pools."""
        self.operations += 1
        for request_id in self.manager.restart():
            self._wait_again(self.clients[request_id])
        self.results.clear()
        for cells in self.cells:
            cells[:] = [GARBAGE] * len(cells)
        self.states = [State() for _ in self.states]

    def fork(self) -> None:
        """A second continuation of a request that nothing is under way for."""
        self._await_results()
        parents = [
            client
            for client in self.clients.values()
            if client.running and not client.ill and not self._under_way(client)
        ]
        if not parents:
            return
        self.operations += 1
        parent = parents[self.choose(len(parents))]
        self.num_requests += 1
        chain = parent.request.chain.copy()
        chain.extend([self.choose(3)])
        child = CacheRequest(f"r{self.num_requests}", chain, parent.request.num_prompt_tokens)
        client = Client(child, max(parent.max_len, len(chain) + 1))
        if client.max_len > self.capacity:
            return
        self.manager.begin_step()
        answer = self.manager.fork(parent.request.request_id, child)
        if isinstance(answer, Admission):
            self.clients[child.request_id] = client
            self._start(client, answer)
        plan = self.manager.end_step()
        if not plan.empty:
            self.execute(plan)
            self.manager.dispatched(plan.step_id)

    def evict(self) -> None:
        self.operations += 1
        self.manager.evict(self.choose(self.settings.num_pages), self.choose(2))

    def reset(self) -> None:
        """New weights, or a tenant that leaves."""
        self.operations += 1
        match self.choose(3):
            case 0:
                self.manager.reset(salt="a")
            case 1:
                self.manager.reset()
            case 2:
                self.manager.reset(root=Root("model", self.weight_version).digest)
                self.weight_version += 1

    def wait(self) -> None:
        """Time passes, and pins expire."""
        self.now += self.choose(8)

    def drain(self) -> None:
        """All requests run to their end, the first come first; nothing is held after it.

        One that fits the pool gets there whatever else is stored or pinned (S-4, S-5).
        """
        idle = 0
        while self.clients or self.results:
            while self.results:
                self.commit()
            self.manager.begin_step()
            progress = False
            for client in list(self.clients.values()):
                progress |= self._admit_or_extend(client, greedy=True)
            plan = self.manager.end_step()
            if not plan.empty:
                self.execute(plan)
                self.manager.dispatched(plan.step_id)
            idle = 0 if progress else idle + 1
            running = [client for client in self.clients.values() if client.running]
            if not progress and self.manager.pins.num_pages:
                self.manager.release_pins()
            elif not progress and running:
                self.preempt(running[-1])
            assert idle < 4 + len(self.clients), "S-5: no progress"
        self.manager.release_pins()
        for counts in self.manager.usage().values():
            assert counts.referenced == 0, "C-6, S-3: something is still held"

    def check(self) -> None:
        """All invariants, and that published states and pages hold what their hashes say."""
        check_invariants(self.manager)
        assert len(self.results) <= self.depth + 1

    # Scheduling.

    def _await_results(self) -> None:
        while len(self.results) > self.depth:
            self.commit()

    def _is_live(self, result: Result) -> bool:
        client = self.clients.get(result.client.request.request_id)
        return client is result.client and client.running and client.admission == result.admission

    def _under_way(self, client: Client) -> bool:
        return any(r.client is client for results in self.results.values() for r in results)

    def _wait_again(self, client: Client) -> None:
        client.running = False
        client.ill = False
        client.hit = None

    def _start(self, client: Client, admission: Admission) -> None:
        request = client.request
        client.running, client.hit = True, None
        client.admission += 1
        client.num_scheduled = admission.num_cached_tokens
        client.table = list(admission.pages)
        root = request.chain.root
        client.truth, client.folds = [], [hash((root.weight_version, root.cache_salt == "a"))]
        client.tell_truth(list(request.chain.tokens))
        # C-1: a boundary, one token left to compute.
        assert admission.num_cached_tokens < len(request.chain)

    def _admit_or_extend(self, client: Client, *, greedy: bool = False) -> bool:
        """Tries to schedule some tokens; whether it did."""
        request = client.request
        name = request.request_id
        if not client.running:
            self.operations += 1
            need = 0 if self.choose(2) and not greedy else 1
            before = self.manager.usage()
            answer = self.manager.reserve(
                request, client.hit, num_tokens=need, wait=not greedy and self.choose(2) > 0
            )
            client.hit = None
            if not isinstance(answer, Admission):
                if isinstance(answer, Defer):
                    assert answer.pending_tokens > answer.hit.num_tokens  # C-9
                assert self.manager.usage() == before, "F023: a refusal changed something"
                return False
            self._start(client, answer)
            if need:
                row = self.manager.extend(name, 1)
                assert isinstance(row, RowPlan), "room was counted at admission"
                client.num_scheduled += 1
                return True
            if self.choose(3) == 0:
                return False
        start, known = client.num_scheduled, len(request.chain)
        limit = client.max_len - start
        if limit < 1:
            return False
        remaining = known - start
        if remaining > 1 or (remaining == 1 and (greedy or self.choose(3) == 0)):
            kind, wanted = Pass.PREFILL, 1 + self.choose(remaining)
            wanted = remaining if greedy else wanted
            if self.choose(4) or greedy:
                wanted = self.manager.clip(name, wanted, kind)
        else:
            kind = (Pass.DECODE, Pass.DECODE, Pass.VERIFY)[self.choose(3)]
            wanted = 1 + (self.choose(min(limit, 6)) if self.choose(2) else 0)
            wanted = self.manager.clip(name, wanted, kind) if self.choose(2) else wanted
        if wanted < 1:
            return False
        self.operations += 1
        before = self.manager.usage()
        row = self.manager.extend(name, wanted, kind)
        if not isinstance(row, RowPlan):
            assert self.manager.usage() == before, "F023: a refusal changed something"
            if greedy and remaining > 1 and wanted > 1:
                row = self.manager.extend(name, 1, kind)
            if not isinstance(row, RowPlan):
                return False
        client.num_scheduled += row.num_tokens
        return True

    def _check_plan(self, plan: StepPlan) -> None:
        """No reserved item, nothing written twice, nothing written that is read from (C-3, S-9)."""
        sources = [copy.source for copy in plan.slot_copies]
        targets = [copy.target for copy in plan.slot_copies]
        targets += [export.slot for row in plan.rows for export in row.exports]
        assert len(set(targets)) == len(targets) and not {*targets, *plan.zero_slots} & {*sources}
        assert 0 not in (*sources, *targets, *plan.zero_slots, *(row.slot for row in plan.rows))
        new = [page for row in plan.rows for page in row.new_pages]
        sources = [copy.source for copy in plan.page_copies]
        targets = [copy.target for copy in plan.page_copies]
        assert len({*new, *targets}) == len(new) + len(targets)
        assert not {*new, *targets, *plan.zero_pages} & {*sources}
        assert 0 not in (*sources, *targets, *new, *plan.zero_pages)

    # The device.

    def execute(self, plan: StepPlan) -> None:
        """Runs a plan in the order of its contract: zero, copy, forward."""
        for page in plan.zero_pages:
            self.cells[page] = [ZERO] * self.settings.page_size
        for slot in plan.zero_slots:
            self.states[slot] = State(0, ZERO)
        running = {sequence.slot for sequence in self.manager.live_sequences()}
        moved = []
        for slots in plan.slot_copies:
            state = self.states[slots.source]
            assert slots.source in running or not state.records, "a stored state has records"
            moved.append((slots.target, state.at(slots.position)))
        for slot, state in moved:
            self.states[slot] = state
        pages = [(copy, self.cells[copy.source]) for copy in plan.page_copies]
        for copy, cells in pages:
            rest = self.settings.page_size - copy.num_tokens
            self.cells[copy.target] = cells[: copy.num_tokens] + [ZERO] * rest
        self.results[plan.step_id] = [self._forward(row) for row in plan.rows]

    def _forward(self, row: RowPlan) -> Result:
        client = self.clients[row.request_id]
        assert row.first_new_page == len(client.table)
        client.table += row.new_pages
        table, size = client.table, self.settings.page_size
        assert table == list(self.manager.page_table(row.request_id))
        state = self.states[row.slot]
        state = state.at(state.position + len(state.records))
        start = state.position
        assert start == row.start if row.exact else start <= row.start, "S-1"
        read = [self.cells[table[t // size]][t % size] for t in range(start)]
        if client.ill:
            finite = False
        else:
            own = client.folds[0] if start == 0 else client.folds[start]
            expected = ZERO if start == 0 else own
            assert state.value == expected, f"{row.request_id} reads a wrong state at {start}"
            assert read == client.folds[1 : start + 1], f"{row.request_id} reads wrong pages"
            finite = not (self.not_finite and self.choose(64) == 0)
            client.ill = not finite
        fed, sampled, num_computed = self._tokens(client, row, start)
        values, value = [], client.folds[start]
        for token in fed:
            value = fold(value, token)
            values.append(value if finite else NOT_FINITE)
        for offset, written in enumerate(values):
            at = start + offset
            self.cells[table[at // size]][at % size] = written
        for export in row.exports:
            assert start < export.position <= start + row.num_tokens, "C-14"
            assert (
                export.position % self.settings.kda_chunk == 0
                or export.position == start + row.num_tokens
            ), "C-14"
            self.states[export.slot] = State(export.position, values[export.position - start - 1])
        if row.kind is Pass.VERIFY:
            self.states[row.slot] = State(start, state.value, values[:num_computed])
        else:
            self.states[row.slot] = State(start + num_computed, values[num_computed - 1])
        return Result(client, client.admission, num_computed, sampled, finite, row.num_tokens)

    def _tokens(self, client: Client, row: RowPlan, start: int) -> tuple[list[int], list[int], int]:
        """(tokens fed, sampled, number computed) of a row; the truth grows by the sampled."""
        sampled: list[int] = []
        if row.kind is Pass.PREFILL:
            fed = client.truth[start : start + row.num_tokens]
            if start + row.num_tokens == len(client.truth):
                sampled = [self.choose(2)]
            client.tell_truth(sampled)
            return fed, sampled, row.num_tokens
        if row.kind is Pass.DECODE:
            count = row.num_tokens if row.num_tokens == 1 else 1 + self.choose(row.num_tokens)
            for at in range(start, start + count):
                if at + 1 == len(client.truth):
                    sampled.append(self.choose(2))
                    client.tell_truth(sampled[-1:])
            return client.truth[start : start + count], sampled, count
        anchor = client.truth[start]
        drafts = [self.choose(2) for _ in range(row.num_tokens - 1)]
        accepted = self.choose(row.num_tokens)
        known = client.truth[start + 1 :]  # nothing, where the anchor was the last token
        sampled = [*drafts[:accepted], self.choose(2)] if not known else []
        client.tell_truth(sampled)
        return [anchor, *drafts], sampled, accepted + 1 if not known else 1


def random_operation(simulation: Simulation) -> None:
    """One verb of the traffic, mostly steps."""
    choose = simulation.choose
    kind = choose(64)
    if kind < 14:
        if len(simulation.clients) < 6:
            simulation.submit()
    elif kind < 44:
        simulation.step()
    elif kind < 50:
        simulation.commit()
    elif kind < 54:
        simulation.fork()
    elif kind < 56 and choose(8) == 0:
        simulation.evict()
    elif 56 <= kind < 58:
        simulation.wait()
    elif kind == 58 and choose(12) == 0:
        simulation.reset()
    elif kind == 59 and choose(24) == 0:
        simulation.restart()
    elif kind == 60 and simulation.results:
        simulation.fail(list(simulation.results)[choose(len(simulation.results))])
    elif kind == 61 and simulation.clients:
        clients = list(simulation.clients.values())
        simulation.abort(clients[choose(len(clients))])
