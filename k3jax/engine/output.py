"""What becomes of generated tokens: from ids to text or message, and where an output ends.

Imports no jax.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from k3jax.chat.parse import Delta, Message
from k3jax.chat.stops import StopMatcher
from k3jax.chat.tokenizer import Detokenizer, Tokenizer
from k3jax.engine.request import SamplingParams
from k3jax.engine.scheduler import TokenLogprobs

Version = int | str


class Reader(Protocol):
    """Reads the ids of one output as they come: a `TextReader`, or `chat.StreamParser`."""

    def feed(self, token_ids: Iterable[int]) -> Delta:
        """What these ids add."""

    def finish(self) -> Delta:
        """What was held back."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thinking, known once it is over."""

    def message(self, finish_reason: str = "stop") -> Message:
        """Everything that was read."""


class TextReader:
    """Text of a completion; without a tokenizer it stays empty."""

    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams):
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        self._stops = StopMatcher(params.stop)
        self._shows_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens  # before them stop strings do not count
        self._num_tokens = 0
        self._text: list[str] = []

    def feed(self, token_ids: Iterable[int]) -> Delta:
        """Reads ids."""
        token_ids = list(token_ids)
        self._num_tokens += len(token_ids)
        return self._add(self._detokenizer.feed(token_ids) if self._detokenizer else "")

    def finish(self) -> Delta:
        """Releases what was held back."""
        delta = self._add(self._detokenizer.finish() if self._detokenizer else "")
        rest = self._stops.finish()
        self._text.append(rest)
        return Delta(content=delta.content + rest)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched

    def message(self, finish_reason: str = "stop") -> Message:
        """The text as the content of a message."""
        return Message(None, "".join(self._text) or None, [], finish_reason, 0)

    def _add(self, text: str) -> Delta:
        shown = text
        if self._num_tokens > self._min_tokens:
            was_stopped = self._stops.matched is not None
            shown = self._stops.feed(text)
            if self._shows_stop and not was_stopped and self._stops.matched is not None:
                shown += self._stops.matched
        self._text.append(shown)
        return Delta(content=shown)


@dataclass
class OutputStep:
    """One advance of one output."""

    index: int  # of the output in its request
    is_first: bool
    token_ids: list[int]
    delta: Delta  # text of a completion is its content
    finish_reason: str | None
    stop_reason: int | str | None  # the stop string or id of the request that ended it
    logprobs: list[TokenLogprobs] | None = None  # of these tokens, if asked for


@dataclass(eq=False)
class Output:
    """One generation of a request. It reads one id at a time, so that where it ends does not
    depend on how many ids the model gives at once.

    finish_reason: "stop", "length", "tool_calls" (of a chat), "abort", "error"; None while it runs.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]  # those of `params` included
    reader: Reader
    index: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the bad words of `params` as token ids
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's second token on
    weight_versions: list[Version] = field(default_factory=list)  # of the weights, for each token
    num_cached_tokens: int | None = None  # prompt tokens that were not computed for this request
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self):
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        version: Version = 0,
    ) -> OutputStep:
        """Takes what the model generated; ids behind the end are left out."""
        first = len(self.token_ids)
        delta = Delta()
        for token_id in token_ids:
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                in_request = token_id in self.params.stop_token_ids
                self._finish(delta, "stop", token_id if in_request else None)
                break
            _extend(delta, self.reader.feed((token_id,)))
            if self.reader.stopped_by is not None:
                self._finish(delta, "stop", self.reader.stopped_by)
                break
            if len(self.token_ids) == self.params.max_tokens:
                self._finish(delta, "length", None)
                break
        count = len(self.token_ids) - first
        self.weight_versions += [version] * count
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += logprobs[:count]
        return self._step(first, delta)

    def end(self, reason: str, error: str | None = None) -> OutputStep:
        """Ends an output that gets no more ids: "abort", or "error" with its cause."""
        delta = Delta()
        _extend(delta, self.reader.finish())
        self.finish_reason, self.error = reason, error
        return self._step(len(self.token_ids), delta)

    @property
    def text(self) -> str:
        """The text of a completion."""
        return self.reader.message().content or ""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the output's tokens, where logprobs were asked for."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thinking, known once it is over."""
        return self.reader.reasoning_tokens

    def message(self) -> Message:
        """The message of a chat."""
        return self.reader.message(self.finish_reason or "stop")

    def _finish(self, delta: Delta, reason: str, stop_reason: int | str | None) -> None:
        _extend(delta, self.reader.finish())
        self.finish_reason = self.reader.message(reason).finish_reason
        self.stop_reason = stop_reason

    def _step(self, first: int, delta: Delta) -> OutputStep:
        return OutputStep(
            self.index,
            first == 0,
            self.token_ids[first:],
            delta,
            self.finish_reason,
            self.stop_reason,
            None if self.logprobs is None else self.logprobs[first:],
        )


def _extend(delta: Delta, more: Delta) -> None:
    delta.reasoning_content += more.reasoning_content
    delta.content += more.content
    delta.tool_calls += more.tool_calls
