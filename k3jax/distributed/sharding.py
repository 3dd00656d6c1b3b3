"""Which logical axis of a weight or cache lies on which mesh axis.

Modules name the axes of a weight where they make it; this table is the only place that maps those
names to the mesh, and the loader, the step programs and the caches all read it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import K3Config
from k3jax.errors import ConfigError


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis. None means replicated."""

    vocab: str | None = "tp"  # rows of the embedding and of the head
    heads: str | None = "tp"  # KDA and MLA heads, with their state
    mlp: str | None = "tp"  # width of dense and shared MLPs
    expert_mlp: str | None = "tp"  # width inside each routed expert
    experts: str | None = None

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array whose dimensions carry these logical names."""
        return PartitionSpec(*(None if axis is None else getattr(self, axis) for axis in axes))


RULES = ShardingRules()


def state_specs(state: nnx.State):
    """Partition specs of a model's state, leaf by leaf."""
    return jax.tree.map(
        lambda variable: RULES.spec(variable.get_metadata()["logical_axes"]),
        state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def named_sharding(mesh: jax.sharding.Mesh | None, axes: tuple[str | None, ...]):
    """Where an array with these logical axes goes: on the mesh, or on JAX's default device."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, RULES.spec(axes))


def on_mesh(mesh: jax.sharding.Mesh | None, fun: Callable, in_specs, out_specs) -> Callable:
    """`fun` over local shards under one outermost shard_map, or as it is without a mesh."""
    if mesh is None:
        return fun
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def check_divisible(config: K3Config, mesh: jax.sharding.Mesh | None) -> None:
    """Refuses a mesh that does not divide what it would split."""
    if mesh is None:
        return
    if mesh.shape["dp"] * mesh.shape["pp"] > 1:
        raise ConfigError("a model is placed over tp only: make_mesh(tp=…)")
    tp = mesh.shape["tp"]
    sizes = {
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_attention_heads,
        "linear_attn_config.num_heads": config.linear_attn_config.num_heads,
        "intermediate_size": config.intermediate_size,
    }
    if config.num_experts:
        group = 32 if config.quantization_config else 1
        sizes[f"moe_intermediate_size / {group}"] = config.moe_intermediate_size // group
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"tp={tp} does not divide {name}={size}")
