"""MXFP4 encoding against published vectors, goldens and its own contract."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k3jax.checkpoint import mxfp4
from k3jax.errors import CheckpointError

BF16 = ml_dtypes.bfloat16


def bits(array):
    """Raw bits, so that -0.0 and 0.0 differ."""
    return array.view(f"u{array.dtype.itemsize}")


def group(*first_bytes, fill=0x00):
    """One packed group whose first bytes are given."""
    return np.array([[*first_bytes] + [fill] * (16 - len(first_bytes))], np.uint8)


def spread(values):
    """A group of 32 weights that starts with the values and goes on with zeros."""
    return np.array([[*values] + [0.0] * (32 - len(values))], np.float32)


VECTORS = {
    "low_nibble_first": ([0xA1], 127, [0.5, -1.0]),
    "every_magnitude": ([0x43, 0x65, 0xF7], 127, [1.5, 2, 3, 4, 6, -6]),
    "scale_121": ([0x22], 121, [1 / 64, 1 / 64]),
    "scale_129": ([0x22], 129, [4, 4]),
}


@pytest.mark.parametrize("packed, scale, expected", VECTORS.values(), ids=VECTORS.keys())
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_published_vectors(packed, scale, expected, dtype):
    weight = mxfp4.dequantize(group(*packed), np.array([[scale]], np.uint8), dtype)
    assert weight.dtype == dtype
    np.testing.assert_array_equal(weight[0, : len(expected)].astype(np.float64), expected)


RELEASED = {  # published values: first eight weights of row 0, layer 1, expert 0
    "w1": [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625],
    "w3": [0.0078125, -0.0078125, 0.03125, -0.046875, -0.0234375, 0.0078125, 0.046875, -0.0234375],
    "w2": [0.0078125, -0.046875, 0.0234375, 0.046875, -0.03125, -0.046875, 0.046875, 0.015625],
}


@pytest.mark.parametrize("values", RELEASED.values(), ids=RELEASED.keys())
def test_released_weights_are_representable(values):
    weight = spread(values)
    np.testing.assert_array_equal(mxfp4.dequantize(*mxfp4.quantize(weight)), weight)


def test_two_groups_two_scales():
    packed = np.full((1, 32), 0x22, np.uint8)
    weight = mxfp4.dequantize(packed, np.array([[127, 129]], np.uint8))
    np.testing.assert_array_equal(weight, [[1.0] * 32 + [4.0] * 32])


def test_golden_decoding_is_exact(golden):
    arrays = np.load(golden / "ops" / "mxfp4.npz")
    packed, scale = arrays["weight_packed"], arrays["weight_scale"]
    np.testing.assert_array_equal(bits(mxfp4.dequantize(packed, scale)), bits(arrays["dequant"]))
    half = mxfp4.dequantize(packed, scale, BF16)
    np.testing.assert_array_equal(half.view(np.int16), arrays["dequant_bf16_bits"])


def test_golden_linear_layer(golden):
    arrays = np.load(golden / "ops" / "mxfp4.npz")
    weight = mxfp4.dequantize(arrays["linear_weight_packed"], arrays["linear_weight_scale"])
    np.testing.assert_array_equal(weight, arrays["linear_dequant"])
    # The product in float64 against the golden's float64, stored rounded to float32: half an ulp.
    product = arrays["linear_x"].astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(product, arrays["linear_y"], rtol=1e-7, atol=1e-7)


def test_every_scale_position_acts_on_its_own_group():
    """F010: each (row, group) has a scale of its own, so that any wrong interleave shows."""
    row, block = np.mgrid[:128, :2]
    scale = (127 + (row * 7 + block * 3) % 11 - 5).astype(np.uint8)
    packed = np.full((128, 32), 0x22, np.uint8)
    weight = mxfp4.dequantize(packed, scale)
    expected = np.empty((128, 64))
    for r in range(128):
        for c in range(64):
            expected[r, c] = 2.0 ** ((r * 7 + (c // 32) * 3) % 11 - 5)
    np.testing.assert_array_equal(weight @ np.eye(64, dtype=np.float32), expected)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_scale_byte_zero_is_the_smallest_power(dtype):
    weight = mxfp4.dequantize(group(0x71), np.array([[0]], np.uint8), dtype)
    np.testing.assert_array_equal(weight[0, :2].astype(np.float64), [2.0**-128, 6 * 2.0**-127])


def test_largest_scales_without_overflow():
    weight = mxfp4.dequantize(group(0xF7), np.array([[252]], np.uint8))
    np.testing.assert_array_equal(weight[0, :2].astype(np.float64), [6 * 2.0**125, -6 * 2.0**125])


def test_leading_axes_and_blocks():
    """Stacked experts, more groups than one internal block, equal to decoding row by row."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (3, 100, 512), np.uint8)
    scale = rng.integers(100, 140, (3, 100, 32), np.uint8)
    weight = mxfp4.dequantize(packed, scale)
    assert weight.shape == (3, 100, 1024)
    for expert in range(3):
        for row in (0, 57, 99):
            np.testing.assert_array_equal(
                weight[expert, row], mxfp4.dequantize(packed[expert, row], scale[expert, row])
            )


