"""Prefill attention in two parts merged by log-sum-exp: new tokens, and cached context.

New tokens attend to each other through their expanded keys and values, a block of queries at a
time. Cached latents are expanded a few pages at a time, once for each sequence; queries meet them
in blocks that belong to one sequence. Without context the second part does no step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.attention import (
    masked_attention,
    matmul_precision,
    merge_attention,
    widen,
)
from pallas_kernels.common.segments import ChunkGrid, Segments
from pallas_kernels.mla_prefill.types import LatentContext

QUERY_BLOCK = 512  # queries of the causal part per product
CONTEXT_BLOCK = 64  # queries of one sequence against context
CONTEXT_TOKENS = 128  # context tokens a step


def mla_prefill(
    q: Float[Array, "T N K"],
    k: Float[Array, "T N K"],
    v: Float[Array, "T N V"],
    segments: Segments,
    context: LatentContext | None,
    scale: float,
) -> Float[Array, "T N V"]:
    """See api.mla_prefill."""
    result = _among_new(q, k, v, segments, scale)
    if context is not None:
        result = merge_attention(result, _over_context(q, segments, context, scale))
    return result[0].astype(v.dtype)


def _product(equation, a, b):
    return jnp.einsum(
        equation, a, b, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32
    )


def _among_new(q, k, v, segments: Segments, scale):
    """(output [T, N, V], lse [T, N]) over the tokens of this call."""
    num_tokens = q.shape[0]
    ids = segments.ids(num_tokens)
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    # A probability of zero times NaN is NaN. So values that are not finite are taken out, and only
    # the queries that attend to them become NaN: other sequences of the batch stay as they are.
    broken = ~jnp.all(jnp.isfinite(v), axis=(1, 2))
    v = jnp.where(broken[:, None, None], jnp.zeros((), v.dtype), v)
    parts = []
    for start in range(0, num_tokens, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, num_tokens)
        rows, keys = slice(start, end), slice(0, end)  # later keys are never admitted
        mask = (index[rows, None] >= index[None, keys]) & (ids[rows, None] == ids[None, keys])
        mask = mask & (ids[rows] >= 0)[:, None]
        scores = scale * _product("qnk,snk->nqs", q[rows], k[keys])
        out, lse = masked_attention(
            scores, jnp.broadcast_to(mask[None], scores.shape), jnp.moveaxis(v[keys], 1, 0)
        )
        sees_broken = jnp.any(mask & broken[None, keys], axis=1)
        out = jnp.where(sees_broken[None, :, None], jnp.nan, out)
        parts.append((jnp.moveaxis(out, 0, 1), lse.T))
    return tuple(jnp.concatenate(side, axis=0) for side in zip(*parts, strict=True))


def _over_context(q, segments: Segments, context: LatentContext, scale):
    """(output [T, N, V], lse [T, N]) over the cached tokens of each query's sequence."""
    batch, num_pages = context.page_table.shape
    page, width = context.pool.shape[2:]
    heads, _, rank = context.k_up.shape
    span = min(num_pages, max(1, CONTEXT_TOKENS // page))
    steps = -(-num_pages // span)
    table = jnp.pad(context.page_table, ((0, 0), (0, steps * span - num_pages)))
    grid = ChunkGrid(segments, q.shape[0], CONTEXT_BLOCK)
    queries = jnp.moveaxis(grid.split(q), 2, 1)  # [n, N, C, K]

    def part(i):
        position = i * (span * page) + jnp.arange(span * page, dtype=jnp.int32)[None, :]
        inside = position < context.lens[:, None]  # [B, S]
        ids = jax.lax.dynamic_slice_in_dim(table, i * span, span, axis=1)
        ids = jnp.where(inside.reshape(batch, span, page)[..., 0], ids, 0)
        rows = context.pool[context.layer, ids].reshape(batch, span * page, width)
        rows = widen(jnp.where(inside[..., None], rows, jnp.zeros((), rows.dtype)), context.scale)
        rows = rows.astype(q.dtype)
        latent, shared = rows[..., :rank], rows[..., rank:]
        nope = _product("bsr,nkr->bnsk", latent, context.k_up).astype(q.dtype)
        shared = jnp.broadcast_to(shared[:, None], (batch, heads, *shared.shape[1:]))
        keys = jnp.concatenate([nope, shared], axis=-1)[grid.sequence]
        values = _product("bsr,nvr->bnsv", latent, context.v_up).astype(q.dtype)[grid.sequence]
        scores = scale * _product("xnck,xnsk->xncs", queries, keys)
        mask = jnp.broadcast_to(inside[grid.sequence][:, None, None, :], scores.shape)
        return masked_attention(scores, mask, values)

    lead = queries.shape[:3]
    empty = (
        jnp.zeros((*lead, context.v_up.shape[1]), jnp.float32),
        jnp.full(lead, -jnp.inf, jnp.float32),
    )
    needed = (jnp.max(context.lens) + (span * page - 1)) // (span * page)
    out, lse = jax.lax.fori_loop(
        jnp.int32(0), needed, lambda i, done: merge_attention(done, part(i)), empty
    )
    return grid.join(jnp.moveaxis(out, 1, 2)), grid.join(jnp.moveaxis(lse, 1, 2))
