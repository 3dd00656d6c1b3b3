"""Named sizes of moe_experts."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.cases import Case
from pallas_kernels.common.functions import situ
from pallas_kernels.moe_experts.types import DenseExperts, MXFP4Experts

_STATIC = {"activation": functools.partial(situ, beta=4.0, linear_beta=25.0)}


def make(key, *, tokens, top_k, experts, width, dim, packed=True, dtype=jnp.bfloat16):
    """Random routing; experts of `width` that read and write `dim` channels, MXFP4 or dense."""
    keys = jax.random.split(key, 6)
    x = jax.random.normal(keys[0], (tokens, dim), dtype)
    ids = jax.lax.top_k(jax.random.uniform(keys[1], (tokens, experts), jnp.float32), top_k)[1]
    weights = jax.nn.softmax(jax.random.normal(keys[2], (tokens, top_k), jnp.float32), axis=-1)
    up, down = (experts, 2, width, dim), (experts, dim, width)

    def codes_and_scales(key, shape):
        *lead, columns = shape
        codes, scales = jax.random.split(key)
        return (
            jax.random.bits(codes, (*lead, columns // 2), jnp.uint8),
            jax.random.randint(scales, (*lead, columns // 32), 119, 124, jnp.uint8),
        )

    if packed:
        weight: DenseExperts | MXFP4Experts = MXFP4Experts(
            *codes_and_scales(keys[3], up), *codes_and_scales(keys[4], down)
        )
    else:
        weight = DenseExperts(
            dim**-0.5 * jax.random.normal(keys[3], up, dtype),
            width**-0.5 * jax.random.normal(keys[4], down, dtype),
        )
    return (x, ids, weights, weight), {}


def _case(**sizes) -> Case:
    return Case(make, sizes, _STATIC)


_k3 = functools.partial(_case, top_k=16, experts=896, width=3072, dim=3584)
_tiny = functools.partial(
    _case, top_k=2, experts=8, width=32, dim=64, packed=False, dtype=jnp.float32
)

CASES = {
    "tiny": _tiny(tokens=9),
    "tiny_mxfp4": _tiny(tokens=9, packed=True),
    "k3_1": _k3(tokens=1),
    "k3_64": _k3(tokens=64),
    "k3_8k": _k3(tokens=8192),
    "k3_tp8_1": _k3(tokens=1, width=384),
    "k3_tp8_64": _k3(tokens=64, width=384),
    "k3_tp8_8k": _k3(tokens=8192, width=384),
}
