"""Expert weights as they rest in memory: dense, or packed MXFP4 decoded only where used."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseExperts:
    """E experts; gate_up[:, 0] is the gate (w1), gate_up[:, 1] the up-projection (w3), down w2."""

    gate_up: Float[Array, "*E 2 F Z"]
    down: Float[Array, "*E Z F"]

    def take(self, ids: Int[Array, "*A"], dtype) -> "DenseExperts":
        """The chosen experts in `dtype`; the shape of `ids` replaces the leading axis."""
        return DenseExperts(self.gate_up[ids].astype(dtype), self.down[ids].astype(dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MXFP4Experts:
    """As E2M1 codes, two in a byte (low nibble first), and an E8M0 scale per 32 columns."""

    gate_up_packed: UInt8[Array, "*E 2 F half_Z"]
    gate_up_scale: UInt8[Array, "*E 2 F Z_by_32"]
    down_packed: UInt8[Array, "*E Z half_F"]
    down_scale: UInt8[Array, "*E Z F_by_32"]

    def take(self, ids: Int[Array, "*A"], dtype) -> DenseExperts:
        """The chosen experts, decoded."""
        return DenseExperts(
            dequantize(self.gate_up_packed[ids], self.gate_up_scale[ids], dtype),
            dequantize(self.down_packed[ids], self.down_scale[ids], dtype),
        )


def dequantize(
    packed: UInt8[Array, "*B half"], scale: UInt8[Array, "*B groups"], dtype
) -> Float[Array, "*B columns"]:
    """MXFP4 to floats, exactly: E2M1 value times 2^(scale - 127), by bit assembly.

    Scale 255 (NaN) is refused when a checkpoint is read. Scale 0 gives float32 subnormals, which a
    device may flush to zero.
    """
    code = jnp.stack([packed & 0xF, packed >> 4], axis=-1).astype(jnp.uint32)
    magnitude, sign = code & 7, code >> 3
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = jnp.where(magnitude >= 2, normal, jnp.where(magnitude == 1, jnp.uint32(126 << 23), 0))
    value = jax.lax.bitcast_convert_type(bits | (sign << 31), jnp.float32)
    value = value.reshape(*packed.shape[:-1], scale.shape[-1], 32)
    exponent = scale.astype(jnp.uint32)
    power = jnp.where(exponent == 0, jnp.uint32(1 << 22), exponent << 23)
    factor = jax.lax.bitcast_convert_type(power, jnp.float32)[..., None]
    return (value * factor).reshape(*packed.shape[:-1], -1).astype(dtype)
