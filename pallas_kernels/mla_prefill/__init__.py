"""Causal attention of new tokens, over each other and over the latent cache."""

from pallas_kernels.mla_prefill.api import LatentContext, mla_prefill

__all__ = ["LatentContext", "mla_prefill"]
