"""One KDA token a sequence: against a float64 loop over many steps, and how it uses the pools."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.functions import l2_normalize
from pallas_kernels.common.segments import Segments
from pallas_kernels.kda_decode import KDACache, KDAWeights, kda_decode
from pallas_kernels.kda_decode.cases import CASES
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.short_conv import conv_tails, short_conv
from tests.kernels import oracle
from tests.kernels.oracle import assert_close, on_host

STEPS, BATCH, HEADS, K, V, TAPS = 2000, 1, 2, 16, 24, 4
LOWER_BOUND = -0.05  # slow decay: errors of the state live long
STATIC = {"gate_lower_bound": LOWER_BOUND, "eps": 1e-5}


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    taps = (normal(HEADS, width, TAPS) for width in (K, K, V))
    return KDAWeights(*taps, normal(HEADS), normal(HEADS, K), 1 + 0.1 * normal(V))


@pytest.fixture(scope="module")
def tokens():
    """Raw activations [T, ...] of one sequence: q, k, v, f, beta, gate."""
    rng = np.random.default_rng(1)
    shapes = ((HEADS, K), (HEADS, K), (HEADS, V), (HEADS, K), (HEADS,), (HEADS, V))
    tokens = [rng.standard_normal((STEPS, *shape)).astype(np.float32) for shape in shapes]
    for x in tokens[:3]:  # values that bfloat16 holds
        x[:] = x.astype(jnp.bfloat16).astype(np.float32)
    return tokens


def empty_cache(slots=1, layers=1):
    return KDACache(
        jnp.zeros((layers, slots, HEADS, K, V), jnp.float32),
        *(jnp.zeros((layers, slots, TAPS - 1, HEADS, width), jnp.float32) for width in (K, K, V)),
    )


@on_host
@jax.jit
def decode_all(tokens, weights, cache):
    """Every token of one sequence in turn: outputs, and the state after each 100 tokens."""

    def step(cache, token):
        out, cache = kda_decode(*(x[None] for x in token), weights, cache, 0, None, **STATIC)
        return cache, out[0]

    def hundred(cache, tokens):
        cache, out = jax.lax.scan(step, cache, tokens)
        return cache, (out, cache.state[0, 0])

    blocks = jax.tree.map(lambda x: x.reshape(-1, 100, *x.shape[1:]), tokens)
    cache, (out, states) = jax.lax.scan(hundred, cache, blocks)
    return out.reshape(-1, *out.shape[2:]), states, cache


def float64_inputs(tokens, weights):
    """What the recurrence sees of raw tokens: q, k, v, g, beta in float64."""
    q, k, v, f, beta, _ = (x.astype(np.float64) for x in tokens)
    taps = (np.asarray(w, np.float64) for w in (weights.conv_q, weights.conv_k, weights.conv_v))
    q, k, v = (
        oracle.short_conv(x, w, np.zeros((TAPS - 1, *x.shape[1:])))
        for x, w in zip((q, k, v), taps, strict=True)
    )
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    rate = np.exp(np.asarray(weights.A_log, np.float64))[:, None]
    g = LOWER_BOUND / (1 + np.exp(-rate * (f + np.asarray(weights.dt_bias, np.float64))))
    return q, k, v, g, 1 / (1 + np.exp(-beta))


def gated_norm(o, gate, weights):
    normed = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + 1e-5)
    return normed * np.asarray(weights.o_norm, np.float64) / (1 + np.exp(-gate.astype(np.float64)))


def test_errors_stay_bounded_over_many_steps(tokens, weights):
    """F003: a float32 state does not drift."""
    out, states, _ = decode_all(tokens, weights, empty_cache())
    inputs = float64_inputs(tokens, weights)
    o, history = oracle.kda(*inputs, np.zeros((HEADS, K, V)))
    expected = gated_norm(o, tokens[5], weights)
    exact = history[100::100]
    of_state = np.abs(states - exact).max(axis=(1, 2, 3)) / np.abs(exact).max(axis=(1, 2, 3))
    of_output = np.abs(out - expected).reshape(20, -1).max(axis=1) / np.abs(expected).max()
    for errors in (of_state, of_output):
        assert errors.max() < 1e-3
        assert errors[10:].max() < 3 * errors[:10].max() + 1e-6, "grows with the steps"


def test_decode_continues_what_prefill_began(tokens, weights):
    """One by one = all at once = a prefill of 41 tokens and the rest one by one."""
    tokens = [x[:100] for x in tokens]
    out, states, cache = decode_all(tokens, weights, empty_cache())

    @on_host
    @jax.jit
    def prefill(raw, length):
        q, k, v, f, beta, _ = raw
        segments = Segments.rectangle(1, 100, length[None])
        zero = empty_cache()
        sequence, lengths = jnp.zeros(1, jnp.int32), segments.lens
        pairs = (
            (q, weights.conv_q, zero.conv_q),
            (k, weights.conv_k, zero.conv_k),
            (v, weights.conv_v, zero.conv_v),
        )
        q, k, v = (short_conv(x, w, pool[0], segments) for x, w, pool in pairs)
        g = LOWER_BOUND * jax.nn.sigmoid(
            jnp.exp(weights.A_log)[None, :, None] * (f + weights.dt_bias[None])
        )
        _, state, _ = kda_prefill(
            l2_normalize(q), l2_normalize(k), v, g, jax.nn.sigmoid(beta), zero.state[0], segments
        )
        tails = (conv_tails(x, pool[0], segments, sequence, lengths)[None] for x, _, pool in pairs)
        return KDACache(state[None], *tails)

    whole = prefill(tokens, np.int32(100))
    assert_close(whole.state, cache.state, 2e-5)
    for name in ("conv_q", "conv_k", "conv_v"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(cache, name))

    step = on_host(jax.jit(functools.partial(kda_decode, **STATIC)))
    mixed = prefill(tokens, np.int32(41))
    for t in range(41, 100):
        last, mixed = step(*(x[t : t + 1] for x in tokens), weights, mixed, 0, None)
    assert_close(mixed.state, cache.state, 2e-5)
    assert_close(last[0], out[99], 2e-5)


@pytest.fixture(scope="module")
def pooled():
    """The small case: three sequences in slots 4, 3, 2 of five, in layer 1 of two."""
    case = CASES["tiny"]
    rng = np.random.default_rng(2)
    *rest, _, _ = jax.tree.map(
        lambda aval: rng.standard_normal(aval.shape).astype(aval.dtype), case.avals()[0]
    )
    run = on_host(jax.jit(functools.partial(kda_decode, **case.static)))
    return (*rest, np.int32(1), np.asarray([4, 3, 2], np.int32)), run


def test_only_the_named_slots_change(pooled):
    arguments, run = pooled
    before = arguments[7]
    _, after = run(*arguments)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(new[0], old[0])
        np.testing.assert_array_equal(new[1, :2], old[1, :2])
        assert all(np.any(new[1, slot] != old[1, slot]) for slot in (2, 3, 4))


def test_a_row_of_a_batch_is_a_batch_of_one(pooled):
    arguments, run = pooled
    *rows, weights, cache, layer, slots = arguments
    out, after = run(*arguments)
    one, state = run(*(x[1:2] for x in rows), weights, cache, layer, slots[1:2])
    assert_close(one[0], out[1], 1e-6)
    assert_close(state.state[1, 3], after.state[1, 3], 1e-6)


def test_without_slots_row_b_is_slot_b(pooled):
    arguments, run = pooled
    *rows, weights, cache, layer, _ = arguments
    out, after = run(*rows, weights, cache, layer, np.arange(3, dtype=np.int32))
    cache, expected = (jax.tree.map(lambda pool: pool[:, :3], pools) for pools in (cache, after))
    got_out, got = run(*rows, weights, cache, layer, None)
    assert_close(got_out, out, 1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-6)


def test_a_poisoned_slot_stays_alone(pooled):
    """NaN in slots that the step does not name, and in the one of another row."""
    arguments, run = pooled
    *rows, weights, cache, layer, slots = arguments
    poisoned = jax.tree.map(np.copy, cache)
    for pool in jax.tree.leaves(poisoned):
        pool[1, [0, 1, 4]] = np.nan
    clean, _ = run(*arguments)
    out, after = run(*rows, weights, poisoned, layer, slots)
    np.testing.assert_array_equal(out[1:], clean[1:])
    assert np.all(np.isnan(out[0])) and np.all(np.isfinite(after.state[1, 2:4]))


@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_pools_keep_their_dtypes(pooled, state_dtype):
    """bfloat16 activations and tails; a narrow state only where the pool says so."""
    *rows, weights, cache, layer, slots = pooled[0]
    rows = [x.astype(jnp.bfloat16) for x in rows]
    tails = (x.astype(jnp.bfloat16) for x in (cache.conv_q, cache.conv_k, cache.conv_v))
    narrow = KDACache(cache.state.astype(state_dtype), *tails)
    call = functools.partial(kda_decode, **CASES["tiny"].static)
    out, after = jax.eval_shape(call, *rows, weights, narrow, layer, slots)
    assert out.dtype == after.conv_q.dtype == jnp.bfloat16
    assert after.state.dtype == state_dtype


def test_a_narrow_state_is_widened_and_rounded(pooled):
    """One step is that of a float32 pool with the same values, and its state is rounded."""
    arguments, run = pooled
    *rows, weights, cache, layer, slots = arguments
    narrow = dataclasses.replace(cache, state=jnp.asarray(cache.state, jnp.bfloat16))
    wide = dataclasses.replace(cache, state=narrow.state.astype(jnp.float32))
    out, after = run(*rows, weights, narrow, layer, slots)
    expected, exact = run(*rows, weights, wide, layer, slots)
    assert_close(out, expected, 1e-6)
    # Half a unit of 8 bits, and a little where the two programs straddle a rounding.
    np.testing.assert_allclose(after.state.astype(np.float32), exact.state, rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(after.conv_v, exact.conv_v)


def test_many_steps_with_a_narrow_state(tokens, weights):
    """Rounding at every step does not add up without bound."""
    tokens, exact = [x[:500] for x in tokens], empty_cache()
    narrow = dataclasses.replace(exact, state=exact.state.astype(jnp.bfloat16))
    out, states, _ = decode_all(tokens, weights, narrow)
    expected, exact_states, _ = decode_all(tokens, weights, exact)
    # Each step rounds by up to 2^-9, and the slow decay keeps some 40 of them: sqrt(40) 2^-9, or
    # 0.012, as one standard deviation. The largest of all values is a few of those.
    assert_close(states.astype(np.float32), exact_states, 0.05, "state")
    errors = np.abs(out - expected).reshape(5, -1)
    assert np.sqrt(np.mean(errors**2) / np.mean(expected**2)) < 0.05
    assert errors[3:].mean() < 2 * errors[:2].mean(), "grows with the steps"


@pytest.mark.gpu
def test_many_steps_on_this_device(tokens, weights):
    test_errors_stay_bounded_over_many_steps(tokens, weights)
