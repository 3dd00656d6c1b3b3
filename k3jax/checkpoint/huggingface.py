"""The published layout, a Hugging Face folder: strict loading into place, and saving."""

import functools
import logging

import jax
import numpy as np
from flax import nnx

from k3jax.checkpoint import names
from k3jax.checkpoint.folder import ORBAX_STORE, saving
from k3jax.checkpoint.safetensors import (
    SafetensorsFolder,
    check_stored_dtype,
    open_checkpoint,
    write_checkpoint,
)
from k3jax.config import K3Config, QuantizationConfig
from k3jax.distributed.sharding import named_sharding
from k3jax.errors import CheckpointError
from k3jax.models.k3 import K3Model

logger = logging.getLogger(__name__)


def load_huggingface(path, *, dtype=None, mesh=None) -> K3Model:
    """A model from a folder, one parameter in flight; tensors are consumed or refused by name."""
    with open_checkpoint(path) as folder:
        config, plan = _plan(folder, K3Config.from_pretrained(path))
        model = K3Model(config, dtype=dtype, mesh=mesh)
        graphdef, state = nnx.split(model)
        for parameter_path, variable in nnx.to_flat_state(state):
            value = variable.get_value()
            variable.set_value(
                _place(
                    folder,
                    plan[parameter_path],
                    value,
                    named_sharding(mesh, variable.get_metadata()["logical_axes"]),
                )
            )
        return nnx.merge(graphdef, state)


def check_huggingface(path) -> tuple[K3Config, SafetensorsFolder]:
    """Opens a folder and checks names, shapes and dtypes of all tensors without reading them."""
    folder = open_checkpoint(path)
    try:
        return _plan(folder, K3Config.from_pretrained(path))[0], folder
    except BaseException:
        folder.close()
        raise


def save_huggingface(model: K3Model, path, *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Writes the model's weights in its own dtype, packed experts with the bytes they have."""
    # Layers that were left out on loading are not promised either.
    config = model.config.replace(dtype=model.dtype.name, num_nextn_predict_layers=0)
    if config.vision_config is not None:
        logger.warning("the vision tower is not loaded and is not saved: %s is text only", path)
        config = config.replace(vision_config=None)
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    shapes = {key: variable.get_value().shape for key, variable in state.items()}
    plan = names.sources(config, shapes, names.published_prefix(config))

    @functools.lru_cache(maxsize=1)  # the tensors of a parameter follow each other
    def on_host(key) -> np.ndarray:
        array = np.asarray(state[key].get_value())
        if key[-1] == "k_up":
            other = np.asarray(state[(*key[:-1], "v_up")].get_value())
            array = np.concatenate([array, other], axis=1)
        return array

    def tensors():
        for key, source in plan.items():
            yield from source.write(functools.partial(on_host, key), state[key].get_value().dtype)

    with saving(path, config.to_dict(), [ORBAX_STORE]) as folder:
        write_checkpoint(folder, tensors(), max_shard_bytes=max_shard_bytes)


def _plan(folder: SafetensorsFolder, config: K3Config):
    """The configuration as the tensors have it, and where each parameter is stored; all checked."""
    config = _match_quantization(config, folder)
    prefix = names.text_prefix(folder.names)
    _, state = nnx.split(K3Model(config))
    shapes = {key: variable.get_value().shape for key, variable in nnx.to_flat_state(state)}
    top = names.top_prefix(folder.names, prefix)
    plan = names.sources(config, shapes, prefix, top)
    consumed: set[str] = set()
    for source in plan.values():
        source.check(folder)
        consumed |= source.stored.keys()
    left = [name for name in folder.names if name not in consumed]
    head = names.lm_head(prefix)
    if config.tie_word_embeddings and head in left:
        _check_tied(folder, head, f"{top}embed_tokens.weight")
        left.remove(head)
    unknown = [name for name in left if not names.skipped(config, name)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(
            f"tensor belongs to no part of the model{more}; does config.json fit these files?",
            file=folder.info(unknown[0]).file,
            tensor=unknown[0],
        )
    for name in consumed:
        check_stored_dtype(folder.info(name))
    if left:
        logger.info("left out %d tensors of vision or next-token layers", len(left))
    return config, plan


def _check_tied(folder: SafetensorsFolder, head: str, embedding: str) -> None:
    """A stored copy of a tied head is fine; a head of its own would be lost."""
    if not np.array_equal(folder.read(head), folder.read(embedding)):
        raise CheckpointError(
            "differs from the embedding although config.json says tie_word_embeddings",
            file=folder.info(head).file,
            tensor=head,
        )


def _match_quantization(config: K3Config, folder: SafetensorsFolder) -> K3Config:
    """Whether experts are packed is decided by the tensors, not by the configuration's patterns."""
    packed = any(".experts." in name and name.endswith(".weight_packed") for name in folder.names)
    if packed == (config.quantization_config is not None):
        return config
    return config.replace(quantization_config=QuantizationConfig() if packed else None)


def _place(folder: SafetensorsFolder, source: names.Source, aval, sharding) -> jax.Array:
    """The parameter on its devices; each device's part is read for itself and then let go."""

    def part(index):
        full = tuple(slice(*s.indices(size)) for s, size in zip(index, aval.shape, strict=True))
        return source.read(folder, full, aval.dtype)

    array = jax.make_array_from_callback(aval.shape, sharding, part)
    return array.block_until_ready()  # or the host would hold many parameters at once
