"""Kimi Delta Attention over packed sequences: many tokens at once."""

from jaxtyping import Array, Float, Int

from pallas_kernels.common import dispatch
from pallas_kernels.common.segments import Segments
from pallas_kernels.kda_prefill import reference, xla


def kda_prefill(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    initial_state: Float[Array, "B H K V"],
    segments: Segments,
    *,
    phase: Int[Array, " B"] | None = None,
    checkpoints: tuple[Int[Array, " M"], Int[Array, " M"]] | None = None,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "B H K V"], Float[Array, "M H K V"] | None]:
    """Per head, for each token of a sequence in turn (state S, zero or `initial_state` before it):

        S' = diag(exp(g)) S;  u = beta (v - k S');  S = S' + k^T u;  o = K^-1/2 q S

    (Kimi Linear's gated delta rule.) q and k come L2-normalised, g is the log decay (float32,
    never below it), beta in (0, 1). Returns (o, final_state, checkpoint_states): o in v.dtype,
    states in float32. Padding tokens, whatever they hold, change nothing; an empty sequence
    returns its initial state.

    phase: tokens that each sequence had before this call. With it the chunk grid lies on absolute
    positions, so that a prompt split at multiples of 64 gives bitwise the states of an unsplit one.
    checkpoints: (sequence, length) pairs; the state of that sequence after `length` of its tokens
    here. The chunked form needs phase + length to be a multiple of 64, or the sequence's end.

    implementation: "xla" (chunks of 64, differentiable), "reference" (token by token), None: "xla".
    """
    return dispatch.first_supported(
        implementation,
        {"xla": xla.kda_prefill, "reference": reference.kda_prefill},
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        segments,
        phase=phase,
        checkpoints=checkpoints,
    )
