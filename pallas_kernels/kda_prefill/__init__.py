"""Kimi Delta Attention over many tokens."""

from pallas_kernels.kda_prefill.api import kda_prefill

__all__ = ["kda_prefill"]
