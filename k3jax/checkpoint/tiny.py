"""Small checkpoints with random weights, for tests and for a first run without any download."""

import logging
import math
import pathlib
import shutil
import tempfile

import jax
import numpy as np
from flax import nnx

from k3jax.checkpoint.folder import UNTRAINED
from k3jax.checkpoint.mxfp4 import quantize
from k3jax.config import K3Config
from k3jax.distributed.sharding import named_sharding
from k3jax.models.k3 import K3Model
from k3jax.paths import user_cache

logger = logging.getLogger(__name__)

TOKENIZER = pathlib.Path(__file__).parent.parent / "assets" / "tiny-tokenizer"
_VERSION = 1  # raise when the weights that a seed gives change


def random_model(config: K3Config, *, seed: int = 0, dtype=None, mesh=None) -> K3Model:
    """A model whose every part shows in its output, unlike one at the start of training.

    Depth mixes are far from uniform, router biases change choices, decays differ by head and
    channel. NumPy makes the values: at toy sizes compiling would take longer.
    """
    model = K3Model(config, dtype=dtype, mesh=mesh)
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for path, variable in flat.items():
        aval, meta = variable.get_value(), variable.get_metadata()
        if meta["init"] == "mxfp4_scale":
            continue  # set together with its codes
        if meta["init"] == "mxfp4_codes":
            shape = (*aval.shape[:-1], aval.shape[-1] * 2)
            weight = rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1])
            scale_path = (*path[:-1], path[-1].replace("_packed", "_scale"))
            values = dict(zip((path, scale_path), quantize(weight), strict=True))
        else:
            values = {path: _random_value(rng, path, aval.shape, meta["init"], config)}
        for target, value in values.items():
            sharding = named_sharding(mesh, flat[target].get_metadata()["logical_axes"])
            dtype = flat[target].get_value().dtype
            flat[target].set_value(jax.device_put(value.astype(dtype), sharding))
    return nnx.merge(graphdef, state)


def _random_value(rng, path, shape, init: str, config: K3Config) -> np.ndarray:
    normal = rng.standard_normal(shape, np.float32)
    if path[-1] == "e_score_correction_bias":
        return 0.1 * normal
    if path[-1] == "dt_bias":
        return normal
    if path[-1] == "proj":  # the query of an AttnRes mix
        return 2 * normal / math.sqrt(config.hidden_size)
    if path[0] == "embed_tokens":
        return normal
    if init == "A_log":
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if init == "ones":
        return 1 + 0.1 * normal
    return normal / math.sqrt(shape[-1])


def make_tiny(path, *, preset: str = "tiny", seed: int = 0) -> None:
    """Writes a checkpoint with seeded random weights, and the small tokenizer where it fits."""
    path = pathlib.Path(path)
    config = K3Config.preset(preset).replace(vision_config=None)
    random_model(config, seed=seed).save_pretrained(path)
    base = sum(1 for _ in (TOKENIZER / "tiktoken.model").open("rb"))
    if config.vocab_size == base + 256:
        for file in TOKENIZER.iterdir():
            shutil.copy(file, path)
    (path / UNTRAINED).write_text("random weights: the output means nothing\n")


def ensure_tiny() -> pathlib.Path:
    """The default checkpoint in the user's cache folder, written on first use."""
    target = user_cache() / f"tiny-v{_VERSION}"
    if not (target / UNTRAINED).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = pathlib.Path(folder) / "tiny"
            make_tiny(fresh)
            try:
                fresh.rename(target)
            except OSError:  # another process was first, or an older attempt left a part
                if not (target / UNTRAINED).is_file():
                    shutil.rmtree(target, ignore_errors=True)
                    fresh.rename(target)
        logger.info("wrote an untrained tiny checkpoint to %s", target)
    return target


def is_untrained(path) -> bool:
    """Whether a checkpoint folder is marked as holding random weights."""
    return (pathlib.Path(path) / UNTRAINED).is_file()
