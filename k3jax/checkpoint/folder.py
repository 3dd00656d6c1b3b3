"""What stands around the weights of a checkpoint: config.json, marks, companion files."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3jax.errors import CheckpointError

ORBAX_STORE = "orbax"  # folder of an Orbax checkpoint's weights
UNTRAINED = "UNTRAINED"  # a file of this name marks random weights
_COMPANIONS = {".json", ".jinja", ".md", ".model", ".txt"}


@contextlib.contextmanager
def saving(path, config: Mapping[str, Any], other_forms: Sequence[str]) -> Iterator[pathlib.Path]:
    """The folder to write weights to; config.json takes effect when they are complete.

    Refuses a folder that holds a checkpoint of another form: which of the two was meant could not
    be told on loading. A disk that is full or not writable is a `CheckpointError`.
    """
    path = pathlib.Path(path).absolute()
    for name in other_forms:
        if (path / name).exists():
            raise CheckpointError(f"the folder already holds {name}; save elsewhere", file=path)
    partial = path / "config.json.partial"
    try:
        path.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        yield path
        partial.replace(path / "config.json")
        (path / UNTRAINED).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot save: {error}", file=path) from error


def copy_companions(source, target) -> None:
    """Copies what stands beside the weights: tokenizer, generation and preprocessor files."""
    source, target = pathlib.Path(source), pathlib.Path(target)
    if source.samefile(target):
        return
    try:
        for file in source.iterdir():
            known = file.suffix in _COMPANIONS or file.stem in ("LICENSE", UNTRAINED)
            is_weights = file.name.startswith(("config.json", "model.safetensors"))
            if file.is_file() and known and not is_weights:
                shutil.copy(file, target)
    except OSError as error:
        raise CheckpointError(f"cannot copy companion files: {error}", file=target) from error
