"""Latent rows stored as float8: decode and prefill read them times their layer's scale."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import api as decode_api
from pallas_kernels.mla_decode.cases import CASES as DECODE
from pallas_kernels.mla_prefill import api as prefill_api
from pallas_kernels.mla_prefill.cases import CASES as PREFILL

SCALE = 0.125


def stored(pool):
    return (pool / SCALE).astype(jnp.float8_e4m3fn)


def widened(pool):
    return pool.astype(jnp.float32) * SCALE


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_decode(implementation):
    case = DECODE["tiny"]
    (q, pool, *rest), _ = case.arguments()
    rows = stored(pool)
    found = decode_api.mla_decode(
        q, rows, *rest, **case.static, pool_scale=jnp.float32(SCALE), implementation=implementation
    )
    expected = decode_api.mla_decode(
        q, widened(rows), *rest, **case.static, implementation="reference"
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    plain = decode_api.mla_decode(q, pool, *rest, **case.static, implementation=implementation)
    assert 0 < np.abs(found - plain).max() < 0.2  # 4 significant bits


def test_prefill():
    case = PREFILL["tiny_context"]
    arguments, options = case.arguments()
    context = options["context"]
    rows = stored(context.pool)

    def run(**changes):
        changed = dataclasses.replace(context, **changes)
        return prefill_api.mla_prefill(*arguments, context=changed, **case.static)

    found = run(pool=rows, scale=jnp.float32(SCALE))
    np.testing.assert_allclose(found, run(pool=widened(rows)), rtol=1e-5, atol=1e-5)
