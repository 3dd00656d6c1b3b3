"""The device's sampler against a NumPy oracle, and its randomness."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax.distributed.mesh import make_mesh
from k3jax.engine.request import MAX_BAD_WORD_IDS, SamplingParams
from k3jax.engine.sampling import (
    IN_OUTPUT,
    IN_PROMPT,
    LOGPROBS_MODES,
    MAX_STOP_IDS,
    RowRequest,
    SamplingState,
    allocate_sampling,
    needs_wide_row,
    observe,
    pack_rows,
    sample,
    set_rows,
    set_wide_row,
    token_logprobs,
    wide_row,
)
from k3jax.errors import RequestError
from tests.engine.sampling_oracle import Case, described, processed, random_case

VOCAB = 24
# 99.9 % quantiles of chi-square by degrees of freedom. Seeds are fixed, so nothing flickers.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32, 15: 37.70}

sample_jit = jax.jit(sample, static_argnames=("logprobs_mode", "max_logprobs"))
observe_jit = jax.jit(observe)


def state_of(cases: list[Case], vocab: int) -> SamplingState:
    """Row i is that of case i. Wide rows that nobody needs hold what would be noticed."""
    requests, counts = [], np.full((len(cases), vocab), 0xFFFF, np.uint16)
    bias = np.full((len(cases), vocab), np.nan, np.float32)
    for i, case in enumerate(cases):
        params = case.params
        requests.append(
            RowRequest(
                params,
                params.seed or 0,
                len(case.prompt),
                case.stops,
                case.bad_words,
                case.output,
            )
        )
        if needs_wide_row(params, case.bad_words):
            counts[i], bias[i] = wide_row(params, case.prompt, case.output, case.bad_words, vocab)
    return SamplingState(pack_rows(requests), counts, bias)


def choose(logits, cases: list[Case], **options):
    """`sample` of as many rows as there are cases, each at its position."""
    rows = np.arange(len(cases), dtype=np.int32)
    position = np.asarray([case.position for case in cases], np.int32)
    state = state_of(cases, logits.shape[-1])
    return sample_jit(np.asarray(logits, np.float32), state, rows, position, **options)


def draw(logits, params: list[SamplingParams], position) -> np.ndarray:
    cases = [Case(p, [0] * int(at)) for p, at in zip(params, position, strict=True)]
    return np.asarray(choose(logits, cases).token)


def distribution(choice, vocab: int) -> np.ndarray:
    """Reported values [B, V] in order of ids; all V are reported."""
    ids, values = np.asarray(choice.top_ids), np.asarray(choice.top_logprobs)
    assert (np.sort(ids) == np.arange(vocab)).all()
    found = np.empty_like(values)
    np.put_along_axis(found, ids, values, axis=1)
    return found


# The processed distribution.


def random_logits(rng, count: int, vocab: int) -> np.ndarray:
    """float32: a half on a grid, with many equal values; the last row is nothing but."""
    logits = 3 * rng.standard_normal((count, vocab))
    logits[::2] = np.round(logits[::2])
    logits[-1] = 0
    return logits.astype(np.float32)


def check(logits, cases: list[Case]) -> int:
    """Compares a batch with the oracle; returns how many rows were compared."""
    vocab = logits.shape[1]
    choice = choose(logits, cases, logprobs_mode="processed_logprobs", max_logprobs=vocab)
    found = distribution(choice, vocab)
    compared = 0
    for i, case in enumerate(cases):
        expected = processed(logits[i], case)
        possible = np.isfinite(expected.adjusted).any()
        assert choice.finite[i] == possible
        if not possible or expected.margin < 2e-6:
            continue
        compared += 1
        kept = expected.probabilities > 0
        np.testing.assert_array_equal(np.isfinite(found[i]), kept, err_msg=f"row {i}, {case}")
        error = np.abs(found[i][kept] - np.log(expected.probabilities[kept]))
        assert error.max() < 3e-5, f"row {i}, {case}"  # logits up to 100 / 0.25, in float32
        token = int(choice.token[i])
        assert kept[token] and choice.logprob[i] == found[i][token]
        assert choice.rank[i] == (found[i] >= found[i][token]).sum()
        if case.params.greedy:  # float32 sums may tie where float64 sums do not
            best = expected.adjusted.max()
            assert token == np.flatnonzero(expected.adjusted >= best - 1e-5 * abs(best))[0]
    return compared


ALONE = {
    "nothing": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.2, "top_p": 0.95},
    "greedy": {"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.5},
    "top_k": {"top_k": 3},
    "top_k_of_one": {"top_k": 1},
    "top_k_beyond_the_vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "tiny_top_p": {"top_p": 1e-9},
    "top_p_near_one": {"top_p": 0.9999},
    "min_p": {"min_p": 0.2},
    "min_p_of_one": {"min_p": 1.0},
    "all_filters": {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    "k_then_p": {"top_k": 4, "top_p": 0.5},
    "repetition": {"repetition_penalty": 1.3},
    "repetition_wanted": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "frequency_wanted": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {3: 5, "7": -100, VOCAB - 1: 100}},
    "allowed": {"allowed_token_ids": [2, 3, 5, 7]},
    "min_tokens": {"min_tokens": 6},
}


@pytest.mark.parametrize("seed", [0, 1])
def test_each_parameter_alone(seed):
    rng = np.random.default_rng(seed)
    cases = []
    for options in ALONE.values():
        # Five tokens so far, so that min_tokens = 6 forbids one more time.
        params = SamplingParams(logprobs=0, seed=seed, **options)
        cases += [Case(params, [1, 2, 3, 3], [3, 4, 4, 4, 9], [0, 11])] * 8
    word = SamplingParams(logprobs=0, seed=seed)
    for bad_words in ([[4]], [[4, 9, 5]], [[9, 6], [4, 6]], [[4] * 3 + [9, 8]], [[1, 3, 4, 1]]):
        cases += [Case(word, [1, 2, 3], [3, 4, 4, 4, 9], [], bad_words)] * 2
    cases += [Case(word)] * (256 - len(cases))
    assert check(random_logits(rng, len(cases), VOCAB), cases) >= 245


@pytest.mark.parametrize("seed", range(4))
def test_mixes(seed):
    """256 rows of one batch, each with parameters of its own."""
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, VOCAB) for _ in range(256)]
    # Some are left without a token, in others a sum comes too close to a limit.
    assert check(random_logits(rng, len(cases), VOCAB), cases) > 230


def test_mixes_over_more_tokens():
    rng = np.random.default_rng(5)
    cases = [random_case(rng, 3001) for _ in range(32)]
    assert check(random_logits(rng, len(cases), 3001), cases) > 20


def test_ties_at_the_thresholds():
    """M-2: top-k keeps all that equal the k-th; top-p drops the lower ids among equals."""
    logits = np.zeros((4, 8), np.float32)
    logits[2:, [1, 6]] = 5.0

    def kept(**options):
        cases = [Case(SamplingParams(logprobs=0, **options))] * 4
        choice = choose(logits, cases, logprobs_mode="processed_logprobs", max_logprobs=8)
        finite = np.isfinite(distribution(choice, 8))
        np.testing.assert_array_equal(finite[0], finite[1])
        np.testing.assert_array_equal(finite[2], finite[3])
        return [list(np.flatnonzero(row)) for row in finite[::2]]

    everything = list(range(8))
    assert kept(top_k=1) == [everything, [1, 6]]
    assert kept(top_k=3) == [everything, everything]
    assert kept(top_p=0.5) == [[4, 5, 6, 7], [1, 6]]
    assert kept(top_p=0.4) == [[4, 5, 6, 7], [6]]
    assert kept(top_p=0.75) == [[2, 3, 4, 5, 6, 7], [1, 6]]
    assert kept(top_p=1e-30) == [[7], [6]]
    assert kept(top_p=0.7) == [[2, 3, 4, 5, 6, 7], [1, 6]]


def test_no_filter_keeps_every_token():
    """Probabilities far below the rounding of their sum too."""
    logits = np.full((4, VOCAB), -80.0, np.float32)
    logits[:, 5] = 0.0
    choice = choose(
        logits,
        [Case(SamplingParams(logprobs=0)), Case(SamplingParams(top_p=0.5))] * 2,
        logprobs_mode="processed_logprobs",
        max_logprobs=VOCAB,
    )
    assert np.isfinite(choice.top_logprobs).sum(axis=1).tolist() == [VOCAB, 1] * 2


def test_extreme_parameters_make_no_nan():
    logits = random_logits(np.random.default_rng(0), 4, VOCAB) * 1e30
    cases = [
        Case(SamplingParams(temperature=2e-5, repetition_penalty=1e-300, logprobs=0), [1, 2], [3]),
        Case(SamplingParams(temperature=1e30, presence_penalty=-2, logprobs=0), [1, 2], [3]),
        Case(SamplingParams(temperature=0, repetition_penalty=1e-40, logprobs=0), [1, 2], [3]),
        Case(SamplingParams(top_p=1e-300, min_p=1e-300, logprobs=0)),
    ]
    choice = choose(logits, cases, logprobs_mode="processed_logprobs", max_logprobs=VOCAB)
    assert np.asarray(choice.finite).all() and not np.isnan(choice.top_logprobs).any()
    assert np.isfinite(choice.logprob).all()


# Greedy rows.


def test_greedy_takes_the_first_of_the_largest():
    logits = random_logits(np.random.default_rng(0), 64, VOCAB)
    tokens = draw(logits, [SamplingParams(temperature=0)] * 64, range(64))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    assert tokens.dtype == np.int32


def test_greedy_and_warm_rows_in_one_batch():
    logits = random_logits(np.random.default_rng(0), 64, VOCAB)
    warm = [SamplingParams(seed=i) for i in range(64)]
    mixed = [SamplingParams(temperature=0) if i % 2 else p for i, p in enumerate(warm)]
    tokens = draw(logits, mixed, [3] * 64)
    np.testing.assert_array_equal(tokens[1::2], logits.argmax(axis=1)[1::2])
    np.testing.assert_array_equal(tokens[0::2], draw(logits, warm, [3] * 64)[0::2])


# Draws.


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
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {5: 1.5}, "allowed_token_ids": [1, 2, 4, 5]},
}


@pytest.mark.parametrize("across", ["seeds", "positions"])
@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_frequencies(case, across):
    """Tokens follow the processed distribution over many seeds, and over the places of one."""
    one = Case(SamplingParams(**DISTRIBUTIONS[case]), [2, 0], [2, 2, 6])
    state = state_of([one], len(LOGITS))
    numbers, same = np.arange(DRAWS, dtype=np.int32), np.full(DRAWS, 11, np.int32)
    # A table row for each, since seeds are kept there.
    state = jax.tree.map(lambda table: np.repeat(table, DRAWS, axis=0), state)
    seeds = numbers if across == "seeds" else same
    state.rows.seed[:, 1] = seeds
    position = same if across == "seeds" else numbers
    tokens = sample_jit(np.tile(LOGITS, (DRAWS, 1)), state, numbers, position).token
    statistic, freedom = chi_square(np.asarray(tokens), processed(LOGITS, one).probabilities)
    assert statistic < CHI_SQUARE[freedom]


@pytest.mark.parametrize("step", [1, 2])
def test_neighbouring_draws_are_independent(step):
    """F070: the key moves on with every token, and neighbouring seeds share nothing."""
    one = Case(SamplingParams(seed=7, top_k=4))
    logits = np.tile(LOGITS, (DRAWS, 1))
    tokens = draw(logits, [one.params] * DRAWS, np.arange(DRAWS))
    neighbours = draw(logits, [SamplingParams(seed=7 + step, top_k=4)] * DRAWS, np.arange(DRAWS))
    p = processed(LOGITS, one).probabilities
    place = {token: i for i, token in enumerate(np.flatnonzero(p))}
    joint = np.outer(p[p > 0], p[p > 0]).reshape(-1)
    for first, second in ((tokens[:-step], tokens[step:]), (tokens, neighbours)):
        pairs = [place[a] * 4 + place[b] for a, b in zip(first, second, strict=True)]
        statistic, freedom = chi_square(np.asarray(pairs), joint)
        assert statistic < CHI_SQUARE[freedom]


def test_batch_mates_rows_and_padding_do_not_matter():
    """M-1, F070: a seed and a position decide alone."""
    rng = np.random.default_rng(8)
    cases = [random_case(rng, VOCAB) for _ in range(64)]
    logits = random_logits(rng, 64, VOCAB)
    state = state_of(cases, VOCAB)
    position = np.asarray([case.position for case in cases], np.int32)

    def tokens(rows, **tables):
        found = sample_jit(logits[rows], dataclasses.replace(state, **tables), rows, position[rows])
        return np.asarray(found.token)

    together = tokens(np.arange(64, dtype=np.int32))
    order = rng.permutation(64).astype(np.int32)
    np.testing.assert_array_equal(tokens(order), together[order])
    for rows in (order[:8], order[8:16], order[[3] * 8]):
        np.testing.assert_array_equal(tokens(rows), together[rows])
    # Rows of the tables that are not needed may hold anything.
    idle = [not needs_wide_row(case.params, case.bad_words) for case in cases]
    counts, bias = state.counts.copy(), state.bias.copy()
    counts[idle], bias[idle] = 3, np.inf
    everyone = np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(tokens(everyone, counts=counts, bias=bias), together)


def test_seeds():
    flat = np.zeros((64, VOCAB), np.float32)

    def tokens(seed):
        return draw(flat, [SamplingParams(seed=seed)] * 64, range(1, 65))

    np.testing.assert_array_equal(tokens(7), tokens(7))
    # Both words of a seed count, and its sign does.
    streams = [tokens(seed) for seed in (7, 8, 7 + 2**32, 7 + 2**62, -7, 2**63 - 1, -(2**63), 0)]
    several = SamplingParams(seed=7, n=4)
    streams += [tokens(several.for_output(i).seed) for i in range(1, 4)]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert (one == other).mean() < 0.3  # chance is 1 in 24


# Rows that fail.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["one", "all"])
def test_rows_that_are_not_finite(bad, place):
    """F002: such a row is reported, its token is in range, and no other row changes."""
    rng = np.random.default_rng(3)
    cases = [random_case(rng, VOCAB) for _ in range(64)]
    logits = random_logits(rng, 64, VOCAB)
    broken = logits.copy()
    broken[5, 3 if place == "one" else slice(None)] = bad
    options = {"logprobs_mode": "raw_logprobs", "max_logprobs": 5}
    good, found = choose(logits, cases, **options), choose(broken, cases, **options)
    assert good.finite[5] and not found.finite[5] and 0 <= found.token[5] < VOCAB
    others = np.arange(64) != 5
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[others], b[others]), good, found)


def test_row_without_a_token_to_choose():
    """M-7: when the only allowed token may not come yet."""
    params = SamplingParams(allowed_token_ids=[3], min_tokens=1)
    cases = [Case(params, stops=[3]), Case(params, output=[5], stops=[3])] * 2
    choice = choose(np.zeros((4, VOCAB), np.float32), cases)
    assert choice.finite.tolist() == [False, True] * 2 and (choice.token[1::2] == 3).all()


# Logprobs.


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_modes(mode):
    rng = np.random.default_rng(4)
    cases = [random_case(rng, VOCAB) for _ in range(64)]
    logits = random_logits(rng, 64, VOCAB)
    choice = choose(logits, cases, logprobs_mode=mode, max_logprobs=5)
    for i, case in enumerate(cases):
        expected = processed(logits[i], case)
        if not choice.finite[i] or expected.margin < 2e-6:
            continue
        z, p = logits[i].astype(np.float64), expected.probabilities
        if mode == "raw_logprobs":
            z = z - np.log(np.exp(z).sum())
        elif mode.startswith("processed"):
            with np.errstate(divide="ignore"):
                z = np.log(p)
            if mode == "processed_logits":
                z = np.where(p > 0, expected.adjusted / (case.params.temperature or 1.0), z)
        # Equal in float32, equal for the rank.
        z = z.astype(np.float32)
        value, rank, _, values = described(z, int(choice.token[i]), 5)
        np.testing.assert_allclose(choice.logprob[i], value, atol=1e-4, rtol=1e-5)
        np.testing.assert_allclose(choice.top_logprobs[i], values, atol=1e-4, rtol=1e-5)
        if "raw" in mode:
            assert choice.rank[i] == (logits[i] >= logits[i, choice.token[i]]).sum()
            ids = np.argsort(-logits[i], kind="stable")[:5]
            np.testing.assert_array_equal(choice.top_ids[i], ids)
        else:
            assert choice.rank[i] >= rank - (np.abs(z - value) < 1e-5).sum()


def test_unknown_mode():
    with pytest.raises(ValueError, match="raw_logprobs"):
        token_logprobs(jnp.zeros((1, 4)), jnp.zeros((1,), jnp.int32), 0, "logprobs")


@pytest.mark.parametrize("wanted", [None, 0, 1])
@pytest.mark.parametrize("most", [0, 2])
def test_number_of_logprobs(wanted, most):
    """F072: 0 asks for the chosen token's own; none at all costs and says nothing."""
    logits = random_logits(np.random.default_rng(0), 4, VOCAB)
    cases = [Case(SamplingParams(temperature=0, logprobs=wanted))] * 4
    choice = choose(logits, cases, max_logprobs=most)
    assert choice.top_ids.shape == choice.top_logprobs.shape == (4, most)
    if wanted is None:
        assert not np.asarray(choice.logprob).any() and not np.asarray(choice.rank).any()
    else:
        assert (np.asarray(choice.logprob) < 0).all() and (np.asarray(choice.rank) >= 1).all()


