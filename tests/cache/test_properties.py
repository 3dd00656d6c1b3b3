"""Random traffic on a device of token hashes: whatever happens, every request reads the fold of its
own tokens, every item is in one place, and every request gets to its end.

That one comparison stands for C-1, C-3, C-4, C-5, C-8 to C-14, C-16 and C-17; the invariants that
are checked after every operation are C-6, C-7, C-15, C-19 and S-9, at the end S-3, S-4 and S-5.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from k3jax.cache import CacheSettings
from k3jax.cache.simulation import Simulation, random_operation
from scripts import fuzz_cache

SIZES = [(4, 4, 4), (4, 2, 4), (8, 2, 4), (2, 4, 4), (4, 8, 2), (8, 4, 8), (3, 3, 2)]
SEEDS = st.integers(0, 2**32 - 1)
INTERVALS = [None, 0, "dense", 3, 4, 28]  # tokens


@st.composite
def cache_settings(draw) -> CacheSettings:
    """Small pools of every shape: page above, equal to and below the unit, chunks beside them."""
    page_size, match_unit, kda_chunk = draw(st.sampled_from(SIZES))
    least = max(match_unit // page_size, 1) + 2
    return CacheSettings(
        num_pages=least + draw(st.integers(0, 24)),
        num_slots=draw(st.integers(2, 12)),
        page_size=page_size,
        match_unit=match_unit,
        kda_chunk=kda_chunk,
        retention_interval=draw(st.sampled_from(INTERVALS)),
        decode_end=draw(st.booleans()),
        draft_drops_last_unit=draw(st.sampled_from([False, False, True])),
        exports_per_segment=draw(st.integers(0, 2)),
        min_gain=draw(st.integers(1, 8)),
        max_pinned_fraction=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


class Traffic(RuleBasedStateMachine):
    """The verbs of the simulation in any order. Hypothesis chooses the pools and the order, and
    seeds what is random inside a verb: its own choices are too often zero to meet many hits."""

    simulation: Simulation

    @initialize(sizes=cache_settings(), depth=st.integers(0, 2), not_finite=st.booleans())
    def start(self, sizes, depth, not_finite):
        self.simulation = Simulation(sizes, lambda n: 0, depth=depth, not_finite=not_finite)

    def seeded(self, seed: int) -> Simulation:
        self.simulation.choose = random.Random(seed).randrange
        return self.simulation

    @precondition(lambda self: len(self.simulation.clients) < 5)
    @rule(seed=SEEDS)
    def submit(self, seed):
        self.seeded(seed).submit()

    @rule(seed=SEEDS)
    def step(self, seed):
        self.seeded(seed).step()

    @rule(seed=SEEDS)
    def steps(self, seed):
        for _ in range(4):
            self.seeded(seed).step()
            self.simulation.check()
            seed += 1

    @precondition(lambda self: self.simulation.results)
    @rule(seed=SEEDS)
    def commit(self, seed):
        self.seeded(seed).commit()

    @precondition(lambda self: self.simulation.clients)
    @rule(seed=SEEDS)
    def fork(self, seed):
        self.seeded(seed).fork()

    @precondition(lambda self: self.simulation.clients)
    @rule(seed=SEEDS)
    def abort(self, seed):
        clients = list(self.seeded(seed).clients.values())
        self.simulation.abort(clients[self.simulation.choose(len(clients))])

    @precondition(lambda self: any(c.running for c in self.simulation.clients.values()))
    @rule(seed=SEEDS)
    def preempt(self, seed):
        clients = [c for c in self.seeded(seed).clients.values() if c.running]
        self.simulation.preempt(clients[self.simulation.choose(len(clients))])

    @precondition(lambda self: self.simulation.results)
    @rule(seed=SEEDS)
    def fail(self, seed):
        steps = list(self.seeded(seed).results)
        self.simulation.fail(steps[self.simulation.choose(len(steps))])

    @rule(seed=SEEDS)
    def evict(self, seed):
        self.seeded(seed).evict()

    @rule(seed=SEEDS)
    def reset_or_wait(self, seed):
        self.seeded(seed).wait()
        if self.simulation.choose(3) == 0:
            self.simulation.reset()

    @invariant()
    def everything_is_in_place(self):
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.choose = random.Random(0).randrange
            self.simulation.drain()
            self.simulation.check()


EXAMPLES = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def run_ordered_traces(count: int) -> None:
    run_state_machine_as_test(
        Traffic, settings=settings(max_examples=count, stateful_step_count=40, **EXAMPLES)
    )


def run_mixed_traces(count: int) -> None:
    @settings(max_examples=count, **EXAMPLES)
    @given(
        sizes=cache_settings(),
        seed=SEEDS,
        depth=st.integers(0, 2),
        not_finite=st.booleans(),
        max_len=st.sampled_from([0, 16, 24, 40]),
    )
    def run(sizes, seed, depth, not_finite, max_len):
        choose = random.Random(seed).randrange
        simulation = Simulation(sizes, choose, depth=depth, not_finite=not_finite, max_len=max_len)
        for _ in range(100):
            random_operation(simulation)
            simulation.check()
        simulation.drain()
        simulation.check()

    run()


def test_verbs_in_any_order():
    run_ordered_traces(200)


def test_mixed_traffic():
    run_mixed_traces(300)


def test_the_fuzzer_runs(capsys):
    flags = fuzz_cache.Flags(operations=2000, growth_limit=1.0)  # too short to judge memory by
    assert fuzz_cache.fuzz(flags)
    printed = capsys.readouterr().out
    assert "operations" in printed and "MiB" in printed and "hit tokens" in printed


@pytest.mark.slow
def test_verbs_in_any_order_for_long():
    run_ordered_traces(2000)


@pytest.mark.slow
def test_mixed_traffic_for_long():
    run_mixed_traces(3000)