def test_fused_gate_and_up_split_like_separate_ones():
    """F061: rows concatenate freely, columns split at whole groups; every scale is different."""
    rng = np.random.default_rng(1)
    w1, w3 = rng.integers(0, 256, (2, 4, 48), np.uint8)
    s1, s3 = (110 + np.arange(24, dtype=np.uint8)).reshape(2, 4, 3)
    fused = mxfp4.dequantize(np.concatenate([w1, w3]), np.concatenate([s1, s3]))
    np.testing.assert_array_equal(fused[:4], mxfp4.dequantize(w1, s1))
    np.testing.assert_array_equal(fused[4:], mxfp4.dequantize(w3, s3))
    for g in range(3):
        part = mxfp4.dequantize(w1[:, 16 * g : 16 * (g + 1)], s1[:, g : g + 1])
        np.testing.assert_array_equal(part, fused[:4, 32 * g : 32 * (g + 1)])


@pytest.mark.parametrize("width", [80, 16, 0])
def test_width_that_is_no_multiple_of_32_is_refused_by_name(width):
    """F061."""
    with pytest.raises(CheckpointError, match=rf"multiple of 32.*is {width}.*experts\.3\.w2"):
        mxfp4.quantize(np.ones((4, width), np.float32), tensor="experts.3.w2")
    with pytest.raises(CheckpointError, match=rf"multiple of 32.*is {width}.*experts\.3\.w2"):
        mxfp4.dequantize(
            np.ones((4, width // 2), np.uint8), np.ones((4, 2), np.uint8), tensor="experts.3.w2"
        )


def test_scales_of_another_shape_or_dtype_are_refused():
    packed = np.zeros((4, 32), np.uint8)
    with pytest.raises(CheckpointError, match=r"\(4, 2\).*\(2, 4\).*tensor w1"):
        mxfp4.dequantize(packed, np.zeros((2, 4), np.uint8), tensor="w1")
    with pytest.raises(CheckpointError, match="uint8.*float32.*tensor w1"):
        mxfp4.dequantize(packed, np.zeros((4, 2), np.float32), tensor="w1")


def test_check_scales():
    scale = np.full((3, 4), 252, np.uint8)
    scale[0, 0] = 0
    mxfp4.check_scales(scale)
    mxfp4.check_scales(scale[:0])
    scale[1, 2] = scale[2, 2] = 255
    with pytest.raises(CheckpointError, match=r"255.*2 position.*\(1, 2\)") as error:
        mxfp4.check_scales(scale, "model.safetensors", "w1.weight_scale")
    assert (error.value.file, error.value.tensor) == ("model.safetensors", "w1.weight_scale")
    with pytest.raises(CheckpointError, match="float32"):
        mxfp4.check_scales(scale.astype(np.float32))


def test_nibbles_round_trip():
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes = mxfp4.unpack_nibbles(packed)
    assert codes.shape == (2, 256) and codes.max() == 15
    np.testing.assert_array_equal(mxfp4.unpack_nibbles(np.array([0xA1], np.uint8)), [0x1, 0xA])
    np.testing.assert_array_equal(mxfp4.pack_nibbles(codes), packed)
    with pytest.raises(ValueError, match="odd"):
        mxfp4.pack_nibbles(codes[:, :3])


def codes_of(weight):
    packed, scale = mxfp4.quantize(weight)
    return mxfp4.unpack_nibbles(packed)[0], scale[0]


SCALES = {  # largest magnitude of a group -> scale byte
    "six_is_not_exceeded": (6.0, 127),
    "just_above_six": (np.nextafter(np.float32(6), np.float32(7)), 128),
    "twelve": (12.0, 128),
    "three": (3.0, 126),
    "just_above_three": (np.nextafter(np.float32(3), np.float32(4)), 127),
    "one": (1.0, 125),
    "zero": (0.0, 127),
    "smallest_float32": (2.0**-149, 0),
    "largest": (6 * 2.0**125, 252),
    "six_times_the_smallest_scale": (6 * 2.0**-127, 0),
}


@pytest.mark.parametrize("amax, expected", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("sign", [1, -1])
def test_scale_is_the_smallest_that_does_not_saturate(amax, expected, sign):
    _, scale = codes_of(spread([0.0, sign * amax]))
    assert scale == [expected]


def test_ties_go_to_the_even_code():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    codes, _ = codes_of(spread([6.0, *ties, *(-t for t in ties)]))
    np.testing.assert_array_equal(codes[:8], [7, 0, 2, 2, 4, 4, 6, 6])
    np.testing.assert_array_equal(codes[8:15], np.array([0, 2, 2, 4, 4, 6, 6]) + 8)


def test_neighbours_of_ties_go_to_the_nearer_value():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    below, _ = codes_of(spread([6.0, *np.nextafter(ties, np.float32(0))]))
    above, _ = codes_of(spread([6.0, *np.nextafter(ties, np.float32(9))]))
    np.testing.assert_array_equal(below[1:8], [0, 1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(above[1:8], [1, 2, 3, 4, 5, 6, 7])


def test_round_trip_keeps_every_byte_of_groups_that_reach_four():
    """F062. The ceil rule finds the scale 2^e again if and only if amax > 3 * 2^e.

    At amax <= 3 * 2^e the scale 2^(e - 1) holds the same values with larger codes, so a group
    is byte-exact when its largest code is 4 or 6. Signs of zeros are kept, so -0.0 survives too.
    """
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (500, 32)).astype(np.uint8)
    codes[np.arange(500), rng.integers(0, 32, 500)] = rng.choice([6, 7, 14, 15], 500)
    packed = mxfp4.pack_nibbles(codes)
    scale = rng.integers(0, 253, (500, 1)).astype(np.uint8)
    for dtype in (np.float32, BF16):
        again_packed, again_scale = mxfp4.quantize(mxfp4.dequantize(packed, scale, dtype))
        np.testing.assert_array_equal(again_packed, packed)
        np.testing.assert_array_equal(again_scale, scale)


@given(
    codes=hnp.arrays(np.uint8, (2, 32), elements=st.integers(0, 15)),
    scale=hnp.arrays(np.uint8, (2, 1), elements=st.integers(0, 252)),
)
@settings(deadline=None, max_examples=200)
def test_round_trip_keeps_every_value(codes, scale):
    """F062: whatever the codes, decoded values survive bit for bit, -0.0 included."""
    weight = mxfp4.dequantize(mxfp4.pack_nibbles(codes), scale)
    again = mxfp4.dequantize(*mxfp4.quantize(weight))
    np.testing.assert_array_equal(bits(again), bits(weight))
    np.testing.assert_array_equal(again.astype(BF16).astype(np.float32), weight)


def test_group_of_small_codes_keeps_values_under_another_scale():
    packed, scale = group(0x51), np.array([[127]], np.uint8)  # 0.5 and 3
    again_packed, again_scale = mxfp4.quantize(mxfp4.dequantize(packed, scale))
    assert again_scale == [[126]] and again_packed[0, 0] == 0x72  # 1 and 6, halved


@given(
    weight=hnp.arrays(
        np.float32, (3, 32), elements=st.floats(-6 * 2.0**125, 6 * 2.0**125, width=32)
    )
)
@settings(deadline=None, max_examples=300)
def test_error_stays_within_half_a_step_and_nothing_saturates(weight):
    """|w - decoded| <= scale for |w| > 4 scale, <= scale / 2 above 2, else <= scale / 4."""
    packed, scale = mxfp4.quantize(weight)
    decoded = mxfp4.dequantize(packed, scale).astype(np.float64)
    unit = 2.0 ** (scale.astype(np.float64) - 127)
    magnitude = np.abs(weight.astype(np.float64))
    assert (magnitude <= 6 * unit).all()
    # Halving the scale would saturate, unless it is the smallest there is or all is zero.
    amax = magnitude.max(axis=1, keepdims=True)
    assert ((amax > 3 * unit) | (scale == 0) | (amax == 0)).all()
    bound = np.select([magnitude > 4 * unit, magnitude > 2 * unit], [unit, unit / 2], unit / 4)
    assert (np.abs(decoded - weight) <= bound).all()


def test_error_bound_on_normal_weights():
    """The same bound relative to a group's maximum: half a step is the scale, under amax / 3."""
    weight = np.random.default_rng(3).normal(0, 0.02, (64, 256)).astype(np.float32)
    decoded = mxfp4.dequantize(*mxfp4.quantize(weight))
    error = np.abs(decoded - weight).reshape(-1, 32).max(axis=1)
    assert (error <= np.abs(weight).reshape(-1, 32).max(axis=1) / 3).all()


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_narrow_floats_encode_like_their_float32_values(dtype):
    weight = np.random.default_rng(4).normal(size=(8, 64)).astype(dtype)
    for got, expected in zip(
        mxfp4.quantize(weight), mxfp4.quantize(weight.astype(np.float32)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_strided_input_and_many_blocks():
    """A transposed view gives the bytes of its copy; blocks leave no seam."""
    weight = np.random.default_rng(5).normal(size=(1024, 320)).astype(np.float32).T
    packed, scale = mxfp4.quantize(weight)
    assert packed.shape == (320, 512) and scale.shape == (320, 32)
    for row in (0, 150, 319):
        row_packed, row_scale = mxfp4.quantize(np.ascontiguousarray(weight[row]))
        np.testing.assert_array_equal(packed[row], row_packed)
        np.testing.assert_array_equal(scale[row], row_scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.6e38, -3.4e38])
def test_weights_without_a_finite_code_are_refused(bad):
    with pytest.raises(CheckpointError, match="NaN, infinity.*file a.*tensor w1"):
        mxfp4.quantize(spread([1.0, bad]), file="a", tensor="w1")


def test_other_dtypes_are_refused():
    for weight in (np.ones((1, 32)), np.ones((1, 32), np.int32), np.ones((1, 32), np.uint8)):
        with pytest.raises(CheckpointError, match=f"not {weight.dtype}.*tensor w1"):
            mxfp4.quantize(weight, tensor="w1")
    with pytest.raises(CheckpointError, match="scalar"):
        mxfp4.quantize(np.float32(1))


def test_empty_leading_axis():
    packed, scale = mxfp4.quantize(np.empty((0, 64), np.float32))
    assert packed.shape == (0, 32) and scale.shape == (0, 2)
    assert mxfp4.dequantize(packed, scale).shape == (0, 64)
