"""Named sizes of mla_prefill."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case
from pallas_kernels.common.segments import Segments
from pallas_kernels.mla_prefill.types import LatentContext


def make(
    key,
    *,
    tokens,
    sequences,
    heads,
    nope_dim=128,
    shared_dim=64,
    value_dim=128,
    rank=512,
    context=None,
    page_size=64,
    dtype=jnp.bfloat16,
    pool_scale=None,
):
    """Sequences of equal length; with `context` each has so many cached tokens, pages in a row.

    pool_scale: makes the pool float8, with rows stored divided by it.
    """
    keys = jax.random.split(key, 6)
    q, k = (
        jax.random.normal(key, (tokens, heads, nope_dim + shared_dim), dtype) for key in keys[:2]
    )
    v = jax.random.normal(keys[2], (tokens, heads, value_dim), dtype)
    arguments = (q, k, v, Segments.rectangle(sequences, tokens // sequences))
    if context is None:
        return arguments, {}
    pages = -(-context // page_size)
    pool = jax.random.normal(keys[3], (1, sequences * pages, page_size, rank + shared_dim), dtype)
    if pool_scale is not None:
        pool = (pool.astype(jnp.float32) / pool_scale).astype(jnp.float8_e4m3fn)
    cached = LatentContext(
        pool,
        jnp.int32(0),
        jnp.arange(sequences * pages, dtype=jnp.int32).reshape(sequences, pages),
        jnp.full((sequences,), context, jnp.int32),
        rank**-0.5 * jax.random.normal(keys[4], (heads, nope_dim, rank), dtype),
        rank**-0.5 * jax.random.normal(keys[5], (heads, value_dim, rank), dtype),
        None if pool_scale is None else jnp.float32(pool_scale),
    )
    return arguments, {"context": cached}


def _case(*, scale, **sizes) -> Case:
    return Case(make, sizes, {"scale": scale})


_k3 = functools.partial(_case, heads=96, scale=192**-0.5)
_tiny = {"heads": 2, "nope_dim": 8, "shared_dim": 4, "value_dim": 6, "rank": 10, "scale": 0.3}

CASES = {
    "tiny": _case(tokens=40, sequences=2, dtype=jnp.float32, **_tiny),
    "tiny_context": _case(tokens=40, sequences=2, context=150, dtype=jnp.float32, **_tiny),
    "tiny_context_fp8": _case(
        tokens=40, sequences=2, context=150, dtype=jnp.float32, pool_scale=0.1, **_tiny
    ),
    "k3": _k3(tokens=4096, sequences=1),
    "k3_ragged": _k3(tokens=4096, sequences=16),
    "k3_tp8": _k3(tokens=8192, sequences=1, heads=12),
    "k3_tp8_context": _k3(tokens=2048, sequences=1, heads=12, context=32768),
}
