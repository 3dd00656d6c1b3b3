"""The choice of the next token against a few lines of NumPy, and its randomness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingArrays, admitted, sample

VOCAB = 24
# 99.9 % quantiles of chi-square by degrees of freedom. Seeds are fixed, so nothing flickers.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32, 15: 37.70}

sample_jit = jax.jit(sample)
admitted_jit = jax.jit(admitted)


def draw(logits, params, position) -> np.ndarray:
    arrays = SamplingArrays.pack(params)
    position = jnp.asarray(position, jnp.int32)
    return np.asarray(sample_jit(jnp.asarray(logits, jnp.float32), arrays, position))


def kept_by(logits, params: SamplingParams) -> np.ndarray:
    """bool [V] in float64: min-p, then top-k, then top-p over what is left."""
    tempered = logits.astype(np.float64) / params.temperature
    order = np.argsort(-tempered, kind="stable")  # of equals the lower id first
    p = np.exp(tempered - tempered.max())
    keep = np.zeros(len(p), bool)
    for rank, token in enumerate(order):
        keep[token] = p[token] >= params.min_p and (params.top_k == 0 or rank < params.top_k)
    left = np.where(keep, p, 0)
    left /= left.sum()
    before = 0.0
    for token in order:
        if params.top_p < 1 and before >= params.top_p:
            keep[token] = False
        before += left[token]
    keep[order[0]] = True
    return keep


def probabilities(logits, params: SamplingParams) -> np.ndarray:
    tempered = np.asarray(logits, np.float64) / params.temperature
    p = np.where(kept_by(np.asarray(logits), params), np.exp(tempered - tempered.max()), 0)
    return p / p.sum()


FILTERS = {
    "nothing": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.2, "top_p": 0.95},
    "top_k": {"top_k": 3},
    "top_k_of_one": {"top_k": 1},
    "top_k_beyond_the_vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "tiny_top_p": {"top_p": 1e-6},
    "top_p_near_one": {"top_p": 0.9999},
    "min_p": {"min_p": 0.2},
    "min_p_of_one": {"min_p": 1.0},
    "all": {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    "k_then_p": {"top_k": 4, "top_p": 0.5},
}


@pytest.fixture(scope="module")
def rows():
    """Logits of 13 × 16 rows, 16 for each filter: most random, some with equal values."""
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((len(FILTERS), 16, VOCAB))).astype(np.float32)
    logits[:, 12:] = np.round(logits[:, 12:])  # many ties
    logits[:, 15] = 0  # nothing but ties
    return logits


def test_filters(rows):
    each = [SamplingParams(**options) for options in FILTERS.values()]
    params = [p for p in each for _ in range(rows.shape[1])]
    flat = rows.reshape(-1, VOCAB)
    scale = np.asarray([p.temperature for p in params], np.float32)[:, None]
    found = np.asarray(admitted_jit(jnp.asarray(flat / scale), SamplingArrays.pack(params)))
    for i, (logits, p) in enumerate(zip(flat, params, strict=True)):
        np.testing.assert_array_equal(found[i], kept_by(logits, p), err_msg=f"row {i}, {p}")


def test_draws_are_admitted(rows):
    each = [SamplingParams(seed=i, **options) for i, options in enumerate(FILTERS.values())]
    params = [p for p in each for _ in range(rows.shape[1])]
    flat = rows.reshape(-1, VOCAB)
    for position in range(5):
        tokens = draw(flat, params, [position] * len(flat))
        for token, logits, p in zip(tokens, flat, params, strict=True):
            assert kept_by(logits, p)[token]


def test_greedy_takes_the_first_of_the_largest(rows):
    flat = rows.reshape(-1, VOCAB)
    tokens = draw(flat, [SamplingParams(temperature=0)] * len(flat), range(len(flat)))
    np.testing.assert_array_equal(tokens, flat.argmax(axis=1))
    assert tokens.dtype == np.int32


def test_greedy_and_warm_rows_in_one_batch(rows):
    flat = rows.reshape(-1, VOCAB)
    warm = [SamplingParams(seed=i) for i in range(len(flat))]
    mixed = [SamplingParams(temperature=0) if i % 2 else p for i, p in enumerate(warm)]
    tokens = draw(flat, mixed, [3] * len(flat))
    np.testing.assert_array_equal(tokens[1::2], flat.argmax(axis=1)[1::2])
    np.testing.assert_array_equal(tokens[0::2], draw(flat, warm, [3] * len(flat))[0::2])


def chi_square(tokens, expected_p) -> tuple[float, int]:
    """The statistic and its degrees of freedom; nothing may fall where p is zero."""
    counts = np.bincount(tokens, minlength=len(expected_p))
    expected = expected_p * len(tokens)
    inside = expected > 0
    assert counts[~inside].sum() == 0 and expected[inside].min() > 5
    return float(((counts - expected)[inside] ** 2 / expected[inside]).sum()), inside.sum() - 1


LOGITS = np.asarray([0.3, -0.5, 1.2, 0.0, 0.8, -1.5, 0.4, -0.2], np.float32)
DRAWS = 4096
DISTRIBUTIONS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.4},
}


@pytest.mark.parametrize("across", ["seeds", "positions"])
@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_frequencies(case, across):
    """Tokens follow the filtered distribution over many seeds, and over the places of one seed."""
    options = DISTRIBUTIONS[case]
    numbers = np.arange(DRAWS)
    seeds = numbers if across == "seeds" else np.full(DRAWS, 7)
    params = [SamplingParams(seed=seed, **options) for seed in seeds]
    position = np.full(DRAWS, 11) if across == "seeds" else numbers
    tokens = draw(np.tile(LOGITS, (DRAWS, 1)), params, position)
    statistic, freedom = chi_square(tokens, probabilities(LOGITS, params[0]))
    assert statistic < CHI_SQUARE[freedom]


@pytest.mark.parametrize("step", [1, 2])
def test_neighbouring_draws_are_independent(step):
    """F070: the key moves on with every token, and neighbouring seeds share nothing."""
    params = [SamplingParams(seed=7, top_k=4)] * DRAWS
    tokens = draw(np.tile(LOGITS, (DRAWS, 1)), params, np.arange(DRAWS))
    neighbours = draw(
        np.tile(LOGITS, (DRAWS, 1)),
        [SamplingParams(seed=7 + step, top_k=4)] * DRAWS,
        np.arange(DRAWS),
    )
    kept = np.flatnonzero(kept_by(LOGITS, params[0]))
    place = {token: i for i, token in enumerate(kept)}
    p = probabilities(LOGITS, params[0])[kept]
    joint = np.outer(p, p).reshape(-1)
    for first, second in ((tokens[:-step], tokens[step:]), (tokens, neighbours)):
        pairs = [place[a] * 4 + place[b] for a, b in zip(first, second, strict=True)]
        statistic, freedom = chi_square(np.asarray(pairs), joint)
        assert statistic < CHI_SQUARE[freedom]


def test_batch_mates_rows_and_padding_do_not_matter(rows):
    """F070: a seed and a position decide alone."""
    flat = rows.reshape(-1, VOCAB)[:32]
    params = [SamplingParams(seed=100 + i, temperature=1.3, top_p=0.9) for i in range(32)]
    position = np.arange(32) * 5
    together = draw(flat, params, position)
    order = np.random.default_rng(1).permutation(32)
    shuffled = draw(flat[order], [params[i] for i in order], position[order])
    np.testing.assert_array_equal(shuffled, together[order])
    for i in (0, 9, 31):
        assert draw(flat[i : i + 1], [params[i]], position[i : i + 1]) == together[i]


def test_seeds(rows):
    flat = np.tile(np.zeros(VOCAB, np.float32), (64, 1))
    position = np.arange(64)

    def tokens(seed):
        return draw(flat, [SamplingParams(seed=seed)] * 64, position)

    np.testing.assert_array_equal(tokens(7), tokens(7))
    # Both words of a seed count, and its sign does.
    streams = [tokens(seed) for seed in (7, 8, 7 + 2**32, 7 + 2**62, -7, 2**63 - 1, -(2**63), 0)]
    streams += [tokens(None), tokens(None)]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert (one == other).mean() < 0.3  # chance is 1 in 24


def test_pack():
    params = [
        SamplingParams(temperature=np.float64(0.5), top_k=-1, top_p=0.25, min_p=0.5, seed=-1),
        SamplingParams(temperature=1, top_k=np.int64(3), seed=2**33 + 5),
    ]
    arrays = SamplingArrays.pack(params)
    kinds = [leaf.dtype.name for leaf in jax.tree.leaves(arrays)]
    assert kinds == ["float32", "int32", "float32", "float32", "uint32"]
    np.testing.assert_array_equal(arrays.top_k, [0, 3])
    np.testing.assert_array_equal(arrays.seed, [[2**32 - 1, 2**32 - 1], [2, 5]])


def test_logits_of_minus_infinity_are_never_drawn():
    """As a grammar would forbid tokens."""
    logits = np.full((256, VOCAB), -np.inf, np.float32)
    logits[:, [3, 17]] = 0.0
    params = [SamplingParams(seed=i, top_p=0.9) for i in range(256)]
    tokens = draw(logits, params, np.zeros(256))
    statistic, freedom = chi_square(tokens, np.isin(np.arange(VOCAB), [3, 17]) / 2)
    assert freedom == 1 and statistic < CHI_SQUARE[1]
