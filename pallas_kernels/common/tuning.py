"""Tuned kernel configurations: a small JSON file beside each kernel, read but never tuned here.

    {"NVIDIA H200": {"bfloat16 heads=96 tokens=64": {"config": {"block_t": 64}, "us": 12.5}}}

Device kind, then dtype and bucketed shape, then the fields of the kernel's Config dataclass; what
stands beside "config" (times, the losing configurations) is for people.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from pallas_kernels.common import compat

Config = TypeVar("Config")


def bucket(size: int) -> int:
    """The next power of two: tables are keyed by it where a size varies from call to call."""
    return 1 << max(size - 1, 0).bit_length()


def shape_key(dtype: Any, shape: Mapping[str, int]) -> str:
    """The key of a table's entry. Sizes that vary are bucketed by the caller."""
    return " ".join([jnp.dtype(dtype).name, *(f"{name}={shape[name]}" for name in sorted(shape))])


def lookup(
    explicit: Config | None,
    table: Path,
    make_config: Callable[..., Config],
    heuristic: Callable[[], Config],
    *,
    dtype: Any,
    shape: Mapping[str, int],
    device_kind: str | None = None,
) -> Config:
    """The configuration to use: explicit argument, else the table's entry, else the heuristic.

    device_kind: default, the device that the kernel is being traced for.
    """
    if explicit is not None:
        return explicit
    kind = device_kind or compat.target_device().kind
    entry = _read(table).get(kind, {}).get(shape_key(dtype, shape))
    if entry is None:
        return heuristic()
    try:
        return make_config(**entry["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{table}: bad entry for {kind!r}, {shape_key(dtype, shape)!r}: {error}"
        ) from error


def store(
    table: Path,
    config: Mapping[str, Any],
    *,
    dtype: Any,
    shape: Mapping[str, int],
    device_kind: str,
    **measured: Any,
) -> None:
    """Writes one entry; used by the tuning script, with the times beside the configuration."""
    entries = json.loads(table.read_text()) if table.exists() else {}
    entry = {"config": dict(config), **measured}
    entries.setdefault(device_kind, {})[shape_key(dtype, shape)] = entry
    table.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    _read.cache_clear()


@functools.cache
def _read(table: Path) -> dict[str, dict[str, Any]]:
    return json.loads(table.read_text()) if table.exists() else {}
