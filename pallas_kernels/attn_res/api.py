"""Attention Residuals: softmax attention of a learned query over earlier depths."""

from jaxtyping import Array, Float

from pallas_kernels.attn_res import xla
from pallas_kernels.common import dispatch


def attn_res(
    bank: Float[Array, "N T D"],
    prefix: Float[Array, "T D"],
    query: Float[Array, " D"],
    *,
    eps: float,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T N_plus_1"]]:
    """mix = sum_j p_j v_j over the bank's rows and, last, the prefix sum; also returns p.

    p = softmax_j(query . v_j / rms(v_j)), the values themselves are not normed. query is the
    product of the norm's scale and the projection, in float32. Scores, softmax and sum are float32;
    the mix has prefix's dtype. (Attention Residuals, block form.)
    """
    return dispatch.first_supported(
        implementation, {"xla": xla.attn_res}, bank, prefix, query, eps=eps
    )
