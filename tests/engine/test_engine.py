"""The engine on real step programs: whatever is mixed, every request gets the oracle's tokens."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from flax import nnx

from k3jax.cache.invariants import check_invariants
from k3jax.checkpoint.tiny import random_model
from k3jax.engine.compile_cache import num_compilations
from k3jax.engine.engine import DEFAULT_OPTIONS, Engine
from k3jax.engine.request import SamplingParams
from k3jax.errors import ConfigError
from tests.engine.running import CONFIG, Case, cases, make_engine, model, run

LIMIT = 3e-4  # of the largest: two orders of evaluation in float32 (design, section 7)

MIXES = {
    "default": {},
    "no_cache": {"enable_prefix_caching": False},
    "synchronous": {"async_scheduling": False},
    "small_pool": {"kv_pages": 8, "kda_slots": 6},
    "dense": {"prefix_cache_retention_interval": "dense", "kda_slots": 24},
    "priority": {"scheduling_policy": "priority"},
}


@pytest.fixture
def make(monkeypatch):
    """Engines over the micro model."""
    return lambda **settings: make_engine(monkeypatch, **settings)


def random_mix(engine: Engine, rng: random.Random, *, preempts: bool = False) -> None:
    """Requests that come and go at random."""
    running, aborted = [], []
    for _ in range(rng.randrange(2, 12)):
        has_priorities = engine.config.scheduling_policy == "priority"
        priority = rng.randrange(3) if has_priorities else 0
        running.append(rng.choice(cases()).start(engine, priority=priority))
        for _ in range(rng.randrange(4)):
            engine.step()
        if preempts and engine.scheduler.running and rng.random() < 0.5:
            engine._collect_all()
            if engine.scheduler.running:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng.random() < 0.1:
            gone = rng.choice(running)
            engine.abort(gone.request)
            aborted.append(gone)
    run(engine)
    check_invariants(engine.cache)
    for one in running:
        if one not in aborted:
            one.check()


@pytest.mark.parametrize("settings", MIXES.values(), ids=MIXES)
def test_mixes_equal_the_plain_loop(make, settings):
    """Also F021, F022, F024, F070, M-1, S-7 and S-10: nothing is compiled."""
    cases()
    engine = make(**settings)
    rng = random.Random(str(settings))
    before = num_compilations()
    for number in range(35):
        random_mix(engine, rng, preempts=number % 3 == 0)
    assert num_compilations() == before, "S-10"
    assert engine.scheduler.stats.preemptions > 10
    for counts in engine.cache.usage().values():
        assert counts.referenced == 0


def test_orders_of_prompts(make):
    """F016: A, B, A, both at once, A; with a pool that evicts between them."""
    long = [case for case in cases() if len(case.prompt) > 150]
    a = long[0]
    b = next(case for case in long[1:] if case.prompt[:100] == a.prompt[:100])
    for pages in (40, 9):
        engine = make(kv_pages=pages)
        for group in ([a], [b], [a], [b, a], [a], [a, b], [b]):
            started = [case.start(engine) for case in group]
            run(engine)
            for one in started:
                one.check()


def test_logprobs(make):
    """Of tokens and prompts, chosen and likeliest, against the logits of the plain loop."""
    engine = make()
    chosen = [c for c in cases() if c.params.repetition_penalty == 1.0 and not c.params.logit_bias]
    chosen = [c for c in chosen if c.params.greedy][:6]
    started = []
    for number, case in enumerate(chosen):
        params = dataclasses.replace(
            case.params, logprobs=number % 4, prompt_logprobs=(None, 0, 3)[number % 3]
        )
        started.append(dataclasses.replace(case, params=params).start(engine))
    # The same prompt twice, so that the second could be taken from the cache: F072.
    started.append(dataclasses.replace(started[2].case).start(engine))
    run(engine)
    for one in started:
        one.check()
        case, output = one.case, one.output
        expected = np.asarray(jax.nn.log_softmax(case.logits))
        assert len(output.logprobs) == len(case.tokens)
        for at, found in enumerate(output.logprobs):
            assert found.token_id == case.tokens[at] and found.rank == 1
            close(found.logprob, expected[at, found.token_id])
            check_top(found.top, expected[at], case.params.logprobs)
        if case.params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.num_cached_tokens == 0 or case.params.prompt_logprobs is None
        logits = np.asarray(model()([case.prompt]))[0]
        expected = np.asarray(jax.nn.log_softmax(logits))
        assert len(output.prompt_logprobs) == len(case.prompt) - 1
        for at, found in enumerate(output.prompt_logprobs):
            assert found.token_id == case.prompt[at + 1]
            close(found.logprob, expected[at, found.token_id])
            check_top(found.top, expected[at], case.params.prompt_logprobs)


def check_top(top, expected, number: int) -> None:
    assert len(top) == number
    for token_id, value in top:
        close(value, expected[token_id])
    values = [value for _, value in top]
    assert values == sorted(values, reverse=True)
    if top:
        close(top[0][1], expected.max())


def close(a: float, b: float) -> None:
    assert abs(a - b) <= LIMIT * max(1.0, abs(b))


def test_only_scheduled_memory_changes(make):
    """S-8, S-9, F020: padding, and rows that rest in a loop, leave all other memory as it is."""
    engine = make(enable_prefix_caching=False)
    live = [case.start(engine) for case in cases() if len(case.tokens) > 20][:3]
    while engine.scheduler.waiting or any(s.num_uncomputed for s in engine.scheduler.running):
        engine.step()
    engine._collect_all()
    before = jax.device_get(engine.runner.state)
    held = engine.scheduler.running
    slots = {sequence.slot for sequence in held}
    pages = {page for sequence in held for page in sequence.pages}
    engine.step()
    engine._collect_all()
    after = jax.device_get(engine.runner.state)
    for name in ("state", "conv_q", "conv_k", "conv_v"):
        old, new = (getattr(state.cache.kda, name) for state in (before, after))
        changed = {s for s in range(old.shape[1]) if not np.array_equal(old[:, s], new[:, s])}
        assert changed - {0} == slots
    old, new = before.cache.mla.pool, after.cache.mla.pool
    changed = {p for p in range(old.shape[1]) if not np.array_equal(old[:, p], new[:, p])}
    assert changed <= pages | set(engine.cache.page_table(held[0].request_id)) | {0}
    run(engine)
    for one in live:
        one.check()


def test_after_warm_up_only_reserved_items_are_used(make):
    """S-11."""
    state = jax.device_get(make().runner.state)
    for pool in jax.tree.leaves(state.cache.kda):
        assert not pool[:, 1:].any()
    assert not state.cache.mla.pool[:, 1:].any()


@pytest.mark.parametrize(
    "page, unit",
    [
        (64, 64),
        pytest.param(64, 16, marks=pytest.mark.slow),
        pytest.param(8, 16, marks=pytest.mark.slow),
        pytest.param(32, 128, marks=pytest.mark.slow),
    ],
)
def test_resumed_memory_equals_computed_memory(make, page, unit):
    """F017, F018: what a hit restores, layer by layer, with pages, units and chunks apart."""
    prompt = random.Random(3).choices(range(64), k=200)
    memories = []
    for first in ([], [prompt[:150]]):
        sizes = {"block_size": page, "prefix_match_unit": unit, "kv_pages": 40 * 64 // page}
        engine = make(**sizes, max_num_batched_tokens=132)
        for start in first:
            case_of([*start, 1], 1).start(engine)
            run(engine)
        one = case_of(prompt, 8).start(engine)
        while one.request.sequence.num_uncomputed or not one.request.sequence.row:
            engine.step()
        engine._collect_all()
        sequence, state = one.request.sequence, jax.device_get(engine.runner.state)
        rows = state.cache.mla.pool[:, list(sequence.pages)]
        memories.append(
            [pool[:, sequence.slot] for pool in jax.tree.leaves(state.cache.kda)]
            + [rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, :200]]
        )
        if first:
            assert sequence.cache.num_cached_tokens == 150 // unit * unit
    for cold, resumed in zip(*memories, strict=True):
        np.testing.assert_allclose(resumed, cold, rtol=1e-4, atol=1e-5)


def case_of(prompt: list[int], count: int, **fields) -> Case:
    """A greedy request without an oracle."""
    params = SamplingParams(**({"max_tokens": count, "temperature": 0.0} | fields))
    return Case(prompt, params, frozenset(), [], np.zeros(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_not_finite_end_one_request(make, temperature):
    """F002, C-13: its memory is scrubbed, and its neighbours get their tokens."""
    engine = make()
    poisoned = next(iter(nnx.state(model(), nnx.Param)["embed_tokens"].values()))
    weights = np.array(poisoned.get_value())
    weights[63] = np.nan
    good = [c for c in cases() if 63 not in c.prompt and 63 not in c.tokens][:6]
    engine.update_weights({"embed_tokens.weight": weights})
    bad = case_of([5] * 70 + [63] + [6] * 70, 16, temperature=temperature, seed=1).start(engine)
    started = [case.start(engine) for case in good]
    run(engine)
    assert bad.output.finish_reason == "error" and "finite" in bad.output.error
    assert bad.output.token_ids == []
    for one in started:
        one.check()
    again = case_of([5] * 70 + [6] * 40, 4).start(engine)
    run(engine)
    assert again.output.finish_reason == "length"
    state = jax.device_get(engine.runner.state)
    assert all(np.isfinite(pool[:, 1:]).all() for pool in jax.tree.leaves(state.cache.kda))


def test_a_lost_device_state_costs_nobody_his_tokens(make):
    """O-3: buffers that are gone in the middle of a run."""
    engine = make()
    started = [case.start(engine) for case in cases()[:8]]
    for turn in range(200):
        if turn in (3, 9):
            engine.runner.state.cache.mla.pool.delete()
        if not engine.has_work:
            break
        engine.step()
    run(engine)
    assert engine.cache.epoch == 2
    for one in started:
        one.check()


# Weights.


@pytest.fixture(scope="module")
def other():
    """Other weights, and what they say after one prompt."""
    weights = random_model(CONFIG, seed=5)
    prompt = cases()[0].prompt
    from k3jax.generation import generate

    tokens = generate(weights, [prompt], max_new_tokens=12).token_ids[0].tolist()
    return weights, prompt, tokens


def test_new_weights(make, other):
    """F074, F082: caches forget, whoever runs goes on, arrays of the caller stay his."""
    weights, prompt, tokens = other
    engine = make()
    first = case_of(prompt, 12).start(engine)
    run(engine)
    old_tokens = first.output.token_ids
    assert old_tokens != tokens
    running = case_of(prompt, 40).start(engine)
    while len(running.output.token_ids) < 3:
        engine.step()
    engine.update_weights(weights, "new")
    after = case_of(prompt, 12).start(engine)
    run(engine)
    assert after.output.token_ids == tokens and after.output.num_cached_tokens == 0
    assert after.output.weight_versions == ["new"] * 12
    versions = running.output.weight_versions
    count = versions.index("new")
    assert versions == [0] * count + ["new"] * (40 - count)
    assert running.output.token_ids[:3] == old_tokens[:3]
    # Both models of the caller still work, and so does an engine on the same weights.
    np.asarray(weights([prompt]))
    second = make()
    again = case_of(prompt, 12).start(second)
    run(second)
    assert again.output.token_ids == old_tokens


@pytest.mark.parametrize("layout", ["fortran", "strided", "jax", "state"])
def test_weights_of_any_layout(make, other, layout):
    """F075."""
    weights, prompt, tokens = other
    _, state = nnx.split(weights)
    flat = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)}

    def change(array):
        if layout == "fortran":
            return np.array(array, order="F")
        return np.repeat(np.asarray(array), 2, axis=0)[::2] if layout == "strided" else array

    given = state if layout == "state" else {name: change(array) for name, array in flat.items()}
    engine = make()
    engine.update_weights(given, 7)
    if isinstance(given, dict) and layout != "jax":
        for array in given.values():
            array[...] = 0  # the caller's own from here on
    after = case_of(prompt, 12).start(engine)
    run(engine)
    assert after.output.token_ids == tokens


@pytest.mark.parametrize(
    "given, message",
    [
        ({"layers.9.x": np.zeros(3)}, "no parameter 'layers.9.x'"),
        ({"norm.weight": np.zeros(3)}, r"norm.weight has shape \(3,\), the model \(40,\)"),
        ({"norm.weight": np.zeros(40, np.int32)}, "norm.weight has dtype int32"),
        ([1], "must be a K3Model"),
    ],
)
def test_weights_that_do_not_fit(make, given, message):
    engine = make()
    with pytest.raises(ConfigError, match=message):
        engine.update_weights(given)
    case = cases()[0].start(engine)
    run(engine)
    case.check()
    assert engine.weight_version == 0
    with pytest.raises(ConfigError, match="in use"):
        engine.update_weights({}, 0)


# Cache dtypes.


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, limit",
    [
        ({"mamba_ssm_cache_dtype": "bfloat16"}, 0.05),  # 8 bits of a state that is read each step
        ({"kv_cache_dtype": "fp8"}, 0.2),  # 4 bits of each row
    ],
    ids=["bf16_state", "fp8_rows"],
)
def test_cache_dtypes(make, settings, limit):
    """Logprobs of a given continuation stay near those of a float32 cache."""
    plain, narrow = make(), make(**settings)
    assert plain._root_of(DEFAULT_OPTIONS).digest != narrow._root_of(DEFAULT_OPTIONS).digest
    case = next(c for c in cases() if len(c.prompt) > 150)
    found = []
    for engine in (plain, narrow):
        one = case_of(case.prompt, 8, logprobs=0, logit_bias={9: 100.0}).start(engine)
        run(engine)
        found.append(np.asarray([lp.logprob for lp in one.output.logprobs]))
    assert 0 < np.abs(found[0] - found[1]).max() < limit * max(1, np.abs(found[0]).max())


@pytest.mark.slow
def test_two_devices(monkeypatch):
    """Tensor parallelism: the same tokens."""
    from k3jax.distributed.mesh import make_mesh
    from tests.engine import running

    split = random_model(CONFIG, mesh=make_mesh(tp=2))
    monkeypatch.setattr(running, "model", lambda: split)
    monkeypatch.setattr(running, "_runners", {})
    engine = make_engine(monkeypatch)
    rng = random.Random(0)
    monkeypatch.undo()
    for _ in range(10):
        random_mix(engine, rng)


@pytest.mark.slow
@pytest.mark.parametrize("settings", MIXES.values(), ids=MIXES)
def test_many_more_mixes(make, settings):
    engine = make(**settings)
    rng = random.Random(f"more {settings}")
    for number in range(300):
        random_mix(engine, rng, preempts=number % 3 == 0)


def test_lazy_programs_and_full_ladders(make):
    """`enforce_eager`: a program is compiled when it is first needed, once."""
    engine = make(enforce_eager=True, compile_profile="full", max_num_seqs=2)
    case = next(c for c in cases() if len(c.prompt) < 60 and len(c.tokens) > 5)
    for _ in range(2):
        one = case.start(engine)
        before = num_compilations()
        run(engine)
        one.check()
    assert num_compilations() == before
