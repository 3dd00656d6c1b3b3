"""Named sizes of router."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case


def make(key, *, tokens, experts):
    """Biases large enough to change many choices."""
    keys = jax.random.split(key, 2)
    logits = jax.random.normal(keys[0], (tokens, experts), jnp.float32)
    return (logits, 0.1 * jax.random.normal(keys[1], (experts,), jnp.float32)), {}


def _case(*, top_k, groups=(1, 1), **sizes) -> Case:
    return Case(make, sizes, {"top_k": top_k, "num_groups": groups[0], "kept_groups": groups[1]})


_k3 = functools.partial(_case, experts=896, top_k=16)

CASES = {
    "tiny": _case(tokens=9, experts=16, top_k=4),
    "tiny_groups": _case(tokens=9, experts=16, top_k=3, groups=(4, 2)),
    "k3_64": _k3(tokens=64),
    "k3_8k": _k3(tokens=8192),
}
