"""What the engine keeps on the device between steps: one pytree, donated to every step program.

Tables have one row for each sequence that may run, and row 0 for padding: what padding rows write
there nobody reads. A row's memory lies in KDA slots and MLA pages, which the cache manager hands
out; the row knows which.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from k3jax.config import K3Config
from k3jax.engine.sampling import SamplingState, allocate_sampling
from k3jax.models.cache import K3Cache, LatentCache, allocate_cache, cache_specs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """Where each of R rows stands. Its last token is chosen, but not yet in the cache."""

    last_token: Int[Array, " R"]
    length: Int[Array, " R"]  # tokens in the cache
    max_length: Int[Array, " R"]  # tokens, the last one included, at which the row stops
    stopped: Bool[Array, " R"]  # by a stop token, its length, or numbers that are not finite
    slot: Int[Array, " R"]
    page_table: Int[Array, "R max_pages"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Pools of both memories, and the tables of rows."""

    cache: K3Cache
    rows: RowState
    sampling: SamplingState


@dataclass(frozen=True)
class StateSizes:
    """What shapes an `EngineState` beside the model's configuration."""

    num_rows: int  # sequences that may run; the tables have one row more
    num_slots: int
    num_pages: int
    page_size: int
    max_pages: int  # of one sequence
    dtype: jnp.dtype  # of the model
    mla_dtype: jnp.dtype
    state_dtype: jnp.dtype


def allocate_state(
    config: K3Config,
    sizes: StateSizes,
    *,
    mesh: jax.sharding.Mesh | None = None,
    mla_scale: np.ndarray | None = None,
) -> EngineState:
    """A state of zeros in its place on the mesh; every row is stopped.

    mla_scale: float32 [MLA layers], what fp8 rows are multiplied by; None: ones.
    """

    def make() -> EngineState:
        cache = allocate_cache(
            config,
            num_slots=sizes.num_slots,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            dtype=sizes.dtype,
            mla_dtype=sizes.mla_dtype,
            state_dtype=sizes.state_dtype,
        )
        if mla_scale is not None:
            mla = LatentCache(cache.mla.pool, jnp.asarray(mla_scale, jnp.float32))
            cache = K3Cache(cache.kda, mla)
        count = sizes.num_rows + 1
        numbers = jnp.zeros((count,), jnp.int32)
        table = jnp.zeros((count, sizes.max_pages), jnp.int32)
        rows = RowState(numbers, numbers, numbers, jnp.ones((count,), bool), numbers, table)
        return EngineState(cache, rows, allocate_sampling(count, config.vocab_size))

    places = None
    if mesh is not None:
        specs = engine_specs(jax.eval_shape(make))
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(make, out_shardings=places)()


def engine_specs(state: EngineState) -> EngineState:
    """Partition specs: pools as `cache_specs` says, the tables of rows on every device."""
    everywhere = jax.tree.map(lambda _: PartitionSpec(), state)
    return dataclasses.replace(everywhere, cache=cache_specs())


def state_bytes(state: EngineState) -> int:
    """Bytes of everything that a step must update in place (S-12)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def slot_and_page_bytes(config: K3Config, sizes: StateSizes, tp: int = 1) -> tuple[int, int]:
    """Bytes of one KDA slot and of one MLA page on each device."""
    cache = jax.eval_shape(
        lambda: allocate_cache(
            config,
            num_slots=1,
            num_pages=1,
            page_size=sizes.page_size,
            dtype=sizes.dtype,
            mla_dtype=sizes.mla_dtype,
            state_dtype=sizes.state_dtype,
        )
    )
    slot = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.kda))
    return slot // tp, cache.mla.pool.size * cache.mla.pool.dtype.itemsize
