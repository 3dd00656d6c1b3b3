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
    query = query.astype(jnp.float32)

    def score(x):  # [..., T, D] -> [..., T]
        xf = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(xf * xf, axis=-1) + eps)
        return jnp.sum(xf * jnp.broadcast_to(query, xf.shape), axis=-1) * inverse_rms

    # Rows and prefix are scored apart: stacking them would copy the bank for every mix.
    scores = jnp.concatenate([score(bank), score(prefix)[None]], axis=0)
    weights = jax.nn.softmax(scores, axis=0)
    rows = jnp.sum(weights[:-1, :, None] * bank.astype(jnp.float32), axis=0)
    mix = rows + weights[-1][:, None] * prefix.astype(jnp.float32)
    return mix.astype(prefix.dtype), weights.T
