"""Choice of experts by biased scores, weighted by unbiased ones."""

from jaxtyping import Array, Float, Int

from pallas_kernels.common import dispatch
from pallas_kernels.router import xla


def router(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    *,
    top_k: int,
    num_groups: int = 1,
    kept_groups: int = 1,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    implementation: dispatch.Implementation = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Expert ids and weights, best choice first.

    scores = sigmoid(logits) (or softmax); choice = scores + bias, and the bias does nothing else.
    With groups, only experts of the `kept_groups` best groups stand for choice, a group being
    judged by the sum of its two best. weights = scores of the chosen, divided by their sum + 1e-20
    if renormalize (and top_k > 1), times scaling_factor in either case. Equal choices go to the
    lower id. Float32.
    """
    return dispatch.first_supported(
        implementation,
        {"xla": xla.router},
        logits,
        bias,
        top_k=top_k,
        num_groups=num_groups,
        kept_groups=kept_groups,
        activation=activation,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
    )
