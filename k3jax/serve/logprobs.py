"""Logprobs in the shapes of the endpoints."""

from collections.abc import Iterator, Sequence
from typing import Any

from k3jax.chat.tokenizer import Detokenizer, Tokenizer
from k3jax.engine.scheduler import TokenLogprobs

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say; as in vLLM


class TokenNames:
    """What answers call tokens."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes | None:
        """None where no tokenizer knows the id."""
        tokenizer = self._tokenizer
        if tokenizer is None or token_id >= tokenizer.vocab_size:
            return None
        return tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        """Its text; its bytes, where they are but a part of a character; else its id."""
        data = self.bytes_of(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """OpenAI's legacy shape: lists with an entry for each token. Fed with the tokens in order."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool):
        self._names = TokenNames(tokenizer)
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0  # characters of the text before the next token

    def feed(self, found: Sequence[TokenLogprobs]) -> dict[str, list]:
        """The entries of these tokens."""
        offsets = []
        for one in found:
            offsets.append(self._offset)
            if self._text is not None:
                self._offset += len(self._text.feed((one.token_id,)))
        return {
            "tokens": [self._names.name(one.token_id) for one in found],
            "token_logprobs": [_finite(one.logprob) for one in found],
            "top_logprobs": [
                {self._names.name(token_id): value for token_id, value, _ in _ranked(one)}
                for one in found
            ],
            "text_offset": offsets,
        }


def chat_logprobs(found: Sequence[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """The shape of chats; it tells of every token, reasoning and markers included."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = names.bytes_of(token_id)
        return {
            "token": names.name(token_id),
            "logprob": _finite(logprob),
            "bytes": None if data is None else list(data),
        }

    content = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(found: Sequence[TokenLogprobs], names: TokenNames) -> list[dict | None]:
    """vLLM's shape: for each token of a prompt but the first, by token id."""
    told: list[dict | None] = [None]
    for one in found:
        told.append(
            {
                str(token_id): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": names.name(token_id),
                }
                for token_id, value, rank in _ranked(one)
            }
        )
    return told


def _ranked(one: TokenLogprobs) -> Iterator[tuple[int, float, int]]:
    """Token id, logprob and rank: of the token itself, then of the likeliest others."""
    yield one.token_id, _finite(one.logprob), one.rank
    for rank, (token_id, logprob) in enumerate(one.top, start=1):
        if token_id != one.token_id:
            yield token_id, _finite(logprob), rank


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
