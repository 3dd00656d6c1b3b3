"""New weights for a running engine: checked against the old ones, copied into their places."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.errors import ConfigError
from k3jax.models.k3 import K3Model


def new_weights(old: nnx.State, new: Any) -> nnx.State:
    """A state like `old` with the values of `new`; nothing of `new` is kept or consumed.

    new: a K3Model, an nnx.State, or a mapping from dotted names to arrays of NumPy or JAX in any
    layout, where names that are left out keep their values. Names, shapes and dtypes must be those
    of the model (float dtypes may differ and are converted).
    """
    values = _by_name(nnx.split(new)[1] if isinstance(new, K3Model) else new)
    mine = dict(_named(old))
    unknown = sorted(set(values) - set(mine))
    if unknown:
        raise ConfigError(f"the model has no parameter {unknown[0]!r} (of {len(unknown)} unknown)")
    flat, replaced = nnx.to_flat_state(old), []
    for path, variable in flat:
        name = _name(path)
        if name in values:
            variable = variable.replace(_placed(name, values[name], variable.get_value()))
        replaced.append((path, variable))
    return nnx.from_flat_state(replaced)


def _by_name(new: Any) -> dict[str, Any]:
    if isinstance(new, nnx.State):
        return {name: variable.get_value() for name, variable in _named(new)}
    if isinstance(new, Mapping):
        return dict(new)
    raise ConfigError(
        f"weights must be a K3Model, an nnx.State or a mapping, not {type(new).__name__}"
    )


def _named(state: nnx.State):
    return ((_name(path), variable) for path, variable in nnx.to_flat_state(state))


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def _placed(name: str, value: Any, old: jax.Array) -> jax.Array:
    """A copy of `value` with the dtype of `old`, where `old` lies."""
    array = value if isinstance(value, jax.Array) else np.ascontiguousarray(value)
    if array.shape != old.shape:
        raise ConfigError(f"{name} has shape {array.shape}, the model {old.shape}")
    are_floats = jnp.issubdtype(array.dtype, jnp.floating), jnp.issubdtype(old.dtype, jnp.floating)
    if array.dtype != old.dtype and not all(are_floats):
        raise ConfigError(f"{name} has dtype {array.dtype}, the model {old.dtype}")
    if isinstance(array, jax.Array):
        # Never an alias: whatever the caller does with his array, ours stays.
        return jax.device_put(jnp.array(array, old.dtype, copy=True), old.sharding)
    return jax.device_put(array.astype(old.dtype, copy=True), old.sharding)
