"""Chunked KDA against the goldens, the token-by-token form and a float64 loop.

Almost all tests share one compiled shape: a buffer of 320 tokens with three sequences, of which a
test uses what it needs. The rest of the buffer holds poison.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.common.functions import decay_gate, l2_normalize
from pallas_kernels.common.segments import Segments
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.kda_prefill.reference import kda_step
from tests.kernels import oracle
from tests.kernels.oracle import assert_close, on_host

TOKENS, HEADS, K, V = 320, 2, 16, 24  # K != V: a transposed state fails on its shape
CHUNKED = 2e-5  # the goldens' limit for two orders of float32 sums

call = on_host(jax.jit(kda_prefill, static_argnames="implementation"))


@pytest.fixture(scope="module")
def inputs():
    return random_inputs(np.random.default_rng(0), TOKENS)


def random_inputs(rng, tokens, shape=(HEADS, K, V), lower_bound=-5.0):
    """q, k, v, g, beta of one sequence, decays spread over the whole range."""
    heads, key_dim, value_dim = shape

    def normal(*shape):
        return rng.standard_normal((tokens, heads, *shape)).astype(np.float32)

    q, k, v = normal(key_dim), normal(key_dim), normal(value_dim)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = lower_bound / (1 + np.exp(4 - 3 * normal(key_dim)))
    return q, k, v, g, 1 / (1 + np.exp(-normal()))


def random_states(seed=1, count=3):
    return np.random.default_rng(seed).standard_normal((count, HEADS, K, V)).astype(np.float32)


def run(inputs, states, starts, lens, *, phase=(0, 0, 0), pairs=(), **kwargs):
    """(o, final states, checkpoints), all through one compiled program with room for 7 pairs."""
    at = zip(*pairs, *[(0, 0)] * (7 - len(pairs)), strict=True)
    o, final, taken = call(
        *inputs,
        states,
        Segments(jnp.asarray(starts, jnp.int32), jnp.asarray(lens, jnp.int32)),
        phase=jnp.asarray(phase, jnp.int32),
        checkpoints=tuple(jnp.asarray(x, jnp.int32) for x in at),
        **kwargs,
    )
    return o, final, taken[: len(pairs)]


def in_buffer(parts, starts, poison=np.nan):
    """Sequences laid into buffers of TOKENS rows full of poison."""
    buffers = [np.full((TOKENS, *x.shape[1:]), poison, np.float32) for x in parts[0]]
    for part, start in zip(parts, starts, strict=True):
        for buffer, x in zip(buffers, part, strict=True):
            buffer[start : start + len(x)] = x
    return buffers


def piece(inputs, start, stop):
    return [x[start:stop] for x in inputs]


# Goldens.

GATES = {"softplus": None, "lower_bound": -5.0}


def golden_call(z, prefix, implementation, bound, states, starts, lens):
    """One call on a golden's raw inputs, flattened and padded to 150 rows and three sequences."""

    def rows(name):
        x = z[prefix + name]
        x = x.reshape(-1, *x.shape[2:])
        return np.pad(x, ((0, max(150 - len(x), 0)), *((0, 0),) * (x.ndim - 1)))

    def pad(x):
        return np.pad(x, ((0, 3 - len(x)), *((0, 0),) * (x.ndim - 1)))

    return golden_program(
        *(rows(name) for name in ("q", "k", "v", "g_raw", "beta_raw")),
        z["A_log"],
        z["dt_bias"].reshape(len(z["A_log"]), -1),
        pad(states),
        Segments(jnp.asarray(pad(starts)), jnp.asarray(pad(lens))),
        bound=bound,
        implementation=implementation,
    )


@on_host
@functools.partial(jax.jit, static_argnames=("bound", "implementation"))
def golden_program(q, k, v, raw, beta, A_log, dt_bias, states, segments, *, bound, implementation):
    g = decay_gate(raw, A_log, dt_bias, bound)
    q, k = l2_normalize(q), l2_normalize(k)
    beta = jax.nn.sigmoid(beta)
    return g, *kda_prefill(q, k, v, g, beta, states, segments, implementation=implementation)[:2]


