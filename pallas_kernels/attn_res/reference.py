"""Attention Residuals in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attn_res(
    bank: Float[Array, "N T D"],
    prefix: Float[Array, "T D"],
    query: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T N_plus_1"]]:
    """See api.attn_res."""
    sources = jnp.concatenate([bank, prefix[None]], axis=0).astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(sources * sources, axis=-1) + eps)
    scores = jnp.sum(sources * query.astype(jnp.float32)[None, None, :], axis=-1) * inverse_rms
    weights = jax.nn.softmax(scores, axis=0)
    mix = jnp.sum(weights[..., None] * sources, axis=0)
    return mix.astype(prefix.dtype), weights.T
