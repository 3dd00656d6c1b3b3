"""Choice and weights of experts against the goldens, and what bias, groups and factor may do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import router
from tests.kernels.oracle import assert_close, on_host

CASES = [
    "sigmoid_k4",
    "sigmoid_k16_of_64",
    "grouped_8g_3",
    "grouped_4g_2_norenorm",
    "softmax_k4",
    "top1",
]
route = jax.jit(
    router,
    static_argnames=(
        "top_k",
        "num_groups",
        "kept_groups",
        "activation",
        "renormalize",
        "scaling_factor",
    ),
)
route = on_host(route)


@on_host
@functools.partial(jax.jit, static_argnums=2)
def score(x, weight, activation):
    logits = jnp.matmul(x, weight.T, precision="highest")
    return logits, jax.nn.sigmoid(logits) if activation == "sigmoid" else jax.nn.softmax(logits)


def check_golden(path, case):
    z = np.load(path / "ops/router.npz")
    z = {name.removeprefix(f"{case}."): z[name] for name in z.files if name.startswith(f"{case}.")}
    activation = "softmax" if case.startswith("softmax") else "sigmoid"
    logits, scores = score(z["x"], z["weight"], activation)
    assert_close(scores, z["scores"], 1e-5, "scores")
    ids, weights = route(
        logits,
        z["e_score_correction_bias"],
        top_k=int(z["top_k"]),
        num_groups=int(z["num_expert_group"]),
        kept_groups=int(z["topk_group"]),
        activation=activation,
        renormalize=bool(z["renormalize"]),
        scaling_factor=float(z["routed_scaling_factor"]),
    )
    by_id = np.argsort(ids, axis=1)  # the files list experts by id, the router by choice
    np.testing.assert_array_equal(np.take_along_axis(ids, by_id, 1), z["indices"])
    assert_close(np.take_along_axis(weights, by_id, 1), z["weights"], 1e-5, "weights")


@pytest.mark.parametrize("case", CASES)
def test_golden(golden, case):
    check_golden(golden, case)


@pytest.mark.gpu
def test_golden_on_this_device(golden):
    for case in CASES:
        check_golden(golden, case)


def logits_of(scores):
    """Logits whose sigmoid is `scores`."""
    scores = np.asarray(scores, np.float64)
    return np.log(scores / (1 - scores)).astype(np.float32)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_the_factor_counts_with_and_without_renormalising(renormalize, factor):
    """F012: the factor is not nested in the other option."""
    logits = logits_of([[0.5, 0.1, 0.25, 0.2]])
    ids, weights = route(
        logits, np.zeros(4, np.float32), top_k=2, renormalize=renormalize, scaling_factor=factor
    )
    np.testing.assert_array_equal(ids, [[0, 2]])
    expected = np.asarray([[0.5, 0.25]]) / (0.75 if renormalize else 1)
    np.testing.assert_allclose(weights, factor * expected, rtol=1e-6)


def test_a_single_choice_keeps_its_score():
    logits = logits_of([[0.5, 0.1, 0.25, 0.2]])
    _, weights = route(logits, np.zeros(4, np.float32), top_k=1, renormalize=True)
    np.testing.assert_allclose(weights, [[0.5]], rtol=1e-6)


def test_ties_go_to_the_lower_id():
    ids, _ = route(np.zeros((2, 8), np.float32), np.zeros(8, np.float32), top_k=3)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    bias = np.asarray([0, 1, 0, 1, 0, 1, 0, 0], np.float32)
    ids, _ = route(np.zeros((1, 8), np.float32), bias, top_k=5)
    np.testing.assert_array_equal(ids, [[1, 3, 5, 0, 2]])
    ids, _ = route(  # groups that tie, too
        np.zeros((1, 8), np.float32), np.zeros(8, np.float32), top_k=3, num_groups=4, kept_groups=2
    )
    np.testing.assert_array_equal(ids, [[0, 1, 2]])


def test_differences_of_the_bias_below_bfloat16_decide():
    bias = (0.5 + 1e-4 * np.arange(8)).astype(np.float32)
    ids, _ = route(np.zeros((1, 8), np.float32), bias, top_k=2)
    np.testing.assert_array_equal(ids, [[7, 6]])


def test_the_bias_chooses_and_does_nothing_else():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((50, 16)).astype(np.float32)
    bias = rng.standard_normal(16).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ids, weights = route(logits, bias, top_k=4, renormalize=False)
    assert np.any(np.sort(ids) != np.sort(np.argsort(-scores, axis=1)[:, :4]))
    np.testing.assert_array_equal(np.sort(ids), np.sort(np.argsort(-scores - bias)[:, :4]))
    assert_close(weights, np.take_along_axis(scores, ids, 1), 1e-6)
    shifted, same = route(logits, bias + np.float32(3), top_k=4, renormalize=False)
    np.testing.assert_array_equal(shifted, ids)
    np.testing.assert_array_equal(same, weights)


def test_groups_are_judged_by_their_best_two():
    """Group 0 has the best expert, groups 1 and 2 the best pairs; a negative bias is no mask."""
    scores = [[0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.1, 0.1, 0.5, 0.55, 0.1, 0.1]]
    bias = np.full(12, -2.0, np.float32)
    ids, weights = route(
        logits_of(scores), bias, top_k=3, num_groups=3, kept_groups=2, renormalize=False
    )
    np.testing.assert_array_equal(ids, [[4, 5, 9]])
    np.testing.assert_allclose(weights, [[0.6, 0.6, 0.55]], rtol=1e-6)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_extreme_logits(activation):
    """Scores that all vanish give weights of zero, not NaN; ids stay distinct and in range."""
    logits = np.full((3, 8), -1e4, np.float32)
    logits[1] = 1e4
    logits[2, ::2] = 1e4
    ids, weights = route(logits, np.zeros(8, np.float32), top_k=3, activation=activation)
    assert np.all(np.isfinite(weights))
    np.testing.assert_array_equal(ids, [[0, 1, 2], [0, 1, 2], [0, 2, 4]])
    np.testing.assert_allclose(weights[1:], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(weights[0], 0 if activation == "sigmoid" else 1 / 3, rtol=1e-6)


def test_gradients_flow_through_the_weights_only():
    rng = np.random.default_rng(1)
    logits, bias = rng.standard_normal((5, 8)).astype(np.float32), np.zeros(8, np.float32)
    target = rng.standard_normal((5, 3)).astype(np.float32)
    run = functools.partial(router, top_k=3)
    d_logits, d_bias = on_host(jax.jit(jax.grad(lambda *x: jnp.sum(run(*x)[1] * target), (0, 1))))(
        logits, bias
    )
    ids, _ = route(logits, bias, top_k=3)
    chosen = np.any(np.arange(8) == ids[..., None], axis=1)
    assert np.all(d_logits[~chosen] == 0) and np.all(d_logits[chosen] != 0)
    assert not np.any(d_bias)
