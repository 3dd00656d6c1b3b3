"""The only place that touches names which differ between jax 0.10.2 and 0.11, or are private.

Mosaic GPU's simulator became public in 0.11; in 0.10.2 its parameters sit in a private module, and
what it found is private in both.
"""

import functools
import re
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax._src import config
from jax.experimental.pallas import mosaic_gpu as plgpu

if hasattr(plgpu, "InterpretGPUParams"):  # jax >= 0.11
    InterpretGPUParams = plgpu.InterpretGPUParams
    force_gpu_interpret_mode = plgpu.force_gpu_interpret_mode
else:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret import params as _params

    InterpretGPUParams = _params.InterpretGPUParams
    force_gpu_interpret_mode = _params.force_gpu_interpret_mode

# Layout inference is the default from 0.11 on; 0.10.2 must be asked for it.
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


class TargetDevice(NamedTuple):
    """What a kernel traced now will run on."""

    platform: str  # "cpu" or "gpu"
    kind: str  # as jax spells it, for instance "NVIDIA H200"
    capability: str  # first part of the CUDA compute capability, "9" for Hopper; "" if unknown


def target_device() -> TargetDevice:
    """The abstract device of the mesh in scope (cross-lowering), else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        hopper = re.search(r"\b(GH?200|H\d+)", abstract.device_kind) is not None
        return TargetDevice(abstract.platform, abstract.device_kind, "9" if hopper else "")
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    capability = str(getattr(default, "compute_capability", "")).partition(".")[0]
    return TargetDevice(default.platform, default.device_kind, capability)


def is_simulating() -> bool:
    """Whether kernels traced now run in a simulator on the CPU (see testing.simulate)."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def require_hopper(interpret: Any = None) -> None:
    """Refuses by NotImplementedError unless a Mosaic GPU kernel for sm_90 can run here.

    Called first in every such kernel. Passes under `interpret=` or the simulator (whatever the
    machine), on a Hopper GPU, and while lowering for a mesh that names one.
    """
    if interpret or is_simulating():
        return
    platform, kind, capability = target_device()
    if platform == "gpu" and capability == "9":
        return
    raise NotImplementedError(f"needs a Hopper GPU (compute capability 9.x), not {kind!r}")


def reset_simulator() -> None:
    """Forgets the simulator's state and its races: needed after any error inside a kernel."""
    interpreter = _simulator()
    interpreter.reset_gpu_interpret_mode_state()
    _race_states.clear()


def races_found() -> bool:
    """Whether any kernel simulated since the last reset had a race."""
    jax.effects_barrier()  # simulated kernels run asynchronously, as callbacks
    return any(state.races_found for state in _race_states)


_race_states: list[Any] = []


@functools.cache
def _simulator() -> ModuleType:
    """The simulator, made to remember the races of all kernels.

    By itself it makes a new record for each kernel and only keeps the latest, so that a race in
    the first of two kernels would go unseen.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call

    name = next(  # renamed in jax 0.11
        name
        for name in ("GPURaceDetectionState", "RaceDetectionState")
        if hasattr(gpu_callbacks, name)
    )
    make_state = getattr(gpu_callbacks, name)

    def remember(*args: Any, **kwargs: Any) -> Any:
        _race_states.append(make_state(*args, **kwargs))
        return _race_states[-1]

    setattr(gpu_callbacks, name, remember)
    return interpret_pallas_call
