"""Block Attention Residuals: a learned mix over depth instead of one residual stream."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.models.layers import parameter
from pallas_kernels.attn_res import attn_res


class AttnRes(nnx.Module):
    """One mix: softmax attention of a learned query over bank rows and the running prefix sum."""

    def __init__(self, dim: int, *, eps: float, dtype):
        self.norm = parameter((dim,), (None,), dtype, init="ones")
        self.proj = parameter((dim,), (None,), dtype, init="zeros")  # a uniform mix to start with
        self.eps = eps

    def __call__(
        self, bank: Float[Array, "N T D"], prefix: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T N_plus_1"]]:
        """The mix and its weights; the prefix is the last source."""
        query = self.norm[...].astype(jnp.float32) * self.proj[...].astype(jnp.float32)
        return attn_res(bank, prefix, query, eps=self.eps)