def check_golden(path, gate, implementation):
    limit = 1e-5 if implementation == "reference" else CHUNKED
    bound = GATES[gate]
    z = np.load(path / "ops/kda.npz")
    starts, lens = np.asarray([0, 70], np.int32), np.asarray([70, 70], np.int32)
    for name, states in {
        "zero_init": np.zeros_like(z["initial_state"]),
        "init": z["initial_state"],
    }.items():
        g, o, final = golden_call(z, "", implementation, bound, states, starts, lens)
        assert_close(g[:140], z[f"{gate}.g"].reshape(140, 3, 16), 1e-5, "g")
        expected = z[f"{gate}.{name}.o"].reshape(140, 3, 16)
        assert_close(o[:140], expected, limit, f"{name}.o")
        assert_close(final[:2], z[f"{gate}.{name}.final_state"], limit, f"{name}.final_state")
    if gate == "lower_bound":
        cu, states = z["varlen.cu_seqlens"], z["varlen.initial_state"]
        _, o, final = golden_call(z, "varlen.", implementation, bound, states, cu[:-1], np.diff(cu))
        assert_close(o, z["varlen.o"][0], limit, "varlen.o")
        assert_close(final, z["varlen.final_state"], limit, "varlen.final_state")


def check_golden_at_real_width(path, implementation):
    limit = 1e-5 if implementation == "reference" else CHUNKED
    z = np.load(path / "ops/kda_dim128.npz")
    zero, length = np.zeros(1, np.int32), np.full(1, 100, np.int32)
    g, o, final = golden_call(z, "", implementation, -5.0, z["initial_state"], zero, length)
    assert_close(g[:100], z["g"][0], 1e-5, "g")
    assert_close(o[:100], z["o"][0], limit, "o")
    assert_close(final[:1], z["final_state"], limit, "final_state")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("gate", GATES)
def test_golden(golden, gate, implementation):
    check_golden(golden, gate, implementation)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_golden_at_real_width(golden, implementation):
    check_golden_at_real_width(golden, implementation)


@pytest.mark.gpu
def test_golden_on_this_device(golden):
    for implementation in ("xla", "reference"):
        for gate in GATES:
            check_golden(golden, gate, implementation)
        check_golden_at_real_width(golden, implementation)


# Lengths and packing.


@pytest.mark.parametrize("length", [1, 15, 16, 17, 28, 63, 64, 65, 127, 128, 300])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_every_length(inputs, length, poison):
    """F004: any length, whatever lies behind it."""
    states = random_states()
    own = piece(inputs, 0, length)
    buffers = in_buffer([own], [0], poison)
    o, final, _ = run(buffers, states, [0, 0, 0], [length, 0, 0])
    expected, history = oracle.kda(*own, states[0])
    assert_close(o[:length], expected, CHUNKED, "o")
    assert_close(final[0], history[-1], CHUNKED, "final")
    np.testing.assert_array_equal(o[length:], 0)
    np.testing.assert_array_equal(final[1:], states[1:])


@pytest.mark.parametrize("has_state", [False, True])
def test_empty_sequences(inputs, has_state):
    """F005: an empty sequence keeps its state and disturbs nobody."""
    states = random_states() if has_state else np.zeros((3, HEADS, K, V), np.float32)
    own = piece(inputs, 0, 5)
    o, final, _ = run(in_buffer([own], [0]), states, [0, 0, 5], [0, 5, 0])
    alone, final_alone, _ = run(in_buffer([own], [0]), states[[1, 0, 2]], [0, 5, 5], [5, 0, 0])
    np.testing.assert_array_equal(final[[0, 2]], states[[0, 2]])
    np.testing.assert_array_equal(o, alone)
    np.testing.assert_array_equal(final[1], final_alone[0])
    assert_close(final[1], oracle.kda(*own, states[1])[1][-1], CHUNKED)


CUTS = st.lists(st.integers(0, TOKENS), min_size=6, max_size=6).map(sorted)


