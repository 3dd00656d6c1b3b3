"""Settings of all tests: strict promotion, checked shapes, eight CPU devices, a compile cache."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import jax
import jaxtyping
import pytest

from k3jax.paths import user_cache

GOLDEN = Path(__file__).parent / "golden"
# GPU machines need not have what only the server needs.
collect_ignore = [] if importlib.util.find_spec("uvicorn") else ["serve"]
CACHE_DAYS = 14  # compiled programs older than this are deleted


# Annotations of shapes and dtypes are checked at every call of these packages, where beartype is
# installed. Host code is left out: its tests pass wrong types on purpose, to see them refused.
if importlib.util.find_spec("beartype") and os.environ.get("K3JAX_TYPECHECK") != "0":
    jaxtyping.install_import_hook(
        ["pallas_kernels", "k3jax.models"], "importlib.import_module('tests.typecheck').checked"
    )


def cache_dir() -> Path:
    """Where tests keep compiled programs between runs."""
    return user_cache() / "xla"


def pytest_configure(config: pytest.Config) -> None:
    # Before any device is used. On a GPU machine it only shapes the CPU backend beside the GPU.
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        # Compiling takes most of the time here, and optimising machine code half of that. Graphs
        # are the same, fusion included.
        jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(cache_dir()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not hasattr(config, "workerinput"):  # not in the workers of xdist
        _prune(cache_dir())


def _prune(folder: Path) -> None:
    oldest = time.time() - CACHE_DAYS * 86400
    for file in folder.glob("*"):
        try:
            if file.stat().st_mtime < oldest:
                file.unlink()
        except OSError:  # another run was quicker
            pass


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def _fresh_simulator() -> None:
    """After an error inside a simulated kernel every later one would fail too.

    Looks whether the helpers are loaded instead of importing them, since Pallas is slow to import.
    """
    testing = sys.modules.get("pallas_kernels.common.testing")
    if testing is not None:
        testing.reset_simulator()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference numbers."""
    return GOLDEN
