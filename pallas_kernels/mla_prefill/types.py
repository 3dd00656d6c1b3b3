"""What a prefill needs to see the tokens that came before it."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentContext:
    """Cached latents of earlier tokens, and the weights that expand them to keys and values.

    The first R_kv columns of a cached row are the normed latent, the rest is the shared key part.
    Only the first `lens[b]` tokens of sequence b are read. scale: what the rows of this layer are
    multiplied by when they are read (float8 pools).
    """

    pool: Float[Array, "L P page R"]
    layer: int | Int[Array, ""]
    page_table: Int[Array, "B max_pages"]
    lens: Int[Array, " B"]
    k_up: Float[Array, "N K_nope R_kv"]
    v_up: Float[Array, "N V R_kv"]
    scale: Float[Array, ""] | None = None
