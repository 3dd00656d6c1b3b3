"""A synchronous engine around the simulated device, for tests that tell a story."""

from k3jax.cache import (
    Admission,
    CacheRequest,
    CacheSettings,
    Hit,
    NoSpace,
    Pass,
    Root,
    RowPlan,
    RowResult,
    StepPlan,
)
from k3jax.cache.hashing import HashChain
from k3jax.cache.simulation import Client, Simulation

ROOT = Root("model")


class Engine(Simulation):
    """Sampled tokens are 0 and drafts are accepted as `picks` says. All reads are checked."""

    def __init__(self, settings: CacheSettings, *, depth: int = 0):
        super().__init__(settings, self._pick, depth=depth, not_finite=False)
        self.picks: list[int] = []

    def _pick(self, n: int) -> int:
        return min(self.picks.pop(0), n - 1) if self.picks else 0

    def new(self, tokens, *, root=ROOT, images=(), name=None, **fields) -> Client:
        """A request that waits."""
        self.num_requests += 1
        tokens = list(tokens)
        chain = HashChain(root, self.settings.match_unit, tokens, images)
        request = CacheRequest(name or f"r{self.num_requests}", chain, len(tokens), **fields)
        client = Client(request, self.capacity)
        self.clients[request.request_id] = client
        return client

    def admit(self, client: Client, **options) -> Admission:
        """Reserves it in the pass that is open."""
        answer = self.manager.reserve(client.request, **options)
        assert isinstance(answer, Admission), answer
        self._start(client, answer)
        return answer

    def extend(self, client: Client, num_tokens: int, kind: Pass = Pass.PREFILL) -> RowPlan:
        row = self.manager.extend(client.request.request_id, num_tokens, kind)
        assert not isinstance(row, NoSpace), row
        client.num_scheduled += row.num_tokens
        return row

    def dispatch(self) -> StepPlan:
        """Ends the pass and runs it."""
        plan = self.manager.end_step()
        self._check_plan(plan)
        if not plan.empty:
            self.execute(plan)
            self.manager.dispatched(plan.step_id)
        self.check()
        return plan

    def settle(self, *, not_finite=()) -> list[str]:
        """Commits the oldest step; rows of the requests named in `not_finite` were not."""
        results = {}
        for result in self.results.pop(min(self.results)):
            client = result.client
            name = client.request.request_id
            results[name] = RowResult(result.num_computed, name not in not_finite)
            if self._is_live(result) and name not in not_finite:
                client.num_scheduled -= result.num_tokens - result.num_computed
                client.request.chain.extend(result.sampled)
        step_id = next(iter(self.manager.steps())).step_id
        gone = self.manager.commit(step_id, results)
        for name in gone:
            del self.clients[name]
        self.check()
        return gone

    def run(self, client: Client, num_tokens: int, kind: Pass = Pass.PREFILL) -> StepPlan:
        """One step for one request alone, admitted if need be."""
        self.manager.begin_step()
        if not client.running:
            self.admit(client)
        self.extend(client, num_tokens, kind)
        plan = self.dispatch()
        self.settle()
        return plan

    def prefill(self, client: Client, chunk: int = 1 << 30) -> int:
        """Computes all known tokens, in chunks as `clip` allows; returns the tokens that hit."""
        self.manager.begin_step()
        hit = self.admit(client).num_cached_tokens if not client.running else client.num_scheduled
        while True:
            name = client.request.request_id
            left = len(client.request.chain) - client.num_scheduled
            if left:
                self.extend(client, self.manager.clip(name, min(chunk, left)))
            self.dispatch()
            if not left:
                return hit
            done = client.num_scheduled == len(client.request.chain)
            self.settle()
            if done:
                return hit
            self.manager.begin_step()

    def serve(self, tokens, new: int = 1, chunk: int = 1 << 30, **fields) -> int:
        """A request from its arrival to its end; returns the tokens that hit."""
        client = self.new(tokens, **fields)
        hit = self.prefill(client, chunk)
        for _ in range(new - 1):
            self.run(client, 1, Pass.DECODE)
        self.last = client
        self.finish(client)
        self.check()
        return hit

    def stored(self, tokens, root=ROOT) -> list[int]:
        """Positions of the states that are published for a prefix of these tokens."""
        chain = HashChain(root, self.settings.match_unit, tokens)
        nodes = (self.manager.index.nodes.get(hash) for hash in chain.hashes)
        return [node.num_tokens for node in nodes if node is not None and node.slot is not None]

    def hit(self, tokens, **fields) -> Hit:
        """What a request with these tokens would find."""
        client = self.new(tokens, **fields)
        del self.clients[client.request.request_id]
        return self.manager.lookup(client.request)


def settings(**changes) -> CacheSettings:
    """Roomy pools, sizes of 4 tokens."""
    sizes = {"num_pages": 200, "num_slots": 40, "page_size": 4, "match_unit": 4, "kda_chunk": 4}
    return CacheSettings(**(sizes | changes))


def document(seed: int, length: int) -> list[int]:
    """Tokens that differ from the first on between seeds."""
    return [(seed * 7919 + t * (seed + 3)) % 1009 for t in range(length)]
