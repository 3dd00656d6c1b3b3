"""Formulas that several operators share. Float32 inside, dtype of the input outside.

Everything here is plain `jax.numpy` and runs under strict dtype and rank promotion.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

L2_NORM_EPS = 1e-6  # added to the sum of squares, not to their mean


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*B D"]:
    """scale * x / rms(x): statistics in float32, rounded to x's dtype before the scale."""
    xf = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + eps)
    # The reference implementation's order of rounding.
    return (xf * inverse_rms).astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


def gated_rms_norm(
    x: Float[Array, "*B V"], gate: Float[Array, "*B V"], scale: Float[Array, " V"], eps: float
) -> Float[Array, "*B V"]:
    """scale * x / rms(x) * sigmoid(gate), all in float32, rounded once to gate's dtype."""
    xf = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + eps)
    normed = xf * inverse_rms * jnp.broadcast_to(scale.astype(jnp.float32), x.shape)
    return (normed * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis; the result stays float32."""
    xf = x.astype(jnp.float32)
    return xf * jax.lax.rsqrt(jnp.sum(xf * xf, axis=-1, keepdims=True) + L2_NORM_EPS)


def decay_gate(
    f: Float[Array, "*B H K"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "*B H K"]:
    """Log decay g of Kimi Delta Attention, always float32.

    lower_bound given (K3): g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias)), above the bound.
    lower_bound None (Kimi-Linear): g = -exp(A_log) * softplus(f + dt_bias), unbounded below.
    bfloat16 would round a retention of 0.9999 to 1 and freeze the channel.
    """
    raw = f.astype(jnp.float32) + jnp.broadcast_to(dt_bias.astype(jnp.float32), f.shape)
    rate = jnp.broadcast_to(jnp.exp(A_log.astype(jnp.float32))[:, None], f.shape)
    if lower_bound is None:
        return -rate * jax.nn.softplus(raw)
    return lower_bound * jax.nn.sigmoid(rate * raw)


def situ(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    beta: float,
    linear_beta: float | None,
) -> Float[Array, "*B F"]:
    """SiTU activation: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    linear_beta None passes `up` unchanged. A beta of 0 means 1, as in the published configuration.
    """
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    beta = beta or 1.0
    bounded = u if linear_beta is None else linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * bounded).astype(gate.dtype)


def swiglu(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """silu(gate) * up."""
    g = gate.astype(jnp.float32)
    return (g * jax.nn.sigmoid(g) * up.astype(jnp.float32)).astype(gate.dtype)
