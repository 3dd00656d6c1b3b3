"""Named sizes of mla_decode."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case


def make(key, *, batch, heads, context, width=576, page_size=64, dtype=jnp.bfloat16):
    """Sequences from half to all of `context` tokens long; pages from the end of the pool on."""
    keys = jax.random.split(key, 2)
    q = jax.random.normal(keys[0], (batch, heads, width), dtype)
    pages = -(-context // page_size)
    pool = jax.random.normal(keys[1], (2, batch * pages, page_size, width), dtype)
    table = jnp.arange(batch * pages, dtype=jnp.int32)[::-1].reshape(batch, pages)
    lens = context - jnp.arange(batch, dtype=jnp.int32) * (context // 2) // batch
    return (q, pool, jnp.int32(1), table, lens), {}


def _case(*, scale, value_dim, **sizes) -> Case:
    return Case(make, sizes, {"scale": scale, "value_dim": value_dim})


_k3 = functools.partial(_case, heads=96, scale=192**-0.5, value_dim=512)
_tiny = {"width": 12, "page_size": 16, "scale": 0.3, "value_dim": 8}

CASES = {
    "tiny": _case(batch=3, heads=2, context=600, dtype=jnp.float32, **_tiny),
    "k3_64_at_4k": _k3(batch=64, context=4096),
    "k3_tp8_64_at_4k": _k3(batch=64, heads=12, context=4096),
    "k3_tp8_8_at_128k": _k3(batch=8, heads=12, context=131072),
}
