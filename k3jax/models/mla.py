"""Multi-head latent attention without positions (NoPE), with K3's output gate.

N heads; a key has K_nope channels of its own head and K_rope channels shared by all heads, which in
these models are never rotated. A cached row is [latent R | shared key K_rope].
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.distributed import collectives
from k3jax.models.cache import Batch, DecodeRows, LatentCache, PrefillRows
from k3jax.models.layers import Linear, RMSNorm, parameter
from pallas_kernels.common.attention import matmul_precision
from pallas_kernels.common.pools import set_rows
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_prefill import LatentContext, mla_prefill


class MLA(nnx.Module):
    """One MLA sublayer: expanded keys and values for prefill, absorbed ones for decode."""

    def __init__(self, config: K3Config, dtype):
        dim, heads, eps = config.hidden_size, config.num_attention_heads, config.mla_lora_norm_eps
        self.rank = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        value_dim = config.v_head_dim
        by_head = ("heads", None)
        self.has_q_lora = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_proj = Linear(dim, config.q_lora_rank, (None, None), dtype)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=eps, dtype=dtype)
            self.q_b_proj = Linear(config.q_lora_rank, heads * self.qk_dim, by_head, dtype)
        else:
            self.q_proj = Linear(dim, heads * self.qk_dim, by_head, dtype)
        row = self.rank + config.qk_rope_head_dim
        self.kv_a_proj_with_mqa = Linear(dim, row, (None, None), dtype)
        self.kv_a_layernorm = RMSNorm(self.rank, eps=eps, dtype=dtype)
        # kv_b_proj of the checkpoint, apart: decode multiplies by one before and one after.
        self.k_up = parameter((heads, self.nope_dim, self.rank), ("heads", None, None), dtype)
        self.v_up = parameter((heads, value_dim, self.rank), ("heads", None, None), dtype)
        self.has_gate = config.mla_use_output_gate
        if self.has_gate:
            self.g_proj = Linear(dim, heads * value_dim, by_head, dtype)
        self.o_proj = Linear(heads * value_dim, dim, (None, "heads"), dtype)

    def __call__(
        self, x: Float[Array, "T D"], batch: Batch, cache: LatentCache | None, layer: int, tap
    ) -> tuple[Float[Array, "T D"], LatentCache | None]:
        """Output and updated pages; `layer` counts MLA layers. Without a cache nothing is kept."""
        num_tokens = x.shape[0]
        if self.has_q_lora:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            q = self.q_proj(x)
        q = q.reshape(num_tokens, -1, self.qk_dim)
        row = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(row[:, : self.rank])
        row = jnp.concatenate([latent, row[:, self.rank :]], axis=-1)
        tap("mla_latent", lambda: row)

        def decode(cache, rows: DecodeRows, q, row):
            cache = _append_decode(cache, row, rows, layer)
            return self._decode(q, rows, cache, layer), cache

        def prefill(cache, rows: PrefillRows, q, row):
            if cache is not None:
                cache = _append_prefill(cache, row, rows, layer)
            return self._prefill(q, row, rows, cache, layer), cache

        out, cache = batch.each(cache, (q, row), decode, prefill)
        out = out.reshape(num_tokens, -1)
        if self.has_gate:
            gate = jax.nn.sigmoid(self.g_proj(x).astype(jnp.float32))
            out = (out.astype(jnp.float32) * gate).astype(x.dtype)
        return collectives.all_reduce(self.o_proj(out), "tp"), cache

    def _prefill(self, q, row, rows: PrefillRows, cache: LatentCache | None, layer: int):
        latent, shared = row[:, : self.rank], row[:, self.rank :]
        k_up, v_up = self.k_up[...].astype(q.dtype), self.v_up[...].astype(q.dtype)
        nope = _product("tr,nkr->tnk", latent, k_up)
        shared = jnp.broadcast_to(shared[:, None], (*nope.shape[:2], shared.shape[-1]))
        context = None
        if cache is not None and rows.context_lens is not None:
            context = LatentContext(
                cache.pool,
                layer,
                rows.page_table,
                rows.context_lens,
                k_up,
                v_up,
                _scale(cache, layer),
            )
        return mla_prefill(
            q,
            jnp.concatenate([nope, shared], axis=-1),
            _product("tr,nvr->tnv", latent, v_up),
            rows.segments,
            context=context,
            scale=self.qk_dim**-0.5,
        )

    def _decode(self, q, rows: DecodeRows, cache: LatentCache, layer: int):
        absorbed = _product("tnk,nkr->tnr", q[..., : self.nope_dim], self.k_up[...].astype(q.dtype))
        z = mla_decode(
            jnp.concatenate([absorbed, q[..., self.nope_dim :]], axis=-1),
            cache.pool,
            layer,
            rows.page_table,
            jnp.where(rows.active, rows.context_lens + 1, 0),
            scale=self.qk_dim**-0.5,
            value_dim=self.rank,
            pool_scale=_scale(cache, layer),
        )
        return _product("tnr,nvr->tnv", z, self.v_up[...].astype(q.dtype))


def _product(equation: str, a, b):
    """einsum with float32 accumulation, in a's dtype."""
    out = jnp.einsum(
        equation, a, b, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32
    )
    return out.astype(a.dtype)


def _scale(cache: LatentCache, layer: int) -> Float[Array, ""] | None:
    return cache.scale[layer] if cache.is_scaled else None


def _append_decode(cache: LatentCache, row, rows: DecodeRows, layer: int) -> LatentCache:
    sequence = jnp.arange(row.shape[0], dtype=jnp.int32)
    return _append(cache, row, sequence, rows.context_lens, rows.active, rows.page_table, layer)


def _append_prefill(cache: LatentCache, row, rows: PrefillRows, layer: int) -> LatentCache:
    assert rows.page_table is not None, "a cache has pages"
    ids = rows.segments.ids(row.shape[0])
    sequence = jnp.maximum(ids, 0)
    position = rows.segments.offsets(row.shape[0])
    if rows.context_lens is not None:
        position = position + rows.context_lens[sequence]
    return _append(cache, row, sequence, position, ids >= 0, rows.page_table, layer)


def _append(cache: LatentCache, row, sequence, position, is_token, table, layer) -> LatentCache:
    """Writes each token's row at its position; what has no place is written nowhere."""
    pool = cache.pool
    column = position // pool.shape[2]
    has_place = is_token & (column < table.shape[1])
    page = table[sequence, jnp.where(has_place, column, 0)]
    page = jnp.where(has_place, page, pool.shape[1])
    if cache.is_scaled:
        row = row.astype(jnp.float32) / cache.scale[layer]
        limit = jnp.float32(jnp.finfo(pool.dtype).max)
        # Too large saturates, but what is not finite must stay so: it is found by that.
        row = jnp.where(jnp.isfinite(row), jnp.clip(row, -limit, limit), jnp.nan)
    pool = set_rows(pool, (layer, page, position % pool.shape[2]), row)
    return LatentCache(pool, cache.scale)
