"""Orbax checkpoints: the same weights as an OCDBT store that restores straight onto a mesh."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from k3jax.checkpoint.folder import ORBAX_STORE, saving
from k3jax.checkpoint.mxfp4 import LARGEST_SCALE
from k3jax.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME
from k3jax.config import K3Config
from k3jax.distributed.sharding import named_sharding
from k3jax.errors import CheckpointError
from k3jax.models.k3 import K3Model


def is_orbax(path) -> bool:
    """Whether a folder was written by `save_orbax`."""
    return (pathlib.Path(path) / ORBAX_STORE).is_dir()


def save_orbax(model: K3Model, path) -> None:
    """Writes config.json and the weights, each under its dotted parameter name."""
    weights = {_dotted(key): v.get_value() for key, v in nnx.to_flat_state(nnx.state(model))}
    config = model.config.replace(
        dtype=model.dtype.name, num_nextn_predict_layers=0, vision_config=None
    )
    with saving(path, config.to_dict(), [INDEX_NAME, SINGLE_NAME]) as folder:
        store, fresh, old = (
            folder / f"{ORBAX_STORE}{suffix}" for suffix in ("", ".partial", ".old")
        )
        for left_over in (fresh, old):
            shutil.rmtree(left_over, ignore_errors=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh, weights)
        if store.exists():
            store.rename(old)
        fresh.rename(store)
    shutil.rmtree(old, ignore_errors=True)


def load_orbax(path, *, dtype=None, mesh=None) -> K3Model:
    """Restores every weight directly into its sharding and dtype."""
    path = pathlib.Path(path).absolute()
    config = K3Config.from_pretrained(path)
    model = K3Model(config, dtype=dtype, mesh=mesh)
    graphdef, state = nnx.split(model)
    targets = {
        _dotted(key): jax.ShapeDtypeStruct(
            variable.get_value().shape,
            variable.get_value().dtype,
            sharding=named_sharding(mesh, variable.get_metadata()["logical_axes"]),
        )
        for key, variable in nnx.to_flat_state(state)
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = checkpointer.metadata(path / ORBAX_STORE).item_metadata
            if stored is None:
                raise CheckpointError("the Orbax store has no metadata", file=path / ORBAX_STORE)
            _check_names({k: tuple(stored[k].shape) for k in stored}, targets, path)
            weights = checkpointer.restore(path / ORBAX_STORE, targets)
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for damaged stores
        raise CheckpointError(f"the Orbax store cannot be restored: {error}", file=path) from error
    for key, variable in nnx.to_flat_state(state):
        name = _dotted(key)
        _check_values(name, weights[name], path)
        variable.set_value(weights[name])
    return nnx.merge(graphdef, state)


def _check_names(stored: dict[str, tuple[int, ...]], targets, path) -> None:
    for name in sorted(stored.keys() ^ targets.keys()):
        problem = "is missing" if name in targets else "belongs to no part of the model"
        raise CheckpointError(f"weight {problem}", file=path / ORBAX_STORE, tensor=name)
    for name, target in targets.items():
        if stored[name] != target.shape:
            raise CheckpointError(
                f"shape {list(stored[name])} where config.json implies {list(target.shape)}",
                file=path / ORBAX_STORE,
                tensor=name,
            )


def _check_values(name: str, value: jax.Array, path) -> None:
    """The same demands as on safetensors: finite numbers, scales that float32 can hold."""
    if value.dtype == jnp.uint8:
        if name.endswith("_scale") and int(jnp.max(value)) > LARGEST_SCALE:
            raise CheckpointError(
                f"E8M0 scale bytes above {LARGEST_SCALE}", file=path / ORBAX_STORE, tensor=name
            )
    elif not bool(jnp.isfinite(value).all()):
        raise CheckpointError("values are not all finite", file=path / ORBAX_STORE, tensor=name)


def _dotted(key: tuple) -> str:
    return ".".join(str(part) for part in key)
