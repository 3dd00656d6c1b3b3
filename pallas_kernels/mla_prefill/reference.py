"""Causal attention inside packed sequences, all pairs at once; no cached context."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.attention import masked_attention, matmul_precision
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
    if context is not None:
        raise NotImplementedError("the reference attends within one call only")
    ids = segments.ids(q.shape[0])
    index = jnp.arange(q.shape[0], dtype=jnp.int32)
    mask = (index[:, None] >= index[None, :]) & (ids[:, None] == ids[None, :]) & (ids >= 0)[:, None]
    scores = scale * jnp.einsum(
        "qnk,snk->nqs",
        q,
        k,
        precision=matmul_precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    out, _ = masked_attention(
        scores, jnp.broadcast_to(mask[None], scores.shape), jnp.moveaxis(v, 1, 0)
    )
    return jnp.moveaxis(out, 0, 1).astype(v.dtype)
