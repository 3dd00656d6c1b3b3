"""The same, a few pages at a time up to the longest sequence, so that cost follows real lengths."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.attention import (
    masked_attention,
    matmul_precision,
    merge_attention,
    widen,
)

TOKENS_PER_STEP = 512


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
    batch, heads, width = q.shape
    page = pool.shape[2]
    span = min(page_table.shape[1], max(1, TOKENS_PER_STEP // page))  # pages a step
    steps = -(-page_table.shape[1] // span)
    table = jnp.pad(page_table, ((0, 0), (0, steps * span - page_table.shape[1])))

    def part(i):
        first = i * (span * page)
        position = first + jnp.arange(span * page, dtype=jnp.int32)[None, :]
        inside = position < seq_lens[:, None]
        ids = jax.lax.dynamic_slice_in_dim(table, i * span, span, axis=1)
        ids = jnp.where(inside.reshape(batch, span, page)[..., 0], ids, 0)
        keys = pool[layer, ids].reshape(batch, span * page, width)
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
        return masked_attention(scores, mask, keys[..., :value_dim])

    if steps == 1:
        return part(jnp.int32(0))[0].astype(q.dtype)
    empty = (
        jnp.zeros((batch, heads, value_dim), jnp.float32),
        jnp.full((batch, heads), -jnp.inf, jnp.float32),
    )
    needed = (jnp.max(seq_lens) + (span * page - 1)) // (span * page)
    out, _ = jax.lax.fori_loop(
        jnp.int32(0), needed, lambda i, done: merge_attention(done, part(i)), empty
    )
    return out.astype(q.dtype)
