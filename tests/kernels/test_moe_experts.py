"""Routed experts: every implementation against a float64 loop, dense and packed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint import mxfp4
from pallas_kernels.common.functions import situ
from pallas_kernels.moe_experts import DenseExperts, MXFP4Experts, moe_experts
from pallas_kernels.moe_experts.types import dequantize
from tests.kernels.jaxprs import avals_made
from tests.kernels.oracle import assert_close, on_host

EXPERTS, TOP_K, WIDTH, DIM = 8, 2, 32, 64
LIMIT = 1e-5
ACTIVATION = functools.partial(situ, beta=4.0, linear_beta=25.0)
IMPLEMENTATIONS = {  # name -> kinds of experts it takes
    "gathered": ("dense", "packed"),
    "sorted_loop": ("dense", "packed"),
    "ragged": ("dense",),
    "reference": ("dense", "packed"),
}

decode = on_host(jax.jit(dequantize, static_argnames="dtype"))
program = jax.jit(
    functools.partial(moe_experts, activation=ACTIVATION), static_argnames="implementation"
)
call = on_host(program)


def packed_matrices(rng, *shape):
    """Random codes, and a scale for each group of 32 that differs from its neighbours'."""
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    scales = rng.integers(118, 124, (*shape[:-1], shape[-1] // 32), np.uint8)
    return jnp.asarray(codes), jnp.asarray(scales)


@pytest.fixture(scope="module")
def experts():
    """The same weights in both forms; the host's decoder makes the dense ones."""
    rng = np.random.default_rng(0)
    up = packed_matrices(rng, EXPERTS, 2, WIDTH, DIM)
    down = packed_matrices(rng, EXPERTS, DIM, WIDTH)
    dense = (mxfp4.dequantize(*(np.asarray(x) for x in pair)) for pair in (up, down))
    return {
        "packed": MXFP4Experts(*up, *down),
        "dense": DenseExperts(*(jnp.asarray(x) for x in dense)),
    }


def by_hand(x, ids, weights, experts: DenseExperts):
    gate_up, down = (np.asarray(w, np.float64) for w in (experts.gate_up, experts.down))
    out = np.zeros(x.shape)
    for t, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            gate, up = gate_up[e] @ x[t]
            hidden = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
            out[t] += share * (down[e] @ hidden)
    return out


def random_tokens(count, dim=DIM, seed=1):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.1, 1, (count, TOP_K)).astype(np.float32)
    return rng.standard_normal((count, dim)).astype(np.float32), weights


def random_ids(count, among=range(EXPERTS), seed=2):
    rng = np.random.default_rng(seed)
    each = (rng.permutation(among)[:TOP_K] for _ in range(count))
    return np.stack(list(each)).astype(np.int32)


def check(experts, ids, implementation, kind):
    x, weights = random_tokens(len(ids))
    out = call(x, ids, weights, experts[kind], implementation=implementation)
    assert out.dtype == jnp.float32
    assert_close(out, by_hand(x, ids, weights, experts["dense"]), LIMIT, implementation)


ALL_FORMS = pytest.mark.parametrize(
    "implementation, kind",
    [(name, kind) for name, kinds in IMPLEMENTATIONS.items() for kind in kinds],
)


@ALL_FORMS
@pytest.mark.parametrize("tokens", [1, 8, 33, 200])
def test_equals_a_loop(experts, implementation, kind, tokens):
    if implementation == "reference" and tokens != 33:
        pytest.skip("one expert after another: nothing depends on the number of tokens")
    if implementation == "gathered" and tokens == 200:
        with pytest.raises(NotImplementedError, match="400 assignments"):
            check(experts, random_ids(tokens), implementation, kind)
        return
    check(experts, random_ids(tokens), implementation, kind)


SKEWED = {
    "two_experts_take_all": np.asarray([[5, 3]] * 33, np.int32),
    "first_and_last": np.asarray([[0, EXPERTS - 1]] * 33, np.int32),
    "one_unused": random_ids(33, among=[0, 1, 2, 4, 5, 6, 7]),
    "one_for_one_token": np.asarray([[6, 2]] * 16 + [[3, 6]] + [[2, 6]] * 16, np.int32),
}


@ALL_FORMS
@pytest.mark.parametrize("ids", SKEWED.values(), ids=SKEWED.keys())
def test_skewed_routing(experts, implementation, kind, ids):
    """The loop takes an expert's rows in tiles of 16: 33 rows do not divide."""
    check(experts, ids, implementation, kind)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_the_choice_without_a_name(experts, kind):
    def text(tokens, implementation):
        x, weights = random_tokens(tokens)
        arguments = (x, random_ids(tokens), weights, experts[kind])
        return str(program.trace(*arguments, implementation=implementation).jaxpr)

    assert text(64, None) == text(64, "gathered")
    assert text(65, None) == text(65, "sorted_loop")


def test_names_that_do_not_fit_are_refused(experts):
    x, weights = random_tokens(8)
    with pytest.raises(NotImplementedError, match="dense experts only"):
        call(x, random_ids(8), weights, experts["packed"], implementation="ragged")
    with pytest.raises(ValueError, match="'fused' is none of"):
        call(x, random_ids(8), weights, experts["dense"], implementation="fused")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_poisoned_token_stays_alone(experts, implementation):
    x, weights = random_tokens(33)
    ids = random_ids(33)
    clean = call(x, ids, weights, experts["dense"], implementation=implementation)
    x[7] = np.nan
    out = call(x, ids, weights, experts["dense"], implementation=implementation)
    others = np.arange(33) != 7
    np.testing.assert_array_equal(out[others], clean[others])
    assert np.all(np.isnan(out[7]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_tokens(experts, implementation):
    x, weights = random_tokens(8)
    x = x.astype(jnp.bfloat16)
    ids = random_ids(8)
    out = call(x, ids, weights, experts["dense"], implementation=implementation)
    assert out.dtype == jnp.float32
    expected = by_hand(x.astype(np.float32), ids, weights, experts["dense"])
    assert_close(out, expected, 2e-2)  # gate, up, hidden and y are rounded to 8 bits each


# Memory: no form may hold a decoded layer.


@pytest.mark.parametrize("implementation, tokens", [("gathered", 4), ("sorted_loop", 64)])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_no_layer_is_decoded_whole(implementation, tokens, kind):
    count, width, dim = 64, 64, 96
    up, down = (count, 2, width, dim), (count, dim, width)

    def aval(shape, dtype, per_item=1):
        return jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // per_item), dtype)

    if kind == "dense":
        # Not bfloat16: XLA widens it whole on a CPU, which cannot even slice it.
        weights: DenseExperts | MXFP4Experts = DenseExperts(
            aval(up, jnp.float32), aval(down, jnp.float32)
        )
    else:
        pairs = [(aval(s, jnp.uint8, 2), aval(s, jnp.uint8, 32)) for s in (up, down)]
        weights = MXFP4Experts(*pairs[0], *pairs[1])
    arguments = (
        jax.ShapeDtypeStruct((tokens, dim), jnp.float32),
        jax.ShapeDtypeStruct((tokens, TOP_K), jnp.int32),
        jax.ShapeDtypeStruct((tokens, TOP_K), jnp.float32),
        weights,
    )
    traced = program.trace(*arguments, implementation=implementation)
    layer = count * width * dim  # the smallest of the three matrices of all experts
    made = [aval for aval in avals_made(traced.jaxpr) if jnp.issubdtype(aval.dtype, jnp.floating)]
    assert max(aval.size for aval in made) < layer
    temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
    assert temporary < 2 * layer  # not even in bfloat16


# Gradients.


def test_gradients_of_the_differentiable_form(experts):
    x, weights = random_tokens(33)
    ids = jnp.asarray([[0, 2]] * 20 + [[2, 0]] * 13, jnp.int32)
    few = jax.tree.map(lambda w: jnp.asarray(np.asarray(w)[:3]), experts["dense"])
    target = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)

    @on_host
    @functools.partial(jax.jit, static_argnames="implementation")
    def gradients(x, weights, experts, implementation):
        def loss(x, weights, experts):
            out = moe_experts(x, ids, weights, experts, ACTIVATION, implementation=implementation)
            return jnp.sum(out * target)

        return jax.grad(loss, (0, 1, 2))(x, weights, experts)

    got = gradients(x, weights, few, "ragged")
    expected = gradients(x, weights, few, "reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, LIMIT)
    assert not np.any(got[2].down[1]) and np.any(got[2].down[2])  # expert 1 had no token


# MXFP4.


def check_mxfp4_golden(path):
    z = np.load(path / "ops/mxfp4.npz")
    # float32 subnormals (scale byte 0, and 0.5 under byte 1) may be flushed to zero by a device.
    tiny = np.finfo(np.float32).tiny
    weight = decode(z["weight_packed"], z["weight_scale"], dtype=jnp.float32)
    normal = (np.abs(z["dequant"]) >= tiny) | (z["dequant"] == 0)
    np.testing.assert_array_equal(weight[normal], z["dequant"][normal])
    np.testing.assert_array_equal(np.signbit(weight), np.signbit(z["dequant"]))
    assert np.all(np.abs(weight[~normal]) < tiny)
    narrow = decode(z["weight_packed"], z["weight_scale"], dtype=jnp.bfloat16)
    bits = narrow.view(np.int16)
    np.testing.assert_array_equal(bits[normal], z["dequant_bf16_bits"][normal])
    linear = decode(z["linear_weight_packed"], z["linear_weight_scale"], dtype=jnp.float32)
    np.testing.assert_array_equal(linear, z["linear_dequant"])
    y = jnp.matmul(z["linear_x"], linear.T, precision="highest")
    assert_close(y, z["linear_y"], 1e-5)


def test_mxfp4_golden(golden):
    check_mxfp4_golden(golden)


@pytest.mark.gpu
def test_golden_on_this_device(golden, experts):
    check_mxfp4_golden(golden)
    for implementation, kinds in IMPLEMENTATIONS.items():
        for kind in kinds:
            check(experts, random_ids(33), implementation, kind)


def test_every_scale_has_its_own_block():
    """A 128 x 64 matrix of ones under scales that differ from row to row and block to block."""
    row, block = np.arange(128)[:, None], np.arange(2)[None, :]
    scale = (127 + (row * 7 + block * 3) % 11 - 5).astype(np.uint8)
    ones = np.full((128, 32), 0x22, np.uint8)
    weight = decode(ones, scale, dtype=jnp.float32)
    expected = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
    np.testing.assert_array_equal(
        jnp.matmul(weight, np.eye(64, dtype=np.float32), precision="highest"), expected
    )


def test_fused_gate_and_up_are_decoded_like_separate_ones():
    """Three scale blocks a row; taking an expert takes its codes and its scales."""
    rng = np.random.default_rng(4)
    up, down = packed_matrices(rng, 3, 2, 32, 96), packed_matrices(rng, 3, 96, 32)
    take = on_host(jax.jit(MXFP4Experts.take, static_argnames="dtype"))
    taken = take(MXFP4Experts(*up, *down), jnp.asarray([2, 0], jnp.int32), dtype=jnp.float32)
    for place, expert in enumerate((2, 0)):
        for part in (0, 1):
            separate = mxfp4.dequantize(*(np.asarray(x)[expert, part] for x in up))
            np.testing.assert_array_equal(taken.gate_up[place, part], separate)
        separate = mxfp4.dequantize(*(np.asarray(x)[expert] for x in down))
        np.testing.assert_array_equal(taken.down[place], separate)


@pytest.mark.parametrize("groups", [2, 3])
def test_a_width_of_no_whole_blocks_is_refused(groups):
    with pytest.raises(TypeError):  # 80 columns have two blocks and a half
        decode(np.zeros((4, 40), np.uint8), np.zeros((4, groups), np.uint8), dtype=jnp.float32)
