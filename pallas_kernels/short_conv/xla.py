"""The XLA form is the reference: the taps fuse into one pass."""

from pallas_kernels.short_conv.reference import conv_tails, short_conv

__all__ = ["conv_tails", "short_conv"]
