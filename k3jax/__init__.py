"""Kimi K3 in JAX: the model, a server and a rollout library.

Names are imported when first used, so that host-only parts (`k3jax.cache`, `k3jax.chat`) do not
import jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3jax.config import K3Config as K3Config
    from k3jax.engine.async_engine import AsyncEngine as AsyncEngine
    from k3jax.engine.llm import LLM as LLM
    from k3jax.engine.request import SamplingParams as SamplingParams
    from k3jax.generation import generate as generate
    from k3jax.models.k3 import K3Model as K3Model

__version__ = "0.1.0"

_HOME = {
    "LLM": "k3jax.engine.llm",
    "AsyncEngine": "k3jax.engine.async_engine",
    "K3Config": "k3jax.config",
    "K3Model": "k3jax.models.k3",
    "SamplingParams": "k3jax.engine.request",
    "generate": "k3jax.generation",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "K3Config",
    "K3Model",
    "SamplingParams",
    "__version__",
    "chat",
    "errors",
    "generate",
]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("chat", "config", "distributed", "errors"):
        return importlib.import_module(f"k3jax.{name}")
    raise AttributeError(f"module 'k3jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