def test_prompt_logprobs():
    rng = np.random.default_rng(6)
    logits = random_logits(rng, 9, VOCAB)
    targets = rng.integers(-1, VOCAB, 9).astype(np.int32)
    values = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    modes = (("raw_logprobs", values), ("processed_logits", logits))
    for mode, expected in modes:
        found = token_logprobs(jnp.asarray(logits), jnp.asarray(targets), 3, mode)
        for i, target in enumerate(targets):
            if target < 0:  # no target
                continue
            value, rank, ids, top = described(expected[i], target, 3)
            np.testing.assert_allclose(found[0][i], value, rtol=1e-5)
            assert found[1][i] == (logits[i] >= logits[i, target]).sum() and rank > 0
            np.testing.assert_array_equal(found[2][i], np.argsort(-logits[i], kind="stable")[:3])
            np.testing.assert_allclose(found[3][i], top, rtol=1e-5)


# State.


def test_pack():
    params = [
        SamplingParams(temperature=np.float64(0.5), top_k=-1, top_p=0.25, min_p=0.5, seed=-1),
        SamplingParams(temperature=1, top_k=np.int64(3), min_tokens=4, logprobs=0),
        SamplingParams(temperature=0, top_k=3, top_p=0.5, repetition_penalty=1e-300),
    ]
    requests = [
        (p, seed, 10, {7, 5}, [[1], [2, 3]], [4] * 9)
        for p, seed in zip(params, (-1, 2**33 + 5, 0), strict=True)
    ]
    rows = pack_rows(requests, 4)
    kinds = {name: str(table.dtype) for name, table in vars(rows).items()}
    assert set(kinds.values()) == {"float32", "int32", "uint32", "bool"}
    jax.tree.map(
        lambda packed, table: np.testing.assert_array_equal(packed.dtype, table.dtype),
        rows,
        allocate_sampling(2, VOCAB).rows,
    )
    np.testing.assert_array_equal(rows.top_k, [0, 3, 0, 0])
    np.testing.assert_array_equal(rows.seed, [[2**32 - 1, 2**32 - 1], [2, 5], [0, 0], [0, 0]])
    np.testing.assert_array_equal(rows.min_length, [10, 14, 10, 0])
    np.testing.assert_array_equal(rows.num_logprobs, [-1, 0, -1, -1])
    np.testing.assert_array_equal(rows.stop_ids[:, :3], [[5, 7, -1]] * 3 + [[-1] * 3])
    np.testing.assert_array_equal(rows.recent, [[4] * 7] * 3 + [[-1] * 7])
    np.testing.assert_array_equal(rows.bad_words[0, :2, -2:], [[-1, -1], [2, 3]])
    assert rows.repetition_penalty[2] > 0 and rows.has_bias.tolist() == [True] * 3 + [False]


