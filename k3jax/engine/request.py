"""What a request asks of generation, checked once. Imports no jax."""

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

from k3jax.errors import RequestError

# Sampling below this temperature is greedy: dividing logits by less would only overflow.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop, with vLLM's names.

    Numbers may be numpy or jax scalars; they are stored as Python numbers. A value out of range is
    a `RequestError` that names the field.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    min_p: float = 0.0  # drop tokens less likely than this times the most likely one
    seed: int | None = None  # None draws differently every time
    stop: tuple[str, ...] = ()  # end before the first of these strings; a string or a list
    stop_token_ids: tuple[int, ...] = ()  # end at the first of these tokens
    ignore_eos: bool = False  # go on past the tokens that end a message

    def __post_init__(self):
        checked: dict[str, Any] = {
            "max_tokens": _integer("max_tokens", self.max_tokens, low=1, high=2**31 - 1),
            "temperature": _real("temperature", self.temperature, low=0.0),
            "top_p": _real("top_p", self.top_p, low=0.0, high=1.0),
            "top_k": max(0, _integer("top_k", self.top_k, low=-1, high=2**31 - 1)),
            "min_p": _real("min_p", self.min_p, low=0.0, high=1.0),
            "seed": None
            if self.seed is None
            else _integer("seed", self.seed, low=-(2**63), high=2**63 - 1),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
        }
        if checked["top_p"] == 0.0:
            raise RequestError("top_p must be greater than 0", field="top_p")
        if checked["temperature"] < GREEDY_TEMPERATURE:
            checked["temperature"] = 0.0
        for field in fields(self):
            object.__setattr__(self, field.name, checked[field.name])

    @property
    def greedy(self) -> bool:
        """The most likely token is taken."""
        return self.temperature == 0.0


def _scalar(value: Any) -> Any:
    """A numpy or jax scalar as a Python number, anything else as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _integer(field: str, value: Any, *, low: int, high: int | None = None) -> int:
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{field} must be an integer, not {show(value)}", field=field)
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{field} must be {limit}, not {show(value)}", field=field)
    return number


def _real(field: str, value: Any, *, low: float, high: float = math.inf) -> float:
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{field} must be a number, not {show(value)}", field=field)
    limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise RequestError(f"{field} must be {limit}, not {show(value)}", field=field)
    return number


def _boolean(field: str, value: Any) -> bool:
    value = _scalar(value)
    if not isinstance(value, bool):
        raise RequestError(f"{field} must be true or false, not {show(value)}", field=field)
    return value


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise RequestError("stop must be a string or a list of strings", field="stop")
    if "" in strings:
        raise RequestError("stop must not contain an empty string", field="stop")
    return tuple(strings)


def _token_ids(value: Any) -> tuple[int, ...]:
    field = "stop_token_ids"
    if value is None:
        return ()
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
        raise RequestError(f"{field} must be a list of token ids", field=field)
    return tuple(_integer(field, token_id, low=0, high=2**31 - 1) for token_id in value)


def show(value: Any) -> str:
    """A value for a message, cut to a length that fits one."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
