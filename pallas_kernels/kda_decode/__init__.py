"""Kimi Delta Attention for one token of each sequence."""

from pallas_kernels.kda_decode.api import KDACache, KDAWeights, kda_decode

__all__ = ["KDACache", "KDAWeights", "kda_decode"]
