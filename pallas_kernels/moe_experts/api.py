"""Routed experts: for each token the weighted sum of the MLPs chosen by the router."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.common import dispatch
from pallas_kernels.moe_experts import reference, xla
from pallas_kernels.moe_experts.types import DenseExperts, MXFP4Experts


def moe_experts(
    x: Float[Array, "T Z"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: DenseExperts | MXFP4Experts,
    activation: Callable,
    *,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "T Z"]:
    """out[t] = sum_j weights[t, j] * down_e activation(gate_e x[t], up_e x[t]), e = ids[t, j].

    Each expert's output is rounded to x.dtype before it is weighted, as in the reference model;
    the sum is float32 and is returned so. With experts split by rows over devices (F local) it is
    a partial sum. MXFP4 experts stay packed: at most the chosen experts of 128 assignments, or one
    expert at a time, are decoded.

    implementation: "gathered" (at most 128 assignments), "sorted_loop", "ragged" (dense weights,
    differentiable at any size), "reference" (every expert for every token), None: the first that
    accepts, in this order.
    """
    return dispatch.first_supported(
        implementation,
        {
            "gathered": xla.gathered,
            "sorted_loop": xla.sorted_loop,
            "ragged": xla.ragged,
            "reference": reference.moe_experts,
        },
        x,
        ids,
        weights,
        experts,
        activation,
    )
