"""Causal attention inside packed sequences and over their cached context, all pairs at once."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.attention import masked_attention, matmul_precision, widen
from pallas_kernels.common.segments import Segments
from pallas_kernels.mla_prefill.types import LatentContext


def mla_prefill(
    q: Float[Array, "T N K"],
    k: Float[Array, "T N K"],
    v: Float[Array, "T N V"],
    segments: Segments,
    context: LatentContext | None,
    scale: float,
) -> Float[Array, "T N V"]:
    """See api.mla_prefill."""
    ids = segments.ids(q.shape[0])
    index = jnp.arange(q.shape[0], dtype=jnp.int32)
    mask = (index[:, None] >= index[None, :]) & (ids[:, None] == ids[None, :]) & (ids >= 0)[:, None]
    if context is not None:
        owner, keys, values = _expanded(context, q.dtype)
        cached = (ids[:, None] == owner[None, :]) & (ids >= 0)[:, None]
        mask = jnp.concatenate([cached, mask], axis=1)
        k, v = jnp.concatenate([keys, k]), jnp.concatenate([values, v])
    scores = scale * _product("qnk,snk->nqs", q, k)
    out, _ = masked_attention(
        scores, jnp.broadcast_to(mask[None], scores.shape), jnp.moveaxis(v, 1, 0)
    )
    return jnp.moveaxis(out, 0, 1).astype(v.dtype)


def _expanded(context: LatentContext, dtype):
    """The sequence of each cached token [B S], -1 where there is none, and its keys and values."""
    (batch, num_pages), page = context.page_table.shape, context.pool.shape[2]
    position = jnp.arange(num_pages * page, dtype=jnp.int32)[None, :]
    inside = position < context.lens[:, None]
    pages = jnp.where(inside.reshape(batch, num_pages, page)[..., 0], context.page_table, 0)
    rows = context.pool[context.layer, pages].reshape(batch * num_pages * page, -1)
    inside = inside.reshape(-1)
    rows = jnp.where(inside[:, None], rows, jnp.zeros((), rows.dtype))
    rows = widen(rows, context.scale).astype(dtype)
    rank = context.k_up.shape[-1]
    latent, shared = rows[:, :rank], rows[:, rank:]
    nope = _product("sr,nkr->snk", latent, context.k_up).astype(dtype)
    shared = jnp.broadcast_to(shared[:, None], (*nope.shape[:2], shared.shape[-1]))
    values = _product("sr,nvr->snv", latent, context.v_up).astype(dtype)
    owner = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), num_pages * page)
    return jnp.where(inside, owner, -1), jnp.concatenate([nope, shared], axis=-1), values


def _product(equation: str, a, b):
    return jnp.einsum(
        equation, a, b, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32
    )
