"""Named sizes of attn_res."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case


def make(key, *, rows, tokens, width, dtype=jnp.bfloat16):
    """A full bank and a query that prefers some rows clearly."""
    keys = jax.random.split(key, 3)
    bank = jax.random.normal(keys[0], (rows, tokens, width), dtype)
    prefix = jax.random.normal(keys[1], (tokens, width), dtype)
    query = 2 * width**-0.5 * jax.random.normal(keys[2], (width,), jnp.float32)
    return (bank, prefix, query), {}


def _case(**sizes) -> Case:
    return Case(make, sizes, {"eps": 1e-5})


_k3 = functools.partial(_case, rows=8, width=7168)

CASES = {
    "tiny": _case(rows=3, tokens=7, width=64, dtype=jnp.float32),
    "k3_64": _k3(tokens=64),
    "k3_64_one_row": _k3(tokens=64, rows=1),
    "k3_8k": _k3(tokens=8192),
}
