"""Depthwise causal convolution of a few taps, followed by SiLU."""

from pallas_kernels.short_conv.api import conv_tails, short_conv

__all__ = ["conv_tails", "short_conv"]
