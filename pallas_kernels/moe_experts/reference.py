"""Routed experts, every expert for every token, weighted by zero where not chosen."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.attention import matmul_precision
from pallas_kernels.moe_experts.types import DenseExperts, MXFP4Experts


def moe_experts(
    x: Float[Array, "T Z"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: DenseExperts | MXFP4Experts,
    activation: Callable,
) -> Float[Array, "T Z"]:
    """See api.moe_experts."""
    num_experts = (
        experts.gate_up.shape[0]
        if isinstance(experts, DenseExperts)
        else (experts.gate_up_packed.shape[0])
    )
    precision = matmul_precision(x.dtype)
    total = jnp.zeros(x.shape, jnp.float32)
    for e in range(num_experts):
        w = experts.take(jnp.int32(e), x.dtype)
        gate, up = (jnp.matmul(x, w.gate_up[i].T, precision=precision) for i in (0, 1))
        y = jnp.matmul(activation(gate, up), w.down.T, precision=precision)
        weight = jnp.sum(jnp.where(ids == e, weights, 0.0), axis=1)
        total = total + weight[:, None] * y.astype(jnp.float32)
    return total
