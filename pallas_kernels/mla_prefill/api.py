"""Causal attention of packed new tokens, with or without cached context."""

from jaxtyping import Array, Float

from pallas_kernels.common import dispatch
from pallas_kernels.common.segments import Segments
from pallas_kernels.mla_prefill import reference, xla
from pallas_kernels.mla_prefill.types import LatentContext


def mla_prefill(
    q: Float[Array, "T N K"],
    k: Float[Array, "T N K"],
    v: Float[Array, "T N V"],
    segments: Segments,
    *,
    context: LatentContext | None = None,
    scale: float,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "T N V"]:
    """softmax(scale * q . k) v over the earlier tokens of each query's own sequence and itself.

    q, k, v are the expanded heads of the new tokens. With `context` each sequence continues after
    context.lens[b] cached tokens, whose latents are expanded on the way. Softmax in float32,
    probabilities rounded to v.dtype for the product, result in v.dtype; padding tokens give zeros.
    Differentiable without context.
    """
    return dispatch.first_supported(
        implementation,
        {"xla": xla.mla_prefill, "reference": reference.mla_prefill},
        q,
        k,
        v,
        segments,
        context=context,
        scale=scale,
    )
