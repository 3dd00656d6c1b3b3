"""The XLA form is the reference."""

from pallas_kernels.router.reference import router

__all__ = ["router"]
