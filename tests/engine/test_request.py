"""SamplingParams: what is accepted, and what is refused with the name of the field."""

import dataclasses
import math
import time

import numpy as np
import pytest

from k3jax.engine.request import (
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    SamplingParams,
    check_bad_word_ids,
)
from k3jax.errors import RequestError


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert (params.min_p, params.seed, params.stop) == (0.0, None, ())
    assert (params.n, params.min_tokens, params.repetition_penalty) == (1, 0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.logprobs is params.prompt_logprobs is params.allowed_token_ids is None
    assert params.skip_special_tokens and params.detokenize
    assert not (params.ignore_eos or params.include_stop_str_in_output)


@pytest.mark.parametrize("real", [float, np.float32, np.float64, np.float16, np.asarray])
@pytest.mark.parametrize("whole", [int, np.int32, np.int64, np.uint8, np.asarray])
def test_numpy_scalars_become_python_numbers(real, whole):
    params = SamplingParams(
        max_tokens=whole(5),
        temperature=real(0.5),
        top_p=real(0.25),
        top_k=whole(3),
        min_p=real(0.125),
        seed=whole(7),
        stop_token_ids=[whole(9)],
        presence_penalty=real(-1.5),
        logit_bias={np.int64(4): real(0.5)},
        logprobs=whole(0),
    )
    plain = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=7,
        stop_token_ids=(9,),
        presence_penalty=-1.5,
        logit_bias={4: 0.5},
        logprobs=0,
    )
    assert params == plain
    for field in dataclasses.fields(params):
        assert type(getattr(params, field.name)) is type(getattr(plain, field.name))
    assert type(params.stop_token_ids[0]) is int
    assert [type(x) for x in params.logit_bias[0]] == [int, float]


def test_same_meaning_same_value():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"])
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(temperature=1e-9) == SamplingParams(temperature=0)
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    assert SamplingParams(stop_token_ids=np.array([1, 2])).stop_token_ids == (1, 2)
    assert SamplingParams(allowed_token_ids=range(3)).allowed_token_ids == (0, 1, 2)
    bias = SamplingParams(logit_bias={"20": 1, 3: -100})
    assert bias.logit_bias == ((3, -100.0), (20, 1.0)) and hash(bias) == hash(bias)
    assert SamplingParams(logit_bias={}, bad_words=None) == SamplingParams(logit_bias=None)


def test_zero_logprobs_are_not_none():
    """F072."""
    assert (
        SamplingParams(logprobs=0).logprobs
        == 0
        == SamplingParams(prompt_logprobs=0).prompt_logprobs
    )
    assert SamplingParams(logprobs=0) != SamplingParams(logprobs=None) == SamplingParams()


def test_parameters_of_each_output():
    """F070: outputs of one seed differ, the first is that of n = 1, and all can be had again."""
    params = SamplingParams(n=4, seed=-7, logit_bias={1: 2}, allowed_token_ids=[1], stop=["x"])
    each = [params.for_output(i) for i in range(4)]
    assert each[0] == dataclasses.replace(params, n=1)
    assert each == [params.for_output(i) for i in range(4)]
    assert len({p.seed for p in each}) == 4
    for p in each:
        assert dataclasses.replace(p, n=4, seed=-7) == params
    other = dataclasses.replace(params, seed=-6)
    assert not {other.for_output(i).seed for i in range(4)} & {p.seed for p in each}
    assert SamplingParams(n=2).for_output(1) == SamplingParams()
    for index in (-1, 4):
        with pytest.raises(IndexError):
            params.for_output(index)


REFUSED = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", None),
    ("max_tokens", np.array([1, 2])),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", np.float32("nan")),
    ("temperature", 10**400),
    ("temperature", "hot"),
    ("temperature", False),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 10**5_000),
    ("seed", 0.5),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", 1),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 12),
    ("n", 0),
    ("n", 129),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than max_tokens
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.1),
    ("repetition_penalty", math.nan),
    ("logit_bias", [1, 2]),
    ("logit_bias", "1"),
    ("logit_bias", 1),
    ("logit_bias", [[1, 2.0]]),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5_000: 1}),
    ("logit_bias", {1: 1, "1": 2}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: -math.inf}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1.5: 1}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", {1: 2}),
    ("allowed_token_ids", range(10**9)),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [1]),
    ("bad_words", ["x"] * 33),
    ("bad_words", ["x" * 1025]),
    ("logprobs", -1),
    ("logprobs", True),
    ("logprobs", 1.0),
    ("prompt_logprobs", -1),
    ("stop", ["x" * 1025]),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
    ("stop_token_ids", np.array(3)),
    ("stop_token_ids", range(65)),
    ("include_stop_str_in_output", 0),
    ("skip_special_tokens", None),
    ("detokenize", "no"),
    ("ignore_eos", 1),
    ("ignore_eos", "yes"),
]


@pytest.mark.parametrize(
    "field, value", REFUSED, ids=[f"{name}-{at}" for at, (name, _) in enumerate(REFUSED)]
)
def test_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field


def test_conflicts():
    with pytest.raises(RequestError, match="detokenize") as refused:
        SamplingParams(stop="x", detokenize=False)
    assert refused.value.field == "stop"
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "bad_words", "logit_bias"])
def test_many_are_refused_quickly(field):
    many = [""] * 10**5 if field in ("stop", "bad_words") else range(10**5)
    start = time.perf_counter()
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{field: dict.fromkeys(many, 0) if field == "logit_bias" else many})
    assert refused.value.field == field and time.perf_counter() - start < 0.5


@pytest.mark.parametrize("field, value", [("logit_bias", {9: 1}), ("allowed_token_ids", [3, 9])])
def test_ids_beyond_the_vocabulary(field, value):
    params = SamplingParams(**{field: value})
    params.check_vocabulary(10)
    with pytest.raises(RequestError, match="0..8") as refused:
        params.check_vocabulary(9)
    assert refused.value.field == field


def test_bad_words_as_tokens():
    check_bad_word_ids([[1] * MAX_BAD_WORD_TOKENS] * MAX_BAD_WORD_IDS)
    for words in ([[1] * (MAX_BAD_WORD_TOKENS + 1)], [[1]] * (MAX_BAD_WORD_IDS + 1)):
        with pytest.raises(RequestError) as refused:
            check_bad_word_ids(words)
        assert refused.value.field == "bad_words"


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3
