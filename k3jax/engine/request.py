"""What a request asks of generation, checked once. Imports no jax."""

import dataclasses
import hashlib
import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from k3jax.errors import RequestError

# Sampling below this temperature is greedy: dividing logits by less would only overflow.
GREEDY_TEMPERATURE = 1e-5
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STRING_CHARS = 1024  # of a stop string or a bad word
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # more than any vocabulary of ours
MAX_BAD_WORDS = 32
MAX_BAD_WORD_IDS = 2 * MAX_BAD_WORDS  # a word's tokens as it stands and after a space
MAX_BAD_WORD_TOKENS = 8
LARGEST = 2**31 - 1
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop, with vLLM's names.

    Numbers may be numpy or jax scalars; they are stored as Python numbers, collections as tuples.
    A value out of range is a `RequestError` that names the field.
    """

    n: int = 1  # outputs of one prompt
    max_tokens: int = 16
    min_tokens: int = 0  # no stop token is chosen before
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    min_p: float = 0.0  # drop tokens less likely than this times the most likely one
    repetition_penalty: float = 1.0  # divides logits of tokens in the prompt or the output
    presence_penalty: float = 0.0  # taken from logits of tokens in the output
    frequency_penalty: float = 0.0  # taken once for each time that a token is in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to logits; a mapping from token ids
    allowed_token_ids: tuple[int, ...] | None = None  # choose among these only
    bad_words: tuple[str, ...] = ()  # never generated
    seed: int | None = None  # None draws differently every time
    stop: tuple[str, ...] = ()  # end before the first of these strings; a string or a list
    stop_token_ids: tuple[int, ...] = ()  # end at the first of these tokens
    ignore_eos: bool = False  # go on past the tokens that end a message
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # report the chosen token's and so many of the likeliest
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    skip_special_tokens: bool = True  # leave them out of the text
    detokenize: bool = True  # make text at all

    def __post_init__(self):
        checked: dict[str, Any] = {
            "n": _integer("n", self.n, low=1, high=MAX_N),
            "max_tokens": _integer("max_tokens", self.max_tokens, low=1, high=LARGEST),
            "min_tokens": _integer("min_tokens", self.min_tokens, low=0, high=LARGEST),
            "temperature": _real("temperature", self.temperature, low=0.0),
            "top_p": _positive("top_p", self.top_p, high=1.0),
            "top_k": max(0, _integer("top_k", self.top_k, low=-1, high=LARGEST)),
            "min_p": _real("min_p", self.min_p, low=0.0, high=1.0),
            "repetition_penalty": _positive(
                "repetition_penalty", self.repetition_penalty, high=2.0
            ),
            "presence_penalty": _real(
                "presence_penalty", self.presence_penalty, low=-2.0, high=2.0
            ),
            "frequency_penalty": _real(
                "frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0
            ),
            "logit_bias": _logit_bias(self.logit_bias),
            "allowed_token_ids": _allowed_token_ids(self.allowed_token_ids),
            "bad_words": _strings("bad_words", self.bad_words, MAX_BAD_WORDS),
            "seed": None
            if self.seed is None
            else _integer("seed", self.seed, low=-(2**63), high=2**63 - 1),
            "stop": _strings(
                "stop", (self.stop,) if isinstance(self.stop, str) else self.stop, MAX_STOP_STRINGS
            ),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            "logprobs": _count_or_none("logprobs", self.logprobs),
            "prompt_logprobs": _count_or_none("prompt_logprobs", self.prompt_logprobs),
        }
        for name in _SWITCHES:
            checked[name] = _boolean(name, getattr(self, name))
        if checked["min_tokens"] > checked["max_tokens"]:
            raise RequestError(
                f"min_tokens is {checked['min_tokens']}, more than max_tokens, "
                f"{checked['max_tokens']}",
                field="min_tokens",
            )
        if checked["stop"] and not checked["detokenize"]:
            raise RequestError("stop strings need the text: leave detokenize true", field="stop")
        if checked["temperature"] < GREEDY_TEMPERATURE:
            checked["temperature"] = 0.0
        for field in fields(self):
            object.__setattr__(self, field.name, checked[field.name])

    def for_output(self, index: int) -> "SamplingParams":
        """Parameters of the index-th of the n outputs: one output, with a seed of its own.

        The first keeps the seed, so that it is what n = 1 gives; the others' are hashes of it.
        """
        if not 0 <= index < self.n:
            raise IndexError(f"output {index} of {self.n}")
        seed = self.seed
        if seed is not None and index > 0:
            words = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
            seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), signed=True)
        return dataclasses.replace(self, n=1, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses ids that name no token, where that could not be passed over."""
        named = {
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for field, ids in named.items():
            if ids and max(ids) >= vocab_size:
                raise RequestError(
                    f"{field}: token ids must be in 0..{vocab_size - 1}, not {max(ids)}",
                    field=field,
                )

    @property
    def greedy(self) -> bool:
        """The most likely token is taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class RequestOptions:
    """What a request may say beside its prompt and sampling parameters."""

    priority: int = 0  # under the policy "priority": a lower value is served first
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    cache_checkpoints: tuple[int, ...] = ()  # prompt positions whose state is to be kept
    cache_pin_ttl_s: float | None = None  # how long to protect them from eviction
    cache_priority: int = 0  # cached items of lower priority are evicted first

    def __post_init__(self):
        object.__setattr__(
            self, "priority", _integer("priority", self.priority, low=-LARGEST, high=LARGEST)
        )


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


def _positive(field: str, value: Any, *, high: float) -> float:
    number = _real(field, value, low=0.0, high=high)
    if number == 0.0:
        raise RequestError(f"{field} must be greater than 0", field=field)
    return number


def _count_or_none(field: str, value: Any) -> int | None:
    """None and 0 differ: 0 still asks for the chosen token's (F072)."""
    return None if value is None else _integer(field, value, low=0, high=LARGEST)


def _strings(field: str, value: Any, most: int) -> tuple[str, ...]:
    strings = () if value is None else value
    # How many comes first: what is wrong with each of very many is slow to find.
    if isinstance(strings, list | tuple) and len(strings) > most:
        raise RequestError(
            f"{field} may have at most {most} strings, not {len(strings)}", field=field
        )
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        kind = "a string or a list of strings" if field == "stop" else "a list of strings"
        raise RequestError(f"{field} must be {kind}", field=field)
    if "" in strings:
        raise RequestError(f"{field} must not contain an empty string", field=field)
    if any(len(s) > MAX_STRING_CHARS for s in strings):
        raise RequestError(
            f"strings of {field} may have at most {MAX_STRING_CHARS} characters", field=field
        )
    return tuple(strings)


def _token_ids(field: str, value: Any, most: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{field} must be a list of token ids", field=field)
    try:
        ids = list(itertools.islice(value, most + 1))
    except TypeError:  # an array without an axis calls itself iterable
        raise RequestError(f"{field} must be a list of token ids", field=field) from None
    if len(ids) > most:
        raise RequestError(f"{field} may have at most {most} token ids", field=field)
    return tuple(_integer(field, token_id, low=0, high=LARGEST) for token_id in ids)


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _token_ids("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise RequestError("allowed_token_ids must not be empty", field="allowed_token_ids")
    return ids


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs in order of ids. Keys may be JSON's strings; pairs of other parameters pass too."""
    field = "logit_bias"
    pairs = () if value is None else tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise RequestError(f"{field} must map token ids to numbers", field=field)
    if len(pairs) > MAX_LOGIT_BIAS:
        raise RequestError(f"{field} may have at most {MAX_LOGIT_BIAS} token ids", field=field)
    bias: dict[int, float] = {}
    for key, number in pairs:
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
            key = int(key)
        token_id = _integer(field, key, low=0, high=LARGEST)
        if token_id in bias:
            raise RequestError(f"{field} names token {token_id} twice", field=field)
        bias[token_id] = _real(field, number, low=-100.0, high=100.0)
    return tuple(sorted(bias.items()))


def check_bad_word_ids(bad_word_ids: Sequence[Sequence[int]]) -> None:
    """Refuses bad words, each as token ids, that the device's tables have no room for."""
    if len(bad_word_ids) > MAX_BAD_WORD_IDS:
        raise RequestError(
            f"bad_words make {len(bad_word_ids)} sequences of tokens, more than {MAX_BAD_WORD_IDS}",
            field="bad_words",
        )
    longest = max(map(len, bad_word_ids), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"one of bad_words has {longest} tokens, more than {MAX_BAD_WORD_TOKENS}",
            field="bad_words",
        )


def show(value: Any) -> str:
    """A value for a message, cut to a length that fits one."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
