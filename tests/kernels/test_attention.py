"""Attention in parts: masked softmax, and the merge of parts by log-sum-exp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.common.attention import masked_attention, merge_attention
from tests.kernels.oracle import assert_close

QUERIES, KEYS, VALUES = 5, 8, 3
RNG = np.random.default_rng(0)
SCORES = 3 * RNG.standard_normal((QUERIES, KEYS)).astype(np.float32)
CONTENT = RNG.standard_normal((KEYS, VALUES)).astype(np.float32)


@jax.jit
def in_parts(scores, mask, owner, values):
    """Keys dealt to three parts by `owner`, merged one by one onto an empty part."""
    whole = masked_attention(scores, mask, values)
    merged = jnp.zeros_like(whole[0]), jnp.full_like(whole[1], -jnp.inf)
    for part in range(3):
        mine = mask & jnp.broadcast_to((owner == part)[None], mask.shape)
        merged = merge_attention(merged, masked_attention(scores, mine, values))
    return whole, merged


def by_hand(scores, mask, values):
    p = np.where(mask, np.exp(scores.astype(np.float64)), 0)
    total = p.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p @ values / np.where(total > 0, total, 1), np.log(total[:, 0])


def check(mask, owner, shift=0.0):
    whole, merged = in_parts(SCORES + np.float32(shift), mask, owner, CONTENT)
    out, lse = by_hand(SCORES, mask, CONTENT)
    for got_out, got_lse in (whole, merged):
        assert_close(got_out, out, 1e-5)
        # Shifted scores are rounded at the size of the shift.
        np.testing.assert_allclose(got_lse - np.float32(shift), lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.booleans(), min_size=KEYS, max_size=KEYS), min_size=QUERIES, max_size=QUERIES
    ),
    st.lists(st.integers(0, 3), min_size=KEYS, max_size=KEYS),
)
def test_any_split_of_the_keys_merges_to_the_whole(mask, owner):
    owner = np.asarray(owner)
    mask = np.asarray(mask) & (owner < 3)  # keys of nobody are masked
    check(mask, owner)


def test_a_part_without_keys_counts_for_nothing():
    """F008: an empty part merges as nothing, two of them as zeros.

    One part has no key for row 0 and three for row 1, the other two for both; row 2 has none."""
    mask = np.zeros((QUERIES, KEYS), bool)
    mask[:2, :2] = True
    mask[1, 2:5] = True
    check(mask, np.asarray([0, 0, 1, 1, 1, 2, 2, 2]))


@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_scores_far_from_zero(shift):
    """exp of the scores themselves would leave float32's range."""
    scores = SCORES + np.float32(shift)
    mask = np.ones((QUERIES, KEYS), bool)
    mask[0] = False
    whole, merged = in_parts(scores, mask, np.arange(KEYS) % 3, CONTENT)
    out, lse = by_hand(scores - np.float32(shift), mask, CONTENT)
    for got_out, got_lse in (whole, merged):
        assert_close(got_out, out, 2e-5)  # scores near 100 are themselves rounded to 4e-6
        np.testing.assert_allclose(got_lse, lse + shift, rtol=1e-5)


def test_gradient_is_finite_with_a_fully_masked_row():
    """F078: no NaN from the branch not taken."""
    mask = np.ones((QUERIES, KEYS), bool)
    mask[0] = False
    mask[1, 3:] = False

    @functools.partial(jax.jit, static_argnames="attend")
    def gradients(scores, values, attend):
        weights = jnp.arange(QUERIES * VALUES, dtype=jnp.float32).reshape(QUERIES, VALUES)

        def loss(scores, values):
            out, lse = attend(scores, jnp.asarray(mask), values)
            # A normalisation behind the softmax is what turns a zero row into NaN.
            norm = jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + 1e-5)
            return jnp.sum(weights * out * norm) + jnp.sum(jnp.where(mask.any(1), lse, 0.0))

        return jax.grad(loss, (0, 1))(scores, values)

    def plain(scores, mask, values):  # no -inf anywhere: finite for sure
        p = jnp.where(mask, jnp.exp(scores), 0.0)
        total = jnp.maximum(jnp.sum(p, axis=1), 1e-30)
        out = jnp.matmul(p, values, precision="highest") / total[:, None]
        return out, jnp.log(total)

    for got, expected in zip(
        gradients(SCORES, CONTENT, masked_attention), gradients(SCORES, CONTENT, plain), strict=True
    ):
        assert_close(got, expected, 1e-5)
    d_scores = gradients(SCORES, CONTENT, masked_attention)[0]
    assert not np.any(d_scores[~mask])
