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
from k3jax.models.cache import Batch
from k3jax.models.layers import Linear, RMSNorm, parameter
from pallas_kernels.common.attention import matmul_precision
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
        self, x: Float[Array, "T D"], batch: Batch, pool: Array | None, layer: int, tap
    ) -> tuple[Float[Array, "T D"], Array | None]:
        """Output and updated pages; `layer` counts MLA layers. Without a pool nothing is kept."""
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
        if pool is not None:
            pool = _append(pool, row, batch, layer)
        if batch.is_decode:
            out = self._decode(q, batch, pool, layer)
        else:
            out = self._prefill(q, row, batch, pool, layer)
        out = out.reshape(num_tokens, -1)
        if self.has_gate:
            gate = jax.nn.sigmoid(self.g_proj(x).astype(jnp.float32))
            out = (out.astype(jnp.float32) * gate).astype(x.dtype)
        return collectives.all_reduce(self.o_proj(out), "tp"), pool

    def _prefill(self, q, row, batch: Batch, pool, layer: int):
        latent, shared = row[:, : self.rank], row[:, self.rank :]
        k_up, v_up = self.k_up[...].astype(q.dtype), self.v_up[...].astype(q.dtype)
        nope = _product("tr,nkr->tnk", latent, k_up)
        shared = jnp.broadcast_to(shared[:, None], (*nope.shape[:2], shared.shape[-1]))
        context = None
        if pool is not None and batch.context_lens is not None:
            context = LatentContext(pool, layer, batch.page_table, batch.context_lens, k_up, v_up)
        return mla_prefill(
            q,
            jnp.concatenate([nope, shared], axis=-1),
            _product("tr,nvr->tnv", latent, v_up),
            batch.segments,
            context=context,
            scale=self.qk_dim**-0.5,
        )

    def _decode(self, q, batch: Batch, pool, layer: int):
        assert batch.context_lens is not None, "a decode step continues a cache"
        absorbed = _product("tnk,nkr->tnr", q[..., : self.nope_dim], self.k_up[...].astype(q.dtype))
        z = mla_decode(
            jnp.concatenate([absorbed, q[..., self.nope_dim :]], axis=-1),
            pool,
            layer,
            batch.page_table,
            jnp.where(batch.segments.lens > 0, batch.context_lens + 1, 0),
            scale=self.qk_dim**-0.5,
            value_dim=self.rank,
        )
        return _product("tnr,nvr->tnv", z, self.v_up[...].astype(q.dtype))


def _product(equation: str, a, b):
    """einsum with float32 accumulation, in a's dtype."""
    out = jnp.einsum(
        equation, a, b, precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32
    )
    return out.astype(a.dtype)


def _append(pool, row, batch: Batch, layer: int):
    """Writes the new rows behind each sequence's context; rows without a place write nowhere."""
    num_tokens, page_size, table = row.shape[0], pool.shape[2], batch.page_table
    assert table is not None, "a cache has pages"
    ids = batch.segments.ids(num_tokens)
    sequence = jnp.maximum(ids, 0)
    position = batch.segments.offsets(num_tokens)
    if batch.context_lens is not None:
        position = position + batch.context_lens[sequence]
    column = position // page_size
    has_place = (ids >= 0) & (column < table.shape[1])
    page = table[sequence, jnp.where(has_place, column, 0)]
    page = jnp.where(has_place, page, pool.shape[1])
    return pool.at[layer, page, position % page_size].set(row.astype(pool.dtype), mode="drop")