def test_refused_by_pack():
    params = SamplingParams()
    with pytest.raises(RequestError, match="stop"):
        pack_rows([(params, 0, 1, range(MAX_STOP_IDS + 1), (), ())])
    for words in ([[1, 2]] * (MAX_BAD_WORD_IDS + 1), [[1] * 9]):
        with pytest.raises(RequestError) as refused:
            pack_rows([(params, 0, 1, (), words, ())])
        assert refused.value.field == "bad_words"
    for field, value in {"logit_bias": {VOCAB: 1}, "allowed_token_ids": [VOCAB]}.items():
        with pytest.raises(RequestError) as refused:
            wide_row(SamplingParams(**{field: value}), [1], [], [], VOCAB)
        assert refused.value.field == field


def test_wide_rows():
    params = SamplingParams(allowed_token_ids=[2, 3, 4], logit_bias={3: 1.5, 7: 9})
    counts, bias = wide_row(params, [1, 1, 5], [5, 5, 2] + [6] * 40_000, [[4], [1, 2]], 8)
    p = IN_PROMPT
    np.testing.assert_array_equal(counts, [0, p, 1, 0, 0, p + 2, IN_OUTPUT, 0])
    np.testing.assert_array_equal(bias, [-np.inf] * 2 + [0, 1.5] + [-np.inf] * 4)
    assert (counts.dtype, bias.dtype) == (np.uint16, np.float32)
    neutral = SamplingParams(temperature=0.3, top_p=0.5, min_tokens=3, logprobs=2, seed=1)
    assert not needs_wide_row(neutral, [[1, 2]])
    assert needs_wide_row(neutral, [[1]])
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert needs_wide_row(dataclasses.replace(neutral, **{name: 0.5}))


