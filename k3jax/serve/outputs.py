"""What a generation adds to a response: from token ids to text or message, and where it ends."""

from collections.abc import Iterable
from dataclasses import dataclass

from k3jax.chat.parse import Delta, Message, StreamParser
from k3jax.chat.stops import StopMatcher
from k3jax.chat.tokenizer import Detokenizer, Tokenizer
from k3jax.engine.request import SamplingParams


@dataclass
class Step:
    """One advance of one output."""

    index: int  # of the output in its request
    is_first: bool
    token_ids: list[int]
    delta: Delta  # text of a completion is its content
    finish_reason: str | None
    stop_reason: int | str | None  # the stop string or id of the request that ended it


class TextReader:
    """Text of a completion; without a tokenizer it stays empty."""

    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, *, skip_special: bool):
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=skip_special) if tokenizer else None
        )
        self._stops = StopMatcher(params.stop)
        self._text: list[str] = []

    def feed(self, token_ids: Iterable[int]) -> Delta:
        """Reads ids."""
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
        shown = self._stops.feed(text)
        self._text.append(shown)
        return Delta(content=shown)


class Output:
    """One generation of a request. It reads one id at a time, so that where it ends does not
    depend on how many ids the model gives at once."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        reader: TextReader | StreamParser,
        index: int = 0,
    ):
        self.index = index
        self.prompt_ids = prompt_ids
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._reader = reader

    def feed(self, token_ids: Iterable[int]) -> Step:
        """Takes what the model generated; ids behind the end are left out."""
        first = len(self.token_ids)
        delta = Delta()
        for token_id in token_ids:
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                in_request = token_id in self.params.stop_token_ids
                self._finish(delta, "stop", token_id if in_request else None)
                break
            _extend(delta, self._reader.feed((token_id,)))
            if self._reader.stopped_by is not None:
                self._finish(delta, "stop", self._reader.stopped_by)
                break
            if len(self.token_ids) == self.params.max_tokens:
                self._finish(delta, "length", None)
                break
        return self._step(first, delta)

    def finish(self) -> Step:
        """Ends an output that the model gave no more ids for."""
        delta = Delta()
        self._finish(delta, "length", None)
        return self._step(len(self.token_ids), delta)

    @property
    def text(self) -> str:
        """The text of a completion."""
        return self._reader.message().content or ""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thinking, known once it is over."""
        return self._reader.reasoning_tokens

    def message(self) -> Message:
        """The message of a chat."""
        return self._reader.message(self.finish_reason or "stop")

    def _finish(self, delta: Delta, reason: str, stop_reason: int | str | None) -> None:
        _extend(delta, self._reader.finish())
        self.finish_reason = self._reader.message(reason).finish_reason
        self.stop_reason = stop_reason

    def _step(self, first: int, delta: Delta) -> Step:
        return Step(
            self.index,
            first == 0,
            self.token_ids[first:],
            delta,
            self.finish_reason,
            self.stop_reason,
        )


def _extend(delta: Delta, more: Delta) -> None:
    delta.reasoning_content += more.reasoning_content
    delta.content += more.content
    delta.tool_calls += more.tool_calls
