"""Where k3jax keeps files of its own."""

import os
import pathlib


def user_cache() -> pathlib.Path:
    """$K3JAX_CACHE_DIR, or `k3jax` in the user's cache folder. Not created here."""
    if folder := os.environ.get("K3JAX_CACHE_DIR"):
        return pathlib.Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "k3jax"
