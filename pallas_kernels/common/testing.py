"""Helpers for kernel tests: the simulator, cross-lowering for an H200, tolerances by dtype."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import compat
from pallas_kernels.common.compat import races_found as races_found
from pallas_kernels.common.compat import reset_simulator as reset_simulator

H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


@contextlib.contextmanager
def simulate(*, detect_races: bool = True, **params: Any) -> Iterator[None]:
    """Mosaic GPU kernels called inside run on the CPU, warpgroups, barriers and copies simulated.

    At the end it waits for them, and raises AssertionError if one had a race. The simulator's
    state is reset on entry, and on any error, since it would fail every later kernel.
    params: further fields of InterpretGPUParams.
    """
    reset_simulator()
    try:
        with compat.force_gpu_interpret_mode(
            compat.InterpretGPUParams(detect_races=detect_races, **params)
        ):
            yield
            raced = races_found()
    except BaseException:
        reset_simulator()
        raise
    if raced:
        reset_simulator()
        raise AssertionError("a simulated kernel had a race (its report is in the output)")


def lower_for_h200(fun: Callable[..., Any], *avals: Any, **static: Any) -> str:
    """StableHLO of fun(*avals, **static) for CUDA; raises if Mosaic GPU cannot lower it.

    Needs no GPU. ptxas does not run: spills and too much shared memory stay unseen.
    """
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(functools.partial(fun, **static)).trace(*avals)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


# Two float32 sums over some thousand terms in different order differ by about sqrt(n) roundings,
# hence some 100 units in the last place. The narrow types round the input and the result once
# each, so a few units suffice. float64 is for tests of structure, where nothing should differ.
_RTOL = {"float64": 1e-10, "float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


def tolerance(dtype: Any, *, scale: float = 1.0) -> dict[str, float]:
    """rtol and atol for np.testing.assert_allclose, by the dtype that is compared.

    scale: typical magnitude of the values; atol covers those that come out near zero.
    """
    rtol = _RTOL[jnp.dtype(dtype).name]
    return {"rtol": rtol, "atol": rtol * scale}
