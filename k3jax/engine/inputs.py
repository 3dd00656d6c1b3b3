"""From what a caller writes to what an engine takes: prompts as ids, outputs with their readers.

Imports no jax.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3jax.chat.parse import StreamParser
from k3jax.chat.render import Rendered
from k3jax.chat.tokenizer import Tokenizer, load_tokenizer
from k3jax.engine.output import Output, Reader, TextReader
from k3jax.engine.request import MAX_BAD_WORD_TOKENS, SamplingParams, show
from k3jax.errors import CheckpointError, RequestError


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json says."""

    sampling: dict[str, Any] = field(default_factory=dict)  # for fields that a request leaves out
    eos_ids: frozenset[int] = frozenset()

    @staticmethod
    def read(folder: str | Path) -> "GenerationDefaults":
        """Reads the file of a checkpoint folder, where there is one."""
        file = Path(folder) / "generation_config.json"
        if not file.exists():
            return GenerationDefaults()
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            sampling = {name: content[name] for name in names if content.get(name) is not None}
            eos = content.get("eos_token_id")
            checks = {**sampling, "stop_token_ids": [eos] if isinstance(eos, int) else eos}
            checked = SamplingParams(**checks)
        except (ValueError, AttributeError, RecursionError):
            raise CheckpointError("not a JSON object", file=file) from None
        except RequestError as error:
            message = str(error).replace("stop_token_ids", "eos_token_id")
            raise CheckpointError(message, file=file) from None
        return GenerationDefaults(sampling, frozenset(checked.stop_token_ids))


@dataclass(frozen=True)
class Inputs:
    """Makes the outputs of requests for one model. Any thread may use it."""

    tokenizer: Tokenizer | None  # None: prompts are token ids, and outputs have no text
    defaults: GenerationDefaults
    vocab_size: int
    max_model_len: int

    @staticmethod
    def of_folder(
        folder: str | Path,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
    ) -> "Inputs":
        """With generation_config.json and, unless one is given, the tokenizer of a checkpoint
        folder."""
        folder = Path(folder)
        if tokenizer is None and (folder / "tiktoken.model").exists():
            tokenizer = load_tokenizer(folder)
        inputs = Inputs(tokenizer, GenerationDefaults.read(folder), vocab_size, max_model_len)
        inputs.check_vocabulary()
        return inputs

    def check_vocabulary(self) -> None:
        """Refuses a tokenizer that writes ids which the model does not have."""
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.vocab_size:
            raise CheckpointError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, the model only "
                f"{self.vocab_size}: they do not belong together",
                file="tiktoken.model",
            )

    # Prompts.

    def prompts(self, prompt: Any) -> list[list[int]]:
        """The prompts as ids: of one text, several, one list of ids, or several."""
        if isinstance(prompt, str) or (
            isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)
        ):
            return [self.prompt(prompt)]
        if not isinstance(prompt, list):
            raise RequestError("prompt must be text, token ids, or a list of these", field="prompt")
        if not prompt:
            raise RequestError("prompt is empty", field="prompt")
        return [self.prompt(item, f"prompt[{at}]") for at, item in enumerate(prompt)]

    def prompt(self, prompt: Any, name: str = "prompt") -> list[int]:
        """One prompt as ids; `name` is what messages call it."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise self.no_tokenizer("text", "prompt")
            if self.tokenizer.min_tokens(prompt) >= self.max_model_len:
                raise RequestError(
                    f"{name} fills the context of {self.max_model_len} tokens", field="prompt"
                )
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list):
            ids = prompt
            check_ids("prompt", ids, self.vocab_size)
        else:
            raise RequestError(f"{name} must be text or a list of token ids", field="prompt")
        if not ids:
            raise RequestError(f"{name} is empty", field="prompt")
        return ids

    # Parameters.

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Every token that ends an output."""
        stops = frozenset(params.stop_token_ids)
        if params.ignore_eos:
            return stops
        return stops | (
            self.defaults.eos_ids if self.tokenizer is None else self.tokenizer.stop_token_ids
        )

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the bad words, at the start of a text and inside it."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            if self.tokenizer is None:
                raise self.no_tokenizer("bad words", "bad_words")
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text))
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words: {show(word)} has {len(ids)} tokens; at most "
                        f"{MAX_BAD_WORD_TOKENS} are possible",
                        field="bad_words",
                    )
                found[ids] = None
        return tuple(found)

    # Outputs.

    def outputs(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Output]:
        """The n outputs of a completion."""
        if params.stop and self.tokenizer is None:
            raise self.no_tokenizer("stop strings", "stop")
        return self._outputs(prompt_ids, params, lambda one: TextReader(self.tokenizer, one))

    def chat_outputs(
        self, rendered: Rendered, params: SamplingParams, **parser: Any
    ) -> list[Output]:
        """The n outputs of a chat; `parser`: options of `StreamParser`."""

        def reader(one: SamplingParams) -> Reader:
            return StreamParser(
                self.tokenizer,
                channel=rendered.channel,
                stop=one.stop,
                min_tokens=one.min_tokens,
                **parser,
            )

        return self._outputs(rendered.token_ids, params, reader)

    def _outputs(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        reader: Callable[[SamplingParams], Reader],
    ) -> list[Output]:
        stops, bad_words = self.stop_ids(params), self.bad_word_ids(params)
        outputs = []
        for index in range(params.n):
            one = params.for_output(index)
            outputs.append(Output(prompt_ids, one, stops, reader(one), index, bad_words))
        return outputs

    def no_tokenizer(self, what: str, field: str) -> RequestError:
        """The refusal of what a checkpoint without tokenizer cannot do."""
        return RequestError(
            f"{what} cannot be served: the checkpoint has no tokenizer files (tiktoken.model, "
            "tokenizer_config.json). Send token ids to /v1/completions",
            field=field,
        )


def check_ids(field: str, token_ids: Sequence[Any], vocab_size: int) -> None:
    """Refuses what is not a token id of the model."""
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field}: {show(token_id)} is not a token id in 0..{vocab_size - 1}", field=field
            )
