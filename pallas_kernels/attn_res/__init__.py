"""Attention over depth: the mix in front of each sublayer."""

from pallas_kernels.attn_res.api import attn_res

__all__ = ["attn_res"]
