"""The mix over depth against the goldens and a plain formula, with its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res
from tests.kernels.oracle import assert_close, on_host

EPS = 1e-5
traceable_mix = functools.partial(attn_res, eps=EPS)
mix = on_host(jax.jit(traceable_mix))


def check_golden(path):
    z = np.load(path / "ops/attn_res.npz")
    assert z["eps"] == EPS
    query = z["norm_weight"] * z["proj_weight"][0]
    for rows in (1, 2, 3, 8):
        bank = np.moveaxis(z[f"n{rows}.block_residual"], 1, 0)
        out, probs = mix(bank, z[f"n{rows}.prefix_sum"], query)
        assert_close(out, z[f"n{rows}.out"], 1e-5, f"{rows=}")
        assert_close(probs, z[f"n{rows}.probs"], 1e-5, f"{rows=}")


def test_golden(golden):
    check_golden(golden)


@pytest.mark.gpu
def test_golden_on_this_device(golden):
    check_golden(golden)


def sources(rows, tokens=5, width=64):
    rng = np.random.default_rng(rows)
    bank = rng.standard_normal((rows, tokens, width)).astype(np.float32)
    prefix = rng.standard_normal((tokens, width)).astype(np.float32)
    return bank, prefix, (0.3 * rng.standard_normal(width)).astype(np.float32)


def by_hand(bank, prefix, query):
    values = np.concatenate([bank, prefix[None]]).astype(np.float64)
    rms = np.sqrt(np.mean(values**2, axis=-1) + EPS)
    p = np.exp(values @ query.astype(np.float64) / rms)
    p /= p.sum(axis=0)
    return np.einsum("nt,ntd->td", p, values), p.T


def test_the_values_are_not_normed():
    """Rows of very different size: the norm is on the keys only, and scores do not see the size."""
    bank, prefix, query = sources(3)
    bank *= np.asarray([1e-2, 1.0, 1e3], np.float32)[:, None, None]
    out, probs = mix(bank, prefix, query)
    expected, p = by_hand(bank, prefix, query)
    assert_close(out, expected, 1e-5)
    assert_close(probs, p, 1e-5)


def test_without_rows_it_is_the_prefix():
    bank, prefix, query = sources(0)
    out, probs = mix(bank, prefix, query)
    np.testing.assert_array_equal(out, prefix)
    np.testing.assert_array_equal(probs, np.ones((5, 1)))


def test_a_query_of_zeros_mixes_evenly():
    bank, prefix, query = sources(3)
    out, _ = mix(bank, prefix, 0 * query)
    assert_close(out, (bank.sum(axis=0) + prefix) / 4, 1e-6)


def test_scores_beyond_the_range_of_exp():
    """The softmax of scores of +-1000 picks one source; a source of zeros has score 0."""
    bank, prefix, _ = sources(2)
    query = np.zeros(64, np.float32)
    query[0] = 1000
    bank[..., 0], prefix[:, 0] = 1, -1
    bank[1] = 0
    out, probs = mix(bank, prefix, query)
    np.testing.assert_allclose(probs, np.eye(3)[[0] * 5], atol=1e-30)
    assert_close(out, bank[0], 1e-6)


def test_bfloat16_is_rounded_once():
    bank, prefix, query = sources(3)
    bank, prefix = bank.astype(jnp.bfloat16), prefix.astype(jnp.bfloat16)
    out, probs = mix(bank, prefix, query)
    assert out.dtype == jnp.bfloat16 and probs.dtype == jnp.float32
    expected, _ = by_hand(bank.astype(np.float32), prefix.astype(np.float32), query)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("zeroed", [None, 0, 8])
def test_gradients_are_finite_also_at_a_source_of_zeros(zeroed):
    """F078: nine sources, one maybe zero, where a norm without its eps would divide 0 by 0."""
    bank, prefix, query = sources(8)
    if zeroed == 8:
        prefix[:] = 0
    elif zeroed is not None:
        bank[zeroed] = 0
    weights = np.random.default_rng(0).standard_normal(prefix.shape).astype(np.float32)

    def plain(bank, prefix, query):
        values = jnp.concatenate([bank, prefix[None]])
        scale = jax.lax.rsqrt(jnp.mean(values * values, axis=-1) + EPS)
        scores = jnp.einsum("ntd,d->nt", values, query, precision="highest") * scale
        p = jnp.exp(scores) / jnp.sum(jnp.exp(scores), axis=0, keepdims=True)
        return jnp.sum(p[..., None] * values, axis=0), p.T

    def gradients(function):
        # Behind the mix stands a norm, which would make NaN of an infinite slope.
        def loss(*arguments):
            out, _ = function(*arguments)
            inverse_rms = jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + EPS)
            return jnp.sum(weights * out * inverse_rms)

        return on_host(jax.jit(jax.grad(loss, (0, 1, 2))))(bank, prefix, query)

    for got, expected in zip(gradients(traceable_mix), gradients(plain), strict=True):
        assert np.all(np.isfinite(got))
        # Slopes reach 1 / sqrt(eps) at a source of zeros and cancel elsewhere.
        assert_close(got, expected, 1e-4)


def test_a_poisoned_token_stays_alone():
    bank, prefix, query = sources(3)
    clean, _ = mix(bank, prefix, query)
    bank[1, 2] = np.nan
    out, _ = mix(bank, prefix, query)
    others = np.asarray([0, 1, 3, 4])
    np.testing.assert_array_equal(out[others], clean[others])
    assert np.all(np.isnan(out[2]))
