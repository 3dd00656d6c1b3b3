"""The pools and weights that the KDA kernels share."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDACache:
    """Recurrent memory of all KDA layers and slots. H heads, K key and V value channels, W taps.

    state: float32 by default, [H, K, V] with V fastest. conv_q, conv_k, conv_v: the last W - 1
    projections before convolution and SiLU, oldest first. All four describe the same position.
    """

    state: Float[Array, "L slots H K V"]
    conv_q: Float[Array, "L slots W_minus_1 H K"]
    conv_k: Float[Array, "L slots W_minus_1 H K"]
    conv_v: Float[Array, "L slots W_minus_1 H V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDAWeights:
    """What a KDA layer needs between its projections. Everything float32."""

    conv_q: Float[Array, "H K W"]
    conv_k: Float[Array, "H K W"]
    conv_v: Float[Array, "H V W"]
    A_log: Float[Array, " H"]
    dt_bias: Float[Array, "H K"]
    o_norm: Float[Array, " V"]
