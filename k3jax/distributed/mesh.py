"""The device mesh: axes dp (replicas), pp (pipeline stages), tp (tensor parallel) and no others."""

import jax
import numpy as np

from k3jax.errors import ConfigError

AXES = ("dp", "pp", "tp")


def make_mesh(dp: int = 1, pp: int = 1, tp: int = 1, *, devices=None) -> jax.sharding.Mesh:
    """A mesh of dp * pp * tp devices, by default the first ones that JAX sees."""
    sizes = (dp, pp, tp)
    if min(sizes) < 1:
        raise ConfigError(f"mesh sizes must be positive, got dp={dp}, pp={pp}, tp={tp}")
    devices = list(jax.devices() if devices is None else devices)
    needed = int(np.prod(sizes))
    if needed > len(devices):
        raise ConfigError(
            f"a mesh of dp={dp}, pp={pp}, tp={tp} needs {needed} devices; there are {len(devices)}"
        )
    return jax.sharding.Mesh(np.asarray(devices[:needed]).reshape(sizes), AXES)
