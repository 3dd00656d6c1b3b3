"""MXFP4 weights on the host: E2M1 nibbles with one E8M0 scale per 32 input columns.

Element: bit 3 is the sign, bits 0-2 pick a magnitude out of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Byte j of a
row holds column 2j in its low and column 2j + 1 in its high nibble. Scale byte s stands for
2^(s - 127) and covers 32 consecutive input columns of one row, so

    w[o, c] = MAGNITUDES[code[o, c]] * 2^(scale[o, c // 32] - 127).

Published layout of a weight [out, in]: `weight_packed` uint8 [out, in / 2] and `weight_scale` uint8
[out, in / 32]. Every function takes leading axes of any number, e.g. stacked experts.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from k3jax.errors import CheckpointError

GROUP_SIZE = 32
INVALID_SCALE = 255  # E8M0's only NaN
LARGEST_SCALE = 252  # 6 * 2^(252 - 127) is the largest value that float32 holds

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
LARGEST = 6.0
_LARGEST_WEIGHT = np.float32(LARGEST * 2.0**125)

_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # byte -> low, high
# 2^(s - 127); the entry of s = 0 is subnormal in float32 and exact.
_EXPONENTS: npt.NDArray[np.int64] = np.arange(INVALID_SCALE) - 127
_SCALES: npt.NDArray[np.float32] = np.append(
    np.ldexp(np.float32(1), _EXPONENTS), np.float32(np.nan)
)
_INVERSE_SCALES = np.ldexp(np.float32(1), -_EXPONENTS)

# Midpoints between neighbouring magnitudes, and whether a value exactly there goes up. It goes to
# the neighbour whose code is even, which is IEEE's round-half-to-even for this format.
_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)

_GROUPS_PER_BLOCK = 8192  # 2^18 weights at a time: temporaries stay at a few MiB and in cache


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Packs 4-bit codes [..., n] into bytes [..., n / 2], even columns in the low nibbles."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {codes.shape}: an odd number of columns does not pack")
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpacks bytes [..., n / 2] into 4-bit codes [..., n]."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 0xF, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], -1)


def check_width(width: int, *, file: object = None, tensor: str | None = None) -> None:
    """Refuses a number of input columns that is not a whole number of scale groups."""
    if width % GROUP_SIZE or width == 0:
        raise CheckpointError(
            f"MXFP4 needs an input dimension that is a multiple of {GROUP_SIZE}, one scale per"
            f" {GROUP_SIZE} columns; this one is {width}: keep the tensor in bfloat16",
            file=file,
            tensor=tensor,
        )


def check_scales(
    scale: npt.NDArray[np.uint8], file: object = None, tensor: str | None = None
) -> None:
    """Refuses scale bytes with which a code leaves float32: above 252, of which 255 is NaN.

    Byte 0 is a valid 2^-127.
    """
    if scale.dtype != np.uint8:
        raise CheckpointError(
            f"MXFP4 scales must be uint8, these are {scale.dtype}", file=file, tensor=tensor
        )
    if scale.size and scale.max() > LARGEST_SCALE:
        invalid = scale > LARGEST_SCALE
        first = tuple(int(i) for i in np.unravel_index(int(invalid.argmax()), scale.shape))
        raise CheckpointError(
            f"E8M0 scale byte {int(scale[first])} (255 is NaN, above {LARGEST_SCALE} codes become"
            f" infinite) at {int(invalid.sum())} position(s), the first at {first}:"
            " the file is damaged or not MXFP4",
            file=file,
            tensor=tensor,
        )


def dequantize(
    packed: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.uint8],
    dtype: npt.DTypeLike = np.float32,
    *,
    file: object = None,
    tensor: str | None = None,
) -> np.ndarray:
    """Decodes packed [..., in / 2] and scale [..., in / 32] into weights [..., in].

    The product is formed in float32 and rounded once to `dtype`: exact in float32 and bfloat16 for
    every code and every scale up to 252 (beyond that 4 and 6 leave float32's range and become
    infinite). Scale 255 decodes to NaN; `check_scales` refuses it.
    """
    width = 2 * packed.shape[-1]
    check_width(width, file=file, tensor=tensor)
    if packed.dtype != np.uint8 or scale.dtype != np.uint8:
        raise CheckpointError(
            f"MXFP4 codes and scales must be uint8, these are {packed.dtype} and {scale.dtype}",
            file=file,
            tensor=tensor,
        )
    if scale.shape != (*packed.shape[:-1], width // GROUP_SIZE):
        raise CheckpointError(
            f"packed codes of shape {packed.shape} need scales of shape"
            f" {(*packed.shape[:-1], width // GROUP_SIZE)}, these have shape {scale.shape}",
            file=file,
            tensor=tensor,
        )
    group_bytes = packed.reshape(-1, GROUP_SIZE // 2)
    group_scale = scale.reshape(-1)
    weight = np.empty((len(group_scale), GROUP_SIZE), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in _blocks(len(group_scale)):
            values = _PAIRS[group_bytes[rows]].reshape(-1, GROUP_SIZE)
            values *= _SCALES[group_scale[rows]][:, None]
            weight[rows] = values
    return weight.reshape(*packed.shape[:-1], width)


def quantize(
    weight: np.ndarray, *, file: object = None, tensor: str | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Encodes weights [..., in] as (packed [..., in / 2], scale [..., in / 32]).

    Per group of 32, with amax its largest magnitude, the scale is 2^ceil(log2(amax / 6)): the
    smallest power of two at which amax is at most 6, so nothing saturates. A group of zeros gets
    scale 1 (byte 127). Elements round to the nearest magnitude, ties to the even code; a negative
    value that rounds to zero keeps its sign, as in an IEEE conversion.

    Values that `dequantize` made come back unchanged. The bytes come back too in every group whose
    largest code is 4 or 6; in others a smaller scale with larger codes says the same values.

    Takes float32, bfloat16 and float16. NaN, infinity and magnitudes above 6 * 2^125, whose codes
    could decode to infinity, are refused.
    """
    weight = np.asarray(weight)
    # A float64 would be rounded twice, and amax could round below the value it has to cover.
    if weight.dtype.name not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"MXFP4 encodes float32, bfloat16 or float16, not {weight.dtype}",
            file=file,
            tensor=tensor,
        )
    if weight.ndim == 0:
        raise CheckpointError("MXFP4 encodes rows, this is a scalar", file=file, tensor=tensor)
    *leading, width = weight.shape
    check_width(width, file=file, tensor=tensor)

    groups = weight.reshape(-1, GROUP_SIZE)
    packed: npt.NDArray[np.uint8] = np.empty((len(groups), GROUP_SIZE // 2), np.uint8)
    scale: npt.NDArray[np.uint8] = np.empty(len(groups), np.uint8)
    for rows in _blocks(len(groups)):
        block: npt.NDArray[np.float32] = groups[rows].astype(np.float32)
        magnitude = np.abs(block)
        amax = magnitude.max(axis=1)
        if not (amax <= _LARGEST_WEIGHT).all():  # not the inverse comparison: NaN has to fail
            raise CheckpointError(
                f"NaN, infinity or a magnitude above {_LARGEST_WEIGHT:.3g} cannot be encoded as"
                " MXFP4",
                file=file,
                tensor=tensor,
            )
        scale[rows] = _scale_bytes(amax)
        magnitude *= _INVERSE_SCALES[scale[rows]][:, None]
        codes = _nearest_codes(magnitude)
        codes |= np.signbit(block).view(np.uint8) << 3
        packed[rows] = pack_nibbles(codes)
    return packed.reshape(*leading, width // 2), scale.reshape(*leading, width // GROUP_SIZE)


def _scale_bytes(amax: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """E8M0 byte of the smallest 2^k with amax <= 6 * 2^k; exact, since no logarithm is rounded."""
    mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2^exponent, 6 = 0.75 * 2^3
    k = np.where(mantissa <= LARGEST / 8, exponent - 3, exponent - 2)
    k = np.where(amax == 0, 0, k)
    return np.maximum(k + 127, 0).astype(np.uint8)


def _nearest_codes(magnitude: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Codes 0-7 of magnitudes in [0, 6]: how many midpoints each value has passed."""
    codes = np.zeros(magnitude.shape, np.uint8)
    passed = np.empty(magnitude.shape, np.bool_)
    for midpoint, tie_goes_up in _MIDPOINTS:
        compare = np.greater_equal if tie_goes_up else np.greater
        compare(magnitude, np.float32(midpoint), out=passed)
        codes += passed.view(np.uint8)
    return codes


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _GROUPS_PER_BLOCK):
        yield slice(start, start + _GROUPS_PER_BLOCK)
