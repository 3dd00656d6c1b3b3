"""The two memories of the model, and what one step asks of them.

MLA layers keep a row for every token, in pages; KDA layers keep one state for every sequence, in
slots. Both are plain pytrees that a step takes and returns. Nothing here decides who owns a page.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from k3jax.config import K3Config
from k3jax.distributed.sharding import RULES
from pallas_kernels.common.segments import Segments
from pallas_kernels.kda_decode import KDACache

Memory = TypeVar("Memory")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """MLA rows in pages, each the normed latent followed by the shared key part.

    In a float8 pool they are stored divided by their layer's scale; other pools do not use it.
    """

    pool: Float[Array, "L P page R"]
    scale: Float[Array, " L"]

    @property
    def is_scaled(self) -> bool:
        """Rows are float8."""
        return self.pool.dtype.itemsize == 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class K3Cache:
    """KDA memory over KDA layers and slots, MLA rows over MLA layers and pages."""

    kda: KDACache
    mla: LatentCache


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
class DecodeRows:
    """One new token for each of D sequences; rows that are not active have none.

    context_lens: tokens each sequence has in the cache before this one.
    page_table: MLA pages of each sequence, in order; entries that are not needed are not read.
    slots: KDA slot of each sequence; rows that are not active use slot 0, which must be reserved.
        None: row b has slot b, and the pool has D slots; all of them change.
    """

    context_lens: Int[Array, " D"]
    active: Bool[Array, " D"]
    page_table: Int[Array, "D max_pages"]
    slots: Int[Array, " D"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillRows:
    """Several new tokens for each of B sequences, on a packed axis of T tokens.

    context_lens: tokens each sequence has in the cache already. None: all sequences start here.
    slots: as in `DecodeRows`; empty sequences use slot 0.
    checkpoints: snapshots to take on the way.
    aligned: all context lengths are multiples of 64, so that chunks need no phase.
    """

    segments: Segments
    context_lens: Int[Array, " B"] | None = None
    slots: Int[Array, " B"] | None = None
    page_table: Int[Array, "B max_pages"] | None = None
    checkpoints: Checkpoints | None = None
    aligned: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The sequences of one step: D that decode and others that prefill, which are not the same.

    The packed axis has the D decoded tokens first, then the T others, so that both parts are
    contiguous; what is done token by token is done for all at once.
    """

    decode: DecodeRows | None = None
    prefill: PrefillRows | None = None

    @property
    def num_decodes(self) -> int:
        """D."""
        return 0 if self.decode is None else self.decode.context_lens.shape[0]

    def each(
        self, memory: Memory, tensors: tuple, decode: Callable, prefill: Callable
    ) -> tuple[Array, Memory]:
        """Both parts of packed tensors through their own function, and the memory through both.

        decode(memory, rows, *parts) and prefill(memory, rows, *parts) return (output, memory).
        """
        count, outputs = self.num_decodes, []
        if self.decode is not None:
            out, memory = decode(memory, self.decode, *(x[:count] for x in tensors))
            outputs.append(out)
        if self.prefill is not None:
            out, memory = prefill(memory, self.prefill, *(x[count:] for x in tensors))
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs), memory


def allocate_cache(
    config: K3Config,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    dtype,
    mla_dtype=None,
    state_dtype=jnp.float32,
) -> K3Cache:
    """An all-zero cache with the sizes of the whole model; `cache_specs` says how it is split.

    dtype: of the model. mla_dtype: of MLA rows, the same or float8_e4m3fn. state_dtype: of KDA
    states at rest, float32 or bfloat16.
    """
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
        LatentCache(
            jnp.zeros(
                (num_mla, num_pages, page_size, config.kv_lora_rank + config.qk_rope_head_dim),
                dtype if mla_dtype is None else mla_dtype,
            ),
            jnp.ones((num_mla,), jnp.float32),
        ),
    )


def cache_specs() -> K3Cache:
    """Partition specs of a cache: KDA memory by heads, MLA rows on every device."""
    state = RULES.spec((None, None, "heads", None, None))
    tail = RULES.spec((None, None, None, "heads", None))
    return K3Cache(KDACache(state, tail, tail, tail), LatentCache(PartitionSpec(), PartitionSpec()))
