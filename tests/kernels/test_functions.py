"""Norms, gates and activations against the goldens, and their order of rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import functions
from tests.kernels.oracle import assert_close, on_host

BF16 = ml_dtypes.bfloat16
situ = on_host(jax.jit(functions.situ, static_argnums=(2, 3)))
rms_norm = on_host(jax.jit(functions.rms_norm, static_argnums=2))
gated_rms_norm = on_host(jax.jit(functions.gated_rms_norm, static_argnums=3))
l2_normalize = on_host(jax.jit(functions.l2_normalize))
decay_gate = on_host(jax.jit(functions.decay_gate, static_argnums=3))


def situ_golden(path):
    z = np.load(path / "ops/situ.npz")
    gate, up = np.split(z["gate_up"], 2, axis=-1)
    for name, betas in {
        "b4_lb25": (4.0, 25.0),
        "b4_nolb": (4.0, None),
        "b1_lb2": (1.0, 2.0),
    }.items():
        assert_close(situ(gate, up, *betas), z[f"y_{name}"], 1e-5, name)
    weighted = situ(gate, up, 4.0, 25.0) * z["routing_weights"]
    assert_close(weighted, z["weighted_b4_lb25"], 1e-5)


def norms_golden(path):
    z = np.load(path / "ops/rmsnorm.npz")
    x, gate, weight = (z[name] for name in ("x", "gate", "weight"))
    assert_close(rms_norm(x, weight, 1e-5), z["plain_eps1em5"], 1e-5)
    assert_close(rms_norm(x, weight, 1e-6), z["plain_eps1em6"], 1e-5)
    gated = gated_rms_norm(x, gate, weight, 1e-5)
    assert_close(gated, z["gated_sigmoid_eps1em5"], 1e-5)


def gates_golden(path):
    z = np.load(path / "ops/kda_gate.npz")
    raw, A_log = z["g_raw"], z["A_log"]
    dt_bias = z["dt_bias"].reshape(raw.shape[-2:])
    for name, bound in [("softplus", None), ("lower_bound_m5", -5.0), ("lower_bound_m2p5", -2.5)]:
        g = decay_gate(raw, A_log, dt_bias, bound)
        assert g.dtype == jnp.float32
        assert_close(g, z[name], 1e-5, name)
    np.testing.assert_array_equal(z["A_log_padded128"][: len(A_log)], A_log)
    z = np.load(path / "ops/kda.npz")
    for name in ("q", "k"):
        assert_close(l2_normalize(z[name]), z[f"{name}_l2"], 1e-5, name)


GOLDEN = {"situ": situ_golden, "norms": norms_golden, "gates": gates_golden}


@pytest.mark.parametrize("check", GOLDEN.values(), ids=GOLDEN.keys())
def test_golden(golden, check):
    check(golden)


@pytest.mark.gpu
def test_golden_on_this_device(golden):
    for check in GOLDEN.values():
        check(golden)


def test_decays_near_one_stay_below_one():
    """bfloat16 would round a retention of 0.9999 to 1: the gate is float32 whatever f is."""
    f = jnp.full((1, 1, 2), -20, jnp.bfloat16)
    zero = jnp.zeros((1, 2), jnp.bfloat16)
    for bound in (-5.0, None):
        g = decay_gate(f, jnp.zeros(1, jnp.bfloat16), zero, bound)
        assert g.dtype == jnp.float32
        assert np.all((g < 0) & (g > -2e-8))


def test_gates_at_the_ends_of_their_range():
    f = jnp.asarray([[[-1e30, -100.0, 0.0, 100.0, 1e30]]], jnp.float32)
    zero, A_log = jnp.zeros((1, 5), jnp.float32), jnp.full(1, np.log(2), jnp.float32)
    bounded = decay_gate(f, A_log, zero, -5.0)
    np.testing.assert_allclose(bounded, [[[0, 0, -2.5, -5, -5]]], rtol=1e-6, atol=1e-30)
    unbounded = decay_gate(f, A_log, zero, None)
    expected = [[[0, 0, -2 * np.log(2), -200, -2e30]]]
    np.testing.assert_allclose(unbounded, expected, rtol=1e-6, atol=1e-30)


def test_rms_norm_rounds_before_the_scale():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 16)).astype(BF16)
    scale = rng.standard_normal(16).astype(BF16)
    xf = x.astype(np.float32)
    normed = (xf / np.sqrt(np.mean(xf * xf, axis=-1, keepdims=True) + 1e-5)).astype(BF16)
    actual = rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-5)
    assert actual.dtype == jnp.bfloat16
    # A float32 result at a rounding boundary may fall either way: one element in 800 at most.
    assert np.sum(np.asarray(actual) != normed * scale) <= 1


def test_norms_of_zeros_are_zero():
    zero, scale = jnp.zeros((2, 4), jnp.float32), jnp.ones(4, jnp.float32)
    np.testing.assert_array_equal(rms_norm(zero, scale, 1e-5), zero)
    np.testing.assert_array_equal(gated_rms_norm(zero, zero, scale, 1e-5), zero)
    np.testing.assert_array_equal(l2_normalize(zero), zero)
    for function in (
        lambda x: jnp.sum(functions.rms_norm(x, scale, 1e-5)),
        lambda x: jnp.sum(functions.l2_normalize(x)),
    ):
        assert np.all(np.isfinite(jax.jit(jax.grad(function))(zero)))


def test_l2_norm_adds_its_eps_to_the_sum():
    x = jnp.asarray([[1e-4] * 4], jnp.float32)  # sum of squares 4e-8, far below the eps of 1e-6
    np.testing.assert_allclose(l2_normalize(x), 1e-4 / np.sqrt(1.04e-6), rtol=1e-5)


def test_situ_is_bounded_and_zero_beta_means_one():
    big = jnp.asarray([[-1e30, 1e30]], jnp.float32)
    assert np.max(np.abs(situ(big, big, 4.0, 25.0))) == 100
    x = jnp.asarray([[0.5, -2.0]], jnp.float32)
    np.testing.assert_array_equal(situ(x, x, 0.0, None), situ(x, x, 1.0, None))


def test_swiglu():
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, 5, 8)).astype(np.float32)
    expected = gate / (1 + np.exp(-gate)) * up
    assert_close(functions.swiglu(jnp.asarray(gate), jnp.asarray(up)), expected, 1e-6)