def test_rows_of_a_state():
    """A state that is filled row by row; padding rows name row 0."""
    rng = np.random.default_rng(9)
    cases = [random_case(rng, VOCAB) for _ in range(8)]
    expected = state_of(cases, VOCAB)
    state = allocate_sampling(12, VOCAB)
    places = np.asarray([4, 11, 2, 3, 9, 8, 7, 1, 0, 0], np.int32)
    padded = jax.tree.map(lambda a, b: np.concatenate([a, b[:2]]), expected.rows, pack_rows([], 2))
    state = jax.jit(set_rows)(state, places, padded)
    put = jax.jit(set_wide_row)
    for place, case, counts, bias in zip(
        places, cases, expected.counts, expected.bias, strict=False
    ):
        if needs_wide_row(case.params, case.bad_words):
            state = put(state, place, counts, bias)
    logits = random_logits(rng, 8, VOCAB)
    position = np.asarray([case.position for case in cases], np.int32)
    found = sample_jit(logits, state, places[:8], position)
    np.testing.assert_array_equal(found.token, choose(logits, cases).token)


def test_observe_equals_a_state_made_anew():
    rng = np.random.default_rng(10)
    cases = [random_case(rng, VOCAB) for _ in range(8)]
    cases = [
        dataclasses.replace(
            c, params=dataclasses.replace(c.params, repetition_penalty=1.5), bad_words=[]
        )
        for c in cases
    ]
    state = jax.tree.map(jnp.asarray, state_of(cases, VOCAB))
    rows = np.asarray([3, 1, 7, 0, 0], np.int32)
    active = np.asarray([True, True, True, False, False])
    for _ in range(9):
        tokens = rng.integers(0, VOCAB, 5).astype(np.int32)
        state = observe_jit(state, rows, tokens, active)
        for row, token in zip(rows[:3], tokens, strict=False):
            cases[row].output.append(int(token))
    jax.tree.map(np.testing.assert_array_equal, state, state_of(cases, VOCAB))


