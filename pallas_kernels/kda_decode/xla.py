"""The XLA form is the reference: gather, fused element-wise update, scatter."""

from pallas_kernels.kda_decode.reference import kda_decode

__all__ = ["kda_decode"]
