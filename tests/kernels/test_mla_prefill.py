"""Causal attention of new tokens, over each other and over cached latents, in any split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.common.segments import Segments
from pallas_kernels.mla_prefill import LatentContext, mla_prefill
from tests.kernels import oracle
from tests.kernels.oracle import assert_close, on_host

TOKENS, BATCH, HEADS = 160, 3, 2
NOPE, SHARED, VALUE, RANK = 8, 4, 6, 10  # all different: a swap fails on its shape
MAX_CONTEXT, SCALE, LIMIT = 192, 0.4, 1e-5

call = on_host(jax.jit(mla_prefill, static_argnames=("scale", "implementation")))


class Sequence:
    """One sequence as the model sees it: queries and cache rows, expanded by k_up and v_up."""

    def __init__(self, seed, length, k_up, v_up):
        rng = np.random.default_rng(seed)
        self.q = rng.standard_normal((length, HEADS, NOPE + SHARED)).astype(np.float32)
        self.rows = rng.standard_normal((length, RANK + SHARED)).astype(np.float32)
        latent, shared = self.rows[:, :RANK], self.rows[:, RANK:]
        nope = np.einsum("tr,nkr->tnk", latent, k_up)
        shared = np.broadcast_to(shared[:, None], (length, HEADS, SHARED))
        self.k = np.concatenate([nope, shared], axis=-1)
        self.v = np.einsum("tr,nvr->tnv", latent, v_up)

    @functools.cached_property
    def expected(self):
        each = range(len(self.q))
        return np.stack(
            [oracle.attention(self.q[t], self.k[: t + 1], self.v[: t + 1], SCALE) for t in each]
        )


@pytest.fixture(scope="module")
def up():
    rng = np.random.default_rng(0)
    k_up, v_up = rng.standard_normal((HEADS, NOPE, RANK)), rng.standard_normal((HEADS, VALUE, RANK))
    return k_up.astype(np.float32), v_up.astype(np.float32)


@pytest.fixture(scope="module")
def sequences(up):
    return [Sequence(seed, TOKENS, *up) for seed in (1, 2, 3)]


def lay_out(sequences, contexts, lens, poison=np.nan):
    """Packed q, k, v of tokens contexts[b] … contexts[b] + lens[b], poison behind the last."""
    starts = np.cumsum([0, *lens[:-1]])
    packed = [
        np.full((TOKENS, *x.shape[1:]), poison, np.float32)
        for x in (sequences[0].q, sequences[0].k, sequences[0].v)
    ]
    for sequence, start, context, length in zip(sequences, starts, contexts, lens, strict=True):
        for buffer, x in zip(packed, (sequence.q, sequence.k, sequence.v), strict=True):
            buffer[start : start + length] = x[context : context + length]
    segments = Segments(jnp.asarray(starts, jnp.int32), jnp.asarray(lens, jnp.int32))
    return packed, segments


def cache(sequences, contexts, up, page_size):
    """The first contexts[b] rows of each sequence, in scattered pages; NaN wherever else."""
    max_pages = MAX_CONTEXT // page_size
    pages = np.random.default_rng(5).permutation(BATCH * max_pages).astype(np.int32)
    table = pages.reshape(BATCH, max_pages).copy()
    pool = np.full((2, BATCH * max_pages, page_size, RANK + SHARED), np.nan, np.float32)
    for b, (sequence, context) in enumerate(zip(sequences, contexts, strict=True)):
        for t in range(context):
            pool[1, table[b, t // page_size], t % page_size] = sequence.rows[t]
        table[b, -(-context // page_size) :] = 2**30  # not an id: must not be read
    arrays = (pool, np.int32(1), table, np.asarray(contexts, np.int32), *up)
    return LatentContext(*(jnp.asarray(x) for x in arrays))


def check(sequences, up, contexts, lens, page_size, implementation=None, poison=np.nan):
    packed, segments = lay_out(sequences, contexts, lens, poison)
    context = cache(sequences, contexts, up, page_size)
    out = call(*packed, segments, context=context, scale=SCALE, implementation=implementation)
    expected = np.zeros((TOKENS, HEADS, VALUE))
    for sequence, start, context, length in zip(
        sequences, np.cumsum([0, *lens[:-1]]), contexts, lens, strict=True
    ):
        expected[start : start + length] = sequence.expected[context : context + length]
    assert_close(out, expected, LIMIT, f"{contexts=} {lens=} {page_size=}")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("lens", [[53, 53, 54], [1, 0, 90], [0, 0, 0], [160, 0, 0]], ids=str)
def test_without_context(sequences, implementation, lens):
    zero = [0, 0, 0]
    # The reference multiplies padding by a probability of zero, so there it must be finite.
    poison = np.nan if implementation == "xla" else 1e30
    packed, segments = lay_out(sequences, zero, lens, poison)
    out = call(*packed, segments, scale=SCALE, implementation=implementation)
    for sequence, start, length in zip(sequences, np.cumsum([0, *lens[:-1]]), lens, strict=True):
        if length:
            assert_close(out[start : start + length], sequence.expected[:length], LIMIT)
    assert not np.any(out[sum(lens) :])


@pytest.mark.parametrize("split", [1, 63, 64, 65, 128, 129, 150])
def test_a_prompt_split_anywhere(sequences, up, split):
    """The second part of three prompts, each cut at another place; one has no context at all."""
    contexts = [split, 0, 160 - split]
    check(sequences, up, contexts, [min(160 - split, 60), 40, min(split, 60)], 64)


def test_the_reference_over_context(sequences, up):
    """It multiplies padding by a probability of zero, so there it must be finite."""
    check(sequences, up, [70, 0, 129], [50, 40, 20], 16, "reference", poison=1e30)
    check(sequences, up, [150, 7, 129], [0, 0, 20], 64, "reference", poison=1e30)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_float8_rows(sequences, up, implementation):
    """As the reference over rows widened beforehand; 0.1 is not a power of two."""
    contexts, lens, stored_by = [70, 0, 129], [50, 40, 20], np.float32(0.1)
    packed, segments = lay_out(sequences, contexts, lens, poison=1e30)
    wide = cache(sequences, contexts, up, 16)
    narrow = dataclasses.replace(
        wide,
        pool=(wide.pool / stored_by).astype(jnp.float8_e4m3fn),
        scale=jnp.asarray(stored_by),
    )
    wide = dataclasses.replace(wide, pool=narrow.pool.astype(jnp.float32) * stored_by)
    run = functools.partial(call, *packed, segments, scale=SCALE)
    expected = run(context=wide, implementation="reference")
    assert_close(run(context=narrow, implementation=implementation), expected, LIMIT)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(sequences, up, page_size):
    check(sequences, up, [31, 32, 33], [50, 1, 60], page_size)
    check(sequences, up, [64, 0, 127], [10, 60, 33], page_size)
    check(sequences, up, [0, 0, 0], [10, 60, 33], page_size)  # no step over context
    check(sequences, up, [150, 7, 129], [0, 0, 20], page_size)  # nothing new for two of them


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 160), st.integers(0, 53)), min_size=3, max_size=3))
@example([(160, 0), (107, 53), (0, 53)])
def test_any_contexts_and_lengths(sequences, up, pairs):
    contexts = [context for context, _ in pairs]
    lens = [min(length, TOKENS - context) for context, length in pairs]
    check(sequences, up, contexts, lens, 16)


def test_a_poisoned_sequence_does_not_reach_its_neighbours(sequences):
    """A probability of zero times NaN is NaN: no value of another sequence may be multiplied."""
    packed, segments = lay_out(sequences, [0, 0, 0], [50, 50, 60])
    clean = call(*packed, segments, scale=SCALE)
    for poisoned in range(3):
        inputs = [x.copy() for x in packed]
        inputs[poisoned][20, 0, 3] = np.nan
        out = call(*inputs, segments, scale=SCALE)
        np.testing.assert_array_equal(out[:20], clean[:20])
        np.testing.assert_array_equal(out[50:], clean[50:])
        assert np.isnan(out[20, 0]).any(), "the poisoned token must show it"


def test_several_blocks_of_queries():
    """More tokens than one block of queries holds, with sequences across its border."""
    rng = np.random.default_rng(8)
    tokens = 1100
    q, k, v = (rng.standard_normal((tokens, 1, d)).astype(np.float32) for d in (4, 4, 3))
    segments = Segments(
        jnp.asarray([0, 500, 1030], jnp.int32), jnp.asarray([500, 530, 70], jnp.int32)
    )
    out = call(q, k, v, segments, scale=SCALE)
    assert_close(out, call(q, k, v, segments, scale=SCALE, implementation="reference"), LIMIT)


def test_gradients_without_context(sequences):
    packed, segments = lay_out(sequences, [0, 0, 0], [30, 0, 50], poison=1e3)
    weights = np.random.default_rng(9).standard_normal((TOKENS, HEADS, VALUE)).astype(np.float32)

    @on_host
    @functools.partial(jax.jit, static_argnames="implementation")
    def gradients(q, k, v, implementation):
        def loss(*qkv):
            out = mla_prefill(*qkv, segments, scale=SCALE, implementation=implementation)
            return jnp.sum(out * weights)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    got, expected = gradients(*packed, "xla"), gradients(*packed, "reference")
    for name, a, b in zip("qkv", got, expected, strict=True):
        assert_close(a, b, LIMIT, name)
        assert np.any(a[:80]) and not np.any(a[80:])
    # The reference itself, by a difference along the gradient of v, in which the loss is linear.
    step = np.asarray(expected[2])

    def loss(v):
        out = np.asarray(call(*packed[:2], v, segments, scale=SCALE), np.float64)
        return np.sum(weights * out)

    slope = loss(packed[2] + step) - loss(packed[2])
    np.testing.assert_allclose(slope, np.sum(step.astype(np.float64) ** 2), rtol=1e-3)


def test_bfloat16_in_and_out(sequences, up):
    """Softmax in float32; probabilities and the result are rounded."""
    packed, segments = lay_out(sequences, [64, 0, 0], [60, 40, 60])
    context = cache(sequences, [64, 0, 0], up, 64)
    wide = call(*packed, segments, context=context, scale=SCALE)
    packed = [x.astype(jnp.bfloat16) for x in packed]
    narrow = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x), jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype),
        context,
    )
    out = call(*packed, segments, context=narrow, scale=SCALE)
    assert out.dtype == jnp.bfloat16
    # Inputs of size 10 are rounded to 2^-8 of theirs and stand in the exponent.
    assert_close(out.astype(np.float32), wide, 0.1)


@pytest.mark.gpu
def test_split_on_this_device(sequences, up):
    test_a_prompt_split_anywhere(sequences, up, 65)
    for page_size in (1, 16, 64):
        test_page_sizes(sequences, up, page_size)