def test_counts_saturate():
    state = dataclasses.replace(
        allocate_sampling(2, 4), counts=jnp.full((2, 4), IN_PROMPT + IN_OUTPUT - 1, jnp.uint16)
    )
    for _ in range(3):
        state = observe_jit(state, np.ones(1, np.int32), np.full(1, 2, np.int32), np.ones(1, bool))
    np.testing.assert_array_equal(state.counts[1], [0xFFFE, 0xFFFE, 0xFFFF, 0xFFFE])
    np.testing.assert_array_equal(state.counts[0], [0xFFFE] * 4)


def test_in_a_loop_on_a_mesh():
    """In shard_map and while_loop, as the engine runs it; greedy rows that may not repeat."""
    mesh = make_mesh(tp=2)
    params = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=0.5)
    state = state_of([Case(params)] * 2, 4)
    logits = np.asarray([[3.0, 2.0, 1.5, -9.0], [0.0, 0.1, 0.2, 0.3]], np.float32)
    rows = np.arange(2, dtype=np.int32)

    def run(logits, state):
        def body(carry):
            i, state, out = carry
            choice = sample(logits, state, rows, jnp.full((2,), 1, jnp.int32) + i)
            state = observe(state, rows, choice.token, jnp.ones((2,), bool))
            return i + 1, state, out.at[:, i].set(choice.token)

        start = (jnp.int32(0), state, jnp.zeros((2, 4), jnp.int32))
        return jax.lax.while_loop(lambda carry: carry[0] < 4, body, start)[2]

    plain = PartitionSpec()
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(plain, plain), out_specs=plain, check_vma=False
    )
    expected = [[0, 1, 2, 0], [3, 2, 1, 0]]
    np.testing.assert_array_equal(jax.jit(mapped)(logits, state), expected)
