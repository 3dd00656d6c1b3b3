"""Named sizes of mla_decode."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case


def make(
    key,
    *,
    batch,
    heads,
    context,
    width=576,
    page_size=64,
    dtype=jnp.bfloat16,
    pool_scale=None,
):
    """Sequences from half to all of `context` tokens long; pages from the end of the pool on.

    pool_scale: makes the pool float8, with rows stored divided by it.
    """
    keys = jax.random.split(key, 2)
    q = jax.random.normal(keys[0], (batch, heads, width), dtype)
    pages = -(-context // page_size)
    pool = jax.random.normal(keys[1], (2, batch * pages, page_size, width), dtype)
    table = jnp.arange(batch * pages, dtype=jnp.int32)[::-1].reshape(batch, pages)
    lens = context - jnp.arange(batch, dtype=jnp.int32) * (context // 2) // batch
    if pool_scale is None:
        return (q, pool, jnp.int32(1), table, lens), {}
    pool = (pool.astype(jnp.float32) / pool_scale).astype(jnp.float8_e4m3fn)
    return (q, pool, jnp.int32(1), table, lens), {"pool_scale": jnp.float32(pool_scale)}


def _case(*, scale, value_dim, **sizes) -> Case:
    return Case(make, sizes, {"scale": scale, "value_dim": value_dim})


_k3 = functools.partial(_case, heads=96, scale=192**-0.5, value_dim=512)
_tiny = {"width": 12, "page_size": 16, "scale": 0.3, "value_dim": 8}

CASES = {
    "tiny": _case(batch=3, heads=2, context=600, dtype=jnp.float32, **_tiny),
    "tiny_fp8": _case(batch=3, heads=2, context=600, dtype=jnp.float32, pool_scale=0.1, **_tiny),
    "k3_64_at_4k": _k3(batch=64, context=4096),
    "k3_tp8_64_at_4k": _k3(batch=64, heads=12, context=4096),
    "k3_tp8_64_at_4k_fp8": _k3(batch=64, heads=12, context=4096, pool_scale=0.1),
    "k3_tp8_8_at_128k": _k3(batch=8, heads=12, context=131072),
}
