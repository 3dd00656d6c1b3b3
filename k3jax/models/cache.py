"""The two memories of the model, and what one step asks of them.

MLA layers keep a row for every token, in pages; KDA layers keep one state for every sequence, in
slots. Both are plain pytrees that a step takes and returns. Nothing here decides who owns a page.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.distributed.sharding import RULES
from pallas_kernels.common.segments import Segments
from pallas_kernels.kda_decode import KDACache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class K3Cache:
    """KDA pools over KDA layers and slots, and MLA pages [L, pages, page_size, R + R_rope].

    An MLA row is the normed latent followed by the shared key part.
    """

    kda: KDACache
    mla: Float[Array, "L P page R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Checkpoints:
    """Snapshots to take inside a prefill: KDA memory of `sequence[m]` after `length[m]` of its new
    tokens goes to slot `slot[m]`.

    Context plus length is a multiple of 64, or the sequence's end.
    """

    sequence: Int[Array, " M"]
    length: Int[Array, " M"]
    slot: Int[Array, " M"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The sequences of one step: packed tokens, their past, and where their memory lies.

    segments: new tokens of each sequence on the packed axis.
    context_lens: tokens each sequence already has in the cache. None: all sequences start here.
    slots: KDA slot of each sequence. None: sequence b has slot b, and the pool has B slots.
    page_table: MLA pages of each sequence, in order; entries that are not needed are not read.
    checkpoints: snapshots to take on the way (prefill only).
    is_decode: token b is the one new token of sequence b, for all b (empty sequences included).
    """

    segments: Segments
    context_lens: Int[Array, " B"] | None = None
    slots: Int[Array, " B"] | None = None
    page_table: Int[Array, "B max_pages"] | None = None
    checkpoints: Checkpoints | None = None
    is_decode: bool = dataclasses.field(default=False, metadata={"static": True})


def allocate_cache(
    config: K3Config,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    dtype,
    state_dtype=jnp.float32,
) -> K3Cache:
    """An all-zero cache with the sizes of the whole model; `cache_specs` says how it is split."""
    linear = config.linear_attn_config
    num_kda = config.layer_types.count("kda")
    num_mla = config.num_hidden_layers - num_kda
    heads, width = linear.num_heads, linear.head_dim
    tail = (num_kda, num_slots, linear.short_conv_kernel_size - 1, heads, width)
    return K3Cache(
        KDACache(
            jnp.zeros((num_kda, num_slots, heads, width, width), state_dtype),
            *(jnp.zeros(tail, dtype) for _ in range(3)),
        ),
        jnp.zeros(
            (num_mla, num_pages, page_size, config.kv_lora_rank + config.qk_rope_head_dim), dtype
        ),
    )


def cache_specs() -> K3Cache:
    """Partition specs of a cache: KDA memory by heads, MLA rows on every device."""
    state = RULES.spec((None, None, "heads", None, None))
    tail = RULES.spec((None, None, None, "heads", None))
    return K3Cache(KDACache(state, tail, tail, tail), PartitionSpec())
