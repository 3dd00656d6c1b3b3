"""Absorbed latent attention over all pages at once."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.attention import masked_attention, matmul_precision, widen


def mla_decode(
    q: Float[Array, "B N R"],
    pool: Float[Array, "L P page R"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    scale: float,
    value_dim: int,
    pool_scale: Float[Array, ""] | None = None,
) -> Float[Array, "B N V"]:
    """See api.mla_decode."""
    batch, _, width = q.shape
    num_pages, page = page_table.shape[1], pool.shape[2]
    position = jnp.arange(num_pages * page, dtype=jnp.int32)[None, :]
    inside = position < seq_lens[:, None]
    used = inside.reshape(batch, num_pages, page)[..., 0]
    keys = pool[layer, jnp.where(used, page_table, 0)].reshape(batch, num_pages * page, width)
    keys = jnp.where(inside[..., None], keys, jnp.zeros((), keys.dtype))
    keys = widen(keys, pool_scale).astype(q.dtype)
    scores = scale * jnp.einsum(
        "bnr,bsr->bns",
        q,
        keys,
        precision=matmul_precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    mask = jnp.broadcast_to(inside[:, None, :], scores.shape)
    return masked_attention(scores, mask, keys[..., :value_dim])[0].astype(q.dtype)
