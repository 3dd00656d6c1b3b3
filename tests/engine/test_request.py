"""SamplingParams: what is accepted, and what is refused with the name of the field."""

import dataclasses
import math

import numpy as np
import pytest

from k3jax.engine.request import SamplingParams
from k3jax.errors import RequestError


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert (params.min_p, params.seed, params.stop) == (0.0, None, ())


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
    )
    plain = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=7,
        stop_token_ids=(9,),
    )
    assert params == plain
    for field in dataclasses.fields(params):
        assert type(getattr(params, field.name)) is type(getattr(plain, field.name))
    assert type(params.stop_token_ids[0]) is int


def test_same_meaning_same_value():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"])
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(temperature=1e-9) == SamplingParams(temperature=0)
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    assert SamplingParams(stop_token_ids=np.array([1, 2])).stop_token_ids == (1, 2)


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


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3
