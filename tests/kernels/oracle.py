"""What the operator tests compare with: loops in float64 NumPy, and the metric of the goldens."""

import jax
import numpy as np


def on_host(jitted):
    """A jitted function that returns NumPy arrays: what a test slices there compiles nothing."""
    return lambda *args, **kwargs: jax.device_get(jitted(*args, **kwargs))


def assert_close(actual, expected, limit: float, name: str = "") -> None:
    """max|actual - expected| <= limit * max|expected|; NaN anywhere fails."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    error = np.max(np.abs(actual - expected), initial=0.0)
    allowed = limit * np.max(np.abs(expected), initial=0.0)
    assert error <= allowed, f"{name}: error {error:.3g} exceeds {allowed:.3g}"


def kda(q, k, v, g, beta, state):
    """KDA of one sequence, token by token: outputs [T, H, V] and states [T + 1, H, K, V]."""
    q, k, v, g, beta, state = (np.asarray(a, np.float64) for a in (q, k, v, g, beta, state))
    outputs, states = np.zeros(v.shape), [state]
    for t in range(len(q)):
        decayed = np.exp(g[t])[..., None] * states[-1]
        u = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], decayed))
        states.append(decayed + k[t][..., None] * u[:, None])
        outputs[t] = q.shape[-1] ** -0.5 * np.einsum("hk,hkv->hv", q[t], states[-1])
    return outputs, np.stack(states)


def silu(x):
    return x / (1 + np.exp(-x))


def short_conv(x, weight, tail):
    """Causal convolution of one sequence [T, H, d] behind its tail [W - 1, H, d], then SiLU."""
    window = np.concatenate([tail, x]).astype(np.float64)
    taps = weight.shape[-1]
    return silu(sum(window[j : j + len(x)] * weight[..., j] for j in range(taps)))


def attention(q, k, v, scale):
    """Softmax attention of one query [N, K] over keys [S, N, K], values [S, N, V]; 0 over none."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    if not len(k):
        return np.zeros(v.shape[1:])
    scores = scale * np.einsum("nk,snk->sn", q, k)
    p = np.exp(scores - scores.max(axis=0))
    return np.einsum("sn,snv->nv", p / p.sum(axis=0), v)
