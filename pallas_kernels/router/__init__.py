"""Choice of experts."""

from pallas_kernels.router.api import router

__all__ = ["router"]
