"""Checkpoint folders as plain dictionaries, to be changed and written back."""

import json
import shutil
from pathlib import Path

import numpy as np

from k3jax.checkpoint.safetensors import (
    INDEX_NAME,
    dtype_name,
    open_checkpoint,
    write_checkpoint,
)


def read_tensors(folder) -> dict[str, np.ndarray]:
    """All tensors in their stored dtypes."""
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def write_tensors(folder, tensors: dict[str, np.ndarray], **options) -> None:
    """Replaces the weights of a folder."""
    write_checkpoint(
        folder,
        [(name, dtype_name(x.dtype), x.shape, lambda x=x: x) for name, x in tensors.items()],
        **options,
    )


def edit(folder, change, **options) -> None:
    """Lets `change` alter the dictionary of tensors, or return another one."""
    tensors = read_tensors(folder)
    write_tensors(folder, change(tensors) or tensors, **options)


def read_config(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def edit_config(folder, change) -> None:
    """Lets `change` alter the dictionary of config.json (of the text part, where it is nested)."""
    config = read_config(folder)
    change(config.get("text_config", config))
    (Path(folder) / "config.json").write_text(json.dumps(config))


def edit_index(folder, change) -> None:
    """Lets `change` alter the weight_map."""
    file = Path(folder) / INDEX_NAME
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def copy(source, target) -> Path:
    """A copy that may be changed."""
    shutil.copytree(source, target)
    for file in Path(target).iterdir():
        file.chmod(0o644)
    return Path(target)


def assert_same_tensors(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
        assert got[name].tobytes() == x.tobytes(), name
