"""Parameters and the small layers that every part of the model uses.

A parameter is declared (shape, dtype, logical axes, kind of initial value) and holds no numbers
until a checkpoint or `K3Model.init` fills it, so that a model of any size can be laid out for free.
Weights keep the published [out, in] order.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.distributed import collectives
from pallas_kernels.common.attention import matmul_precision
from pallas_kernels.common.functions import rms_norm, situ, swiglu


def parameter(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype, init: str = "normal"):
    """A parameter without values; `init` names how `initial_value` fills it."""
    if len(shape) != len(axes):
        raise ValueError(f"{shape=} and {axes=} differ in rank")
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), logical_axes=axes, init=init)


def dot(
    x: Float[Array, "*B I"], weight: Float[Array, "O I"], out_dtype=None
) -> Float[Array, "*B O"]:
    """x weight^T, accumulated in float32, in x's dtype unless told otherwise."""
    out = jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.astype(x.dtype if out_dtype is None else out_dtype)


class Linear(nnx.Module):
    """y = x weight^T, weight [out, in]. Splitting `out` needs no exchange; splitting `in` leaves a
    partial sum, which the caller reduces."""

    def __init__(self, in_features: int, out_features: int, axes: tuple[str | None, ...], dtype):
        self.weight = parameter((out_features, in_features), axes, dtype)

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        return dot(x, self.weight[...])


class RMSNorm(nnx.Module):
    """weight * x / rms(x): statistics in float32, rounded to x's dtype before the weight."""

    def __init__(self, dim: int, *, eps: float, dtype):
        self.weight = parameter((dim,), (None,), dtype, init="ones")
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(x, self.weight[...], self.eps)


class Embedding(nnx.Module):
    """Token vectors; the vocabulary may be split over tp."""

    def __init__(self, vocab_size: int, dim: int, dtype):
        self.weight = parameter((vocab_size, dim), ("vocab", None), dtype)

    def __call__(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Ids outside the vocabulary give zeros."""
        table = self.weight[...]
        row = ids - collectives.axis_index("tp") * table.shape[0]
        found = (row >= 0) & (row < table.shape[0])
        vectors = table[jnp.where(found, row, 0)]
        vectors = jnp.where(found[:, None], vectors, jnp.zeros((), table.dtype))
        return collectives.all_reduce(vectors, "tp")


def gated_activation(config: K3Config) -> Callable:
    """The elementwise (gate, up) -> hidden function of every MLP of the model."""
    if config.hidden_act == "silu":
        return swiglu
    return functools.partial(
        situ,
        beta=config.activation_situ_beta,
        linear_beta=config.activation_situ_linear_beta,
    )


class MLP(nnx.Module):
    """down(activation(gate(x), up(x))); the width may be split over tp."""

    def __init__(self, config: K3Config, width: int, dtype):
        self.gate_proj = Linear(config.hidden_size, width, ("mlp", None), dtype)
        self.up_proj = Linear(config.hidden_size, width, ("mlp", None), dtype)
        self.down_proj = Linear(width, config.hidden_size, (None, "mlp"), dtype)
        self.activation = gated_activation(config)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        hidden = self.activation(self.gate_proj(x), self.up_proj(x))
        return collectives.all_reduce(self.down_proj(hidden), "tp")


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "init", "scale"))
def initial_value(key, *, shape: tuple[int, ...], dtype, init: str, scale: float):
    """A value to start training from, or to test with, by kind of parameter."""
    if init == "normal":
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    if init == "ones":
        return jnp.ones(shape, dtype)
    if init == "zeros":
        return jnp.zeros(shape, dtype)
    if init == "conv":  # a few taps: unit gain in the mean square
        return (shape[-1] ** -0.5 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    if init == "A_log":
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)
    if init == "mxfp4_codes":
        return jax.random.bits(key, shape, jnp.uint8)
    if init == "mxfp4_scale":  # codes average 2.2 in magnitude: a scale that gives about `scale`
        exponent = 127 + round(math.log2(scale / 2.8))
        return jnp.full(shape, exponent, jnp.uint8)
    raise ValueError(f"unknown {init=}")
