"""Routed experts: a few chosen MLPs for each token."""

from pallas_kernels.moe_experts.api import moe_experts
from pallas_kernels.moe_experts.types import DenseExperts, MXFP4Experts

__all__ = ["DenseExperts", "MXFP4Experts", "moe_experts"]
