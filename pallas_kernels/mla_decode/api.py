"""Decode attention over a paged latent cache (one query token a sequence)."""

from jaxtyping import Array, Float, Int

from pallas_kernels.common import dispatch
from pallas_kernels.mla_decode import reference, xla


def mla_decode(
    q: Float[Array, "B N R"],
    pool: Float[Array, "L P page R"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    scale: float,
    value_dim: int,
    pool_scale: Float[Array, ""] | None = None,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "B N V"]:
    """Softmax attention of absorbed queries over the latent cache, one KV head for all heads.

    out[b, n] = sum_s softmax_s(scale * q[b, n] . c[b, s]) c[b, s, :value_dim], s < seq_lens[b],
    where c[b, s] = pool[layer, page_table[b, s // page], s % page], times pool_scale where it is
    given (float8 pools).

    Rows with seq_lens == 0 (padding) return zeros. Entries of page_table past the end of a
    sequence are not read. Accumulates in float32, returns q.dtype. Absorption of the up-projections
    is DeepSeek-V2's multi-head latent attention.
    """
    return dispatch.first_supported(
        implementation,
        {"xla": xla.mla_decode, "reference": reference.mla_decode},
        q,
        pool,
        layer,
        page_table,
        seq_lens,
        scale=scale,
        value_dim=value_dim,
        pool_scale=pool_scale,
    )
