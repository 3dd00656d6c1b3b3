"""Top-k routing in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def router(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    top_k: int,
    num_groups: int,
    kept_groups: int,
    activation: str,
    renormalize: bool,
    scaling_factor: float,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """See api.router."""
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores + jnp.broadcast_to(bias.astype(jnp.float32), scores.shape)
    if kept_groups < num_groups:
        tokens, experts = choice.shape
        grouped = choice.reshape(tokens, num_groups, experts // num_groups)
        group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        kept = jax.lax.top_k(group_scores, kept_groups)[1]
        groups = jnp.arange(num_groups, dtype=kept.dtype)[None, None, :]
        is_kept = jnp.any(kept[:, :, None] == groups, axis=1)
        choice = jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
    ids = jax.lax.top_k(choice, top_k)[1].astype(jnp.int32)  # equal scores: the lower id first
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if renormalize and top_k > 1:  # a single choice keeps its score, as in the reference model
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * scaling_factor