@settings(max_examples=25, deadline=None)
@given(cuts=CUTS, phase=st.lists(st.integers(0, 200), min_size=3, max_size=3))
@example(cuts=[0, 106, 106, 213, 213, TOKENS], phase=[63, 63, 63])  # the most chunks there can be
@example(cuts=[0] * 6, phase=[1, 2, 3])
def test_any_packing_with_any_phase(inputs, cuts, phase):
    """Gaps hold poison; the chunk grid starts anywhere inside a chunk."""
    states = random_states()
    starts, lens = cuts[::2], [b - a for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    parts = [piece(inputs, a, a + n) for a, n in zip(starts, lens, strict=True)]
    buffers = in_buffer(parts, starts)
    got = run(buffers, states, starts, lens, phase=phase)
    expected = run(buffers, states, starts, lens, implementation="reference")
    assert_close(got[0], expected[0], CHUNKED, "o")
    assert_close(got[1], expected[1], CHUNKED, "final")


def test_sequences_in_any_order_on_the_axis(inputs):
    states = random_states()
    starts, lens = [200, 0, 70], [120, 70, 100]
    parts = [piece(inputs, a, a + n) for a, n in zip(starts, lens, strict=True)]
    o, final, _ = run(in_buffer(parts, starts), states, starts, lens)
    for b, part in enumerate(parts):
        expected, history = oracle.kda(*part, states[b])
        assert_close(o[starts[b] : starts[b] + lens[b]], expected, CHUNKED)
        assert_close(final[b], history[-1], CHUNKED)


def test_a_poisoned_sequence_does_not_reach_its_neighbours(inputs):
    states, starts, lens = random_states(), [0, 100, 200], [100, 100, 120]
    poisoned = [x.copy() for x in inputs]
    for x in poisoned:
        x[150] = np.nan
    clean = run(inputs, states, starts, lens)
    got = run(poisoned, states, starts, lens)
    np.testing.assert_array_equal(got[0][:100], clean[0][:100])
    np.testing.assert_array_equal(got[0][200:], clean[0][200:])
    np.testing.assert_array_equal(got[1][[0, 2]], clean[1][[0, 2]])
    assert np.all(np.isnan(got[1][1]))


# Splits of a prompt.


def run_in_pieces(inputs, state, length, cuts, *, with_phase):
    """The first `length` tokens in several calls; states carried from each to the next."""
    outputs, states = [], np.stack([state] * 3)
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        buffers = in_buffer([piece(inputs, start, stop)], [0])
        phase = [start if with_phase else 0, 0, 0]
        o, states, _ = run(buffers, states, [0, 0, 0], [stop - start, 0, 0], phase=phase)
        outputs.append(o[: stop - start])
    return np.concatenate(outputs), states[0]


@pytest.mark.parametrize("cuts", [[64], [128], [256], [64, 128], [192, 256]], ids=str)
def test_a_split_on_the_chunk_grid_is_bitwise_no_split(inputs, cuts):
    state = random_states()[0]
    whole = run_in_pieces(inputs, state, 300, [], with_phase=True)
    split = run_in_pieces(inputs, state, 300, cuts, with_phase=True)
    np.testing.assert_array_equal(split[1], whole[1])
    np.testing.assert_array_equal(split[0], whole[0])


@pytest.mark.parametrize("with_phase", [False, True])
@pytest.mark.parametrize("cuts", [[1], [100], [63, 129], [32, 64, 96, 128]], ids=str)
def test_any_other_split_is_close(inputs, cuts, with_phase):
    """F009: splits agree also where K and V differ."""
    state = random_states()[0]
    o, final = run_in_pieces(inputs, state, 300, cuts, with_phase=with_phase)
    expected, history = oracle.kda(*piece(inputs, 0, 300), state)
    assert_close(o, expected, CHUNKED)
    assert_close(final, history[-1], CHUNKED)


def test_checkpoints_are_the_states_of_shorter_runs(inputs):
    """After 0 tokens, on the chunk grid, and at an end that is not on it; one asked for twice."""
    states = random_states()
    starts, lens = [0, 70, 70], [70, 0, 250]
    pairs = [(2, 0), (2, 192), (2, 250), (0, 64), (0, 70), (1, 0), (2, 192)]
    o, final, taken = run(inputs, states, starts, lens, pairs=pairs)
    for (b, length), got in zip(pairs, taken, strict=True):
        own = piece(inputs, starts[b], starts[b] + length)
        _, shorter, _ = run(in_buffer([own], [0]), states[[b, 0, 0]], [0, 0, 0], [length, 0, 0])
        np.testing.assert_array_equal(got, shorter[0], err_msg=f"{b=} {length=}")
        assert_close(got, oracle.kda(*own, states[b])[1][-1], CHUNKED)
    without = run(inputs, states, starts, lens)
    np.testing.assert_array_equal(o, without[0])
    np.testing.assert_array_equal(final, without[1])
    reference = run(inputs, states, starts, lens, pairs=pairs, implementation="reference")
    assert_close(taken, reference[2], CHUNKED)


def test_checkpoints_lie_on_the_grid_of_the_phase(inputs):
    """A sequence with 30 tokens behind it reaches positions 64 and 128 after 34 and 98 more."""
    states = random_states()
    pairs = [(0, 34), (0, 98), (0, 0), (0, 200)]
    _, _, taken = run(inputs, states, [0, 200, 200], [200, 0, 0], phase=[30, 0, 0], pairs=pairs)
    history = oracle.kda(*piece(inputs, 0, 200), states[0])[1]
    for (_, length), got in zip(pairs, taken, strict=True):
        assert_close(got, history[length], CHUNKED, f"{length=}")
    np.testing.assert_array_equal(taken[2], states[0])


# The ends of the range.


def check_against_float64(parts, state, limit):
    length = len(parts[0])
    buffers = in_buffer([parts], [0])
    o, final, _ = run(buffers, np.stack([state] * 3), [0, 0, 0], [length, 0, 0])
    expected, history = oracle.kda(*parts, state)
    assert np.all(np.isfinite(o)) and np.all(np.isfinite(final))
    assert_close(o[:length], expected, limit, "o")
    assert_close(final[0], history[-1], limit, "final")


@pytest.mark.parametrize("length", [64, 65, 128])
@pytest.mark.parametrize("kept_channels", [0, 1])
def test_decay_at_its_lower_bound_for_whole_chunks(length, kept_channels):
    """F001: a gate at its bound for whole chunks stays finite and right.

    exp(64 * 5) is far outside float32; one channel that keeps everything sits among them."""
    q = np.zeros((length, HEADS, K), np.float32)
    q[..., 0] = 1
    g = np.full((length, HEADS, K), -5.0, np.float32)
    g[..., :kept_channels] = 0
    v = np.arange(length * HEADS * V, dtype=np.float32).reshape(length, HEADS, V)
    parts = [q, q, v, g, np.ones((length, HEADS), np.float32)]
    check_against_float64(parts, np.ones((HEADS, K, V), np.float32), CHUNKED)


@pytest.mark.parametrize("kept_channels", [0, 1])
def test_lower_bound_with_random_keys(inputs, kept_channels):
    q, k, v, g, beta = piece(inputs, 0, 128)
    g = np.full_like(g, -5)
    g[..., K - kept_channels :] = 0
    check_against_float64([q, k, v, g, beta], random_states()[0], CHUNKED)


def test_mixed_extremes_in_one_chunk(inputs):
    """Neighbouring tokens and channels at 0 and at the bound."""
    q, k, v, g, beta = piece(inputs, 0, 200)
    g = np.where(np.random.default_rng(5).random(g.shape) < 0.5, 0, -5).astype(np.float32)
    check_against_float64([q, k, v, g, beta], random_states()[0], CHUNKED)


@pytest.mark.parametrize("decay", [0.0, -1e-4, -1e-2])
def test_identical_keys_without_decay(inputs, decay):
    """beta = 1 and L all ones below the diagonal: the hardest triangle to invert."""
    q, k, v, g, beta = piece(inputs, 0, 300)
    k = np.broadcast_to(k[:1], k.shape)
    parts = [q, k, v, np.full_like(g, decay), np.ones_like(beta)]
    check_against_float64(parts, random_states()[0], CHUNKED)


def test_very_strong_softplus_decays(inputs):
    """The unbounded gate reaches -200 a token: what came before is gone, nothing is NaN.

    The sums of decays in a chunk reach -3000 here, where float32 has steps of 2.4e-4, and the
    difference of two sums is an exponent: hence the limit.
    """
    q, k, v, g, beta = piece(inputs, 0, 300)
    g = -np.exp(np.random.default_rng(2).uniform(-9, np.log(200), g.shape)).astype(np.float32)
    g[100:110] = -200
    check_against_float64([q, k, v, g, beta], random_states()[0], 2.5e-4)


def test_long_context():
    """4,096 tokens that forget little: rounding errors add up over 64 chunks."""
    length, shape = 4096, (1, K, V)
    q, k, v, g, beta = random_inputs(np.random.default_rng(3), length, shape)
    g = (-1e-4 * np.random.default_rng(4).uniform(0.5, 1.5, g.shape)).astype(np.float32)
    state = np.zeros((1, *shape), np.float32)
    o, final, _ = call(q, k, v, g, beta, state, Segments.rectangle(1, length))
    expected, history = oracle.kda(q, k, v, g, beta, state[0])
    assert_close(o, expected, 1e-4, "o")
    assert_close(final[0], history[-1], 1e-4, "final")


# Gradients.

GRADIENT_TOKENS, GRADIENT_SHAPE = 72, (1, 4, 6)


@on_host
@functools.partial(jax.jit, static_argnames="implementation")
def gradients(inputs, states, weights, implementation):
    segments = Segments(jnp.asarray([0, 70], jnp.int32), jnp.asarray([69, 0], jnp.int32))

    def loss(inputs, states):
        o, final, _ = kda_prefill(*inputs, states, segments, implementation=implementation)
        return jnp.sum(o * weights) + jnp.sum(jnp.sin(final))

    return jax.grad(loss, (0, 1))(inputs, states)


@pytest.mark.parametrize("decay", [None, -5.0, -1e-4])
def test_gradients_equal_those_of_the_token_by_token_form(decay):
    rng = np.random.default_rng(6)
    inputs = list(random_inputs(rng, GRADIENT_TOKENS, GRADIENT_SHAPE))
    if decay is not None:
        inputs[3] = np.full_like(inputs[3], decay)
    for x in inputs:
        x[69:] = 1e6  # padding
    states = rng.standard_normal((2, *GRADIENT_SHAPE)).astype(np.float32)
    weights = rng.standard_normal(inputs[2].shape).astype(np.float32)
    weights[69:] = 0
    got = jax.tree.leaves(gradients(inputs, states, weights, "xla"))
    expected = jax.tree.leaves(gradients(inputs, states, weights, "reference"))
    for name, a, b in zip(("q", "k", "v", "g", "beta", "state"), got, expected, strict=True):
        assert np.all(np.isfinite(a)), name
        # Each gradient is a sum over up to 69 later tokens in another order.
        assert_close(a, b, 1e-4, name)
        if name != "state":
            assert not np.any(a[69:]), f"{name}: padding has a gradient"


# Dtypes.


def test_bfloat16_inputs_keep_a_float32_state(inputs):
    q, k, v, g, beta = piece(inputs, 0, 70)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    state = random_states(count=1)
    o, final, _ = call(q, k, v, g, beta, state, Segments.rectangle(1, 70))
    assert o.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    expected, history = oracle.kda(*(x.astype(np.float32) for x in (q, k, v)), g, beta, state[0])
    assert_close(final[0], history[-1], CHUNKED)  # products in float32, whatever the inputs
    assert_close(o.astype(np.float32), expected, 2**-8)  # one rounding


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_bfloat16_initial_state_is_widened(inputs, implementation):
    """Bitwise as the same values in float32: it enters every product in float32."""
    tokens, segments = piece(inputs, 0, 70), Segments.rectangle(1, 70)
    narrow = jnp.asarray(random_states(count=1), jnp.bfloat16)
    wide = narrow.astype(jnp.float32)
    got, expected = (
        call(*tokens, state, segments, implementation=implementation)[:2]
        for state in (narrow, wide)
    )
    assert got[1].dtype == jnp.float32
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_is_the_definition(inputs):
    state = random_states()[0]
    token = [x[0] for x in inputs]
    o, after = kda_step(jnp.asarray(state), *(jnp.asarray(x) for x in token))
    expected, history = oracle.kda(*piece(inputs, 0, 1), state)
    assert_close(o, expected[0], 1e-6)
    assert_close(after, history[1], 1e-6)
