"""Softmax attention in parts: each part gives (output, log-sum-exp), and parts merge exactly."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_attention(
    scores: Float[Array, "*B Q S"],
    mask: Bool[Array, "*B Q S"],
    values: Float[Array, "*B S V"],
) -> tuple[Float[Array, "*B Q V"], Float[Array, "*B Q"]]:
    """softmax(scores) values over the keys that `mask` admits, and the natural log-sum-exp.

    A row with no key gives 0 and -inf, and its gradient is finite. Scores are float32;
    probabilities are rounded to values' dtype for the product, which accumulates in float32.
    """
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    p = jnp.exp(scores - peak)
    total = jnp.sum(p, axis=-1)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum(
        "...qs,...sv->...qv",
        p.astype(values.dtype),
        values,
        precision=matmul_precision(values.dtype),
        preferred_element_type=jnp.float32,
    )
    lse = jnp.where(total > 0, peak[..., 0] + jnp.log(safe), -jnp.inf)
    return out / safe[..., None], lse


def merge_attention(a, b):
    """Attention over the union of two disjoint sets of keys, from two (output, lse) pairs."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    peak = jnp.maximum(lse_a, lse_b)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = weight_a + weight_b
    safe = jnp.where(total > 0, total, 1.0)
    out = (out_a * weight_a[..., None] + out_b * weight_b[..., None]) / safe[..., None]
    return out, jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)


def matmul_precision(dtype) -> jax.lax.Precision:
    """True float32 products for float32 operands; TF32 would flip experts."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def widen(rows: Float[Array, "*shape"], scale: Float[Array, ""] | None) -> Float[Array, "*shape"]:
    """Cached rows as they were before they were stored: float8 rows times their scale, float32."""
    return rows if scale is None else rows.astype(jnp.float32) * scale
