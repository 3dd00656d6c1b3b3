"""The XLA form is the reference."""

from pallas_kernels.attn_res.reference import attn_res

__all__ = ["attn_res"]
