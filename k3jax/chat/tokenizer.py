"""The K3 tokenizer: byte-level BPE ranks and 256 reserved slots above them.

`load_tokenizer` reads `tiktoken.model`, `tokenizer_config.json` and, where it exists,
`generation_config.json`. Every id comes from these files; nothing here knows a vocabulary size.
"""

import base64
import binascii
import codecs
import functools
import importlib.resources
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tiktoken

from k3jax.errors import CheckpointError, RequestError

NUM_RESERVED = 256

# Control tokens without which no chat prompt can be written.
END_OF_MSG, OPEN, CLOSE, SEP = "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"
CHAT_TOKENS = (END_OF_MSG, OPEN, CLOSE, SEP)
MEDIA_BEGIN, MEDIA_CONTENT = "<|media_begin|>", "<|media_content|>"
MEDIA_PAD, MEDIA_END = "<|media_pad|>", "<|media_end|>"
EOS = "[EOS]"

# The pieces that are merged separately, tried in this order at every position.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Cuts of long text: part of the definition of the ids, and what bounds the time of one merge.
MAX_RUN_CHARS = 400_000
MAX_SAME_CLASS_CHARS = 25_000
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_SAME_CLASS = re.compile(r"\s+|\S+")  # for str patterns \s is exactly str.isspace


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Reads the tokenizer files of a checkpoint folder; a damaged file is a `CheckpointError`."""
    folder = Path(path)
    ranks = _read_ranks(folder / "tiktoken.model")
    config_file = folder / "tokenizer_config.json"
    config = _read_json_object(config_file)
    slot_names, visible = _slot_names(config, len(ranks), config_file)
    special_ids = {name: slot for slot, name in slot_names.items()}

    vocab_size = len(ranks) + NUM_RESERVED
    stop_ids = {special_ids[name] for name in (END_OF_MSG, EOS) if name in special_ids}
    eos_token = config.get("eos_token")
    if isinstance(eos_token, dict):  # a name with flags
        eos_token = eos_token.get("content")
    if isinstance(eos_token, str) and eos_token in special_ids:
        stop_ids.add(special_ids[eos_token])
    generation_file = folder / "generation_config.json"
    if generation_file.exists():
        stop_ids |= _eos_ids(_read_json_object(generation_file), vocab_size, generation_file)

    return Tokenizer(
        n_base=len(ranks),
        vocab_size=vocab_size,
        special_ids=special_ids,
        hidden_ids=frozenset(slot_names) - visible,
        stop_token_ids=frozenset(stop_ids),
        longest_token=max(map(len, ranks)),
        _encoding=tiktoken.Encoding(
            name=folder.name,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens=special_ids,
        ),
    )


@functools.cache
def shipped_tokenizer() -> "Tokenizer":
    """The small tokenizer that comes with the package (768 ranks, K3's slots)."""
    with importlib.resources.as_file(_ASSETS) as folder:
        return load_tokenizer(folder)


_ASSETS = importlib.resources.files("k3jax") / "assets" / "tiny-tokenizer"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back. Immutable, and safe to share between threads."""

    n_base: int  # number of BPE ranks; the reserved slots follow
    vocab_size: int  # n_base + 256
    special_ids: dict[str, int]  # name of each reserved slot -> id
    hidden_ids: frozenset[int]  # slots that `skip_special_tokens` leaves out of text
    stop_token_ids: frozenset[int]  # ids that end a generation and are never shown
    longest_token: int  # bytes of the longest ordinary token
    _encoding: tiktoken.Encoding = field(repr=False)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`. Without `special` nothing in it can become a control token.

        With `special` the names of the reserved slots map to their ids: for text that we wrote
        ourselves, never for that of a client.
        """
        if not special:
            return self._encode_ordinary(text)
        ids: list[int] = []
        for index, part in enumerate(self._special_pattern.split(text)):
            if index % 2:
                ids.append(self.special_ids[part])
            elif part:
                ids.extend(self._encode_ordinary(part))
        return ids

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text` as ordinary text, without encoding it."""
        return -(-len(text) // self.longest_token)  # a character has at least one byte

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; for a reserved slot those of its name."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside of 0..{self.vocab_size - 1}")
        return self._encoding.decode_single_token_bytes(token_id)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of all ids at once, equal to what the incremental detokeniser gives."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.finish()

    @property
    def missing_chat_tokens(self) -> tuple[str, ...]:
        """Control tokens of the chat format that this vocabulary does not name."""
        return tuple(name for name in CHAT_TOKENS if name not in self.special_ids)

    def require_chat(self) -> None:
        """Refuses a vocabulary that cannot express chat prompts, naming what it lacks."""
        if missing := self.missing_chat_tokens:
            raise RequestError(
                "this model's tokenizer does not name the control tokens of the K3 chat format "
                f"({', '.join(missing)}): use text or token-id completions",
                field="messages",
            )

    def _encode_ordinary(self, text: str) -> list[int]:
        if len(text) <= MAX_SAME_CLASS_CHARS:
            return self._encoding.encode_ordinary(text)
        pieces = map(self._encoding.encode_ordinary, split_long_text(text))
        return list(itertools.chain.from_iterable(pieces))

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        names = sorted(self.special_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})")


class Detokenizer:
    """Turns ids into text as they come.

    An incomplete UTF-8 sequence is held back. U+FFFD stands only for bytes that can no longer
    become valid: because of the byte that follows, of a control token, or of `finish`. The text
    does not depend on how the ids are divided into calls.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these ids make certain."""
        tokenizer = self._tokenizer
        parts = []
        for token_id in token_ids:
            if 0 <= token_id < tokenizer.n_base:
                parts.append(self._decoder.decode(tokenizer.token_bytes(token_id)))
                continue
            parts.append(self.finish())  # no character spans a control token
            if not 0 <= token_id < tokenizer.vocab_size:
                parts.append("\N{REPLACEMENT CHARACTER}")
            elif token_id not in self._hidden:
                parts.append(tokenizer.token_bytes(token_id).decode())
        return "".join(parts)

    def finish(self) -> str:
        """Ends the text: U+FFFD if bytes were still held back."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def split_long_text(text: str) -> Iterator[str]:
    """Cuts into runs of 400,000 characters, and inside a run before every 25,001st character of
    a stretch that is all white space or all not."""
    for start in range(0, len(text), MAX_RUN_CHARS):
        run = text[start : start + MAX_RUN_CHARS]
        begin = 0
        for stretch in _SAME_CLASS.finditer(run):
            for cut in range(
                stretch.start() + MAX_SAME_CLASS_CHARS, stretch.end(), MAX_SAME_CLASS_CHARS
            ):
                yield run[begin:cut]
                begin = cut
        yield run[begin:]


def _read_ranks(file: Path) -> dict[bytes, int]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"cannot read the BPE ranks: {error.strerror}", file=file) from None
    ranks: dict[bytes, int] = {}
    first_line: dict[int, int] = {}  # rank -> line that gave it
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            encoded, rank_text = line.split(b" ")
            token = base64.b64decode(encoded, validate=True)
            rank = int(rank_text)
        except (ValueError, binascii.Error):
            shown = line[:60].decode("latin-1")
            raise CheckpointError(
                f"line {number}: expected 'base64 rank', got {shown!r}", file=file
            ) from None
        if not token:
            raise CheckpointError(f"line {number}: the token is empty", file=file)
        if token in ranks:
            raise CheckpointError(
                f"line {number}: this token already has rank {ranks[token]}", file=file
            )
        if rank in first_line:
            raise CheckpointError(
                f"line {number}: rank {rank} was given on line {first_line[rank]}", file=file
            )
        ranks[token] = rank
        first_line[rank] = number
    for rank, number in first_line.items():
        if not 0 <= rank < len(ranks):
            raise CheckpointError(
                f"line {number}: rank {rank} is outside of 0..{len(ranks) - 1}, "
                "so some rank before it is missing",
                file=file,
            )
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of the 256 single bytes have no rank, the first is "
            f"0x{absent[0]:02x} ({len(lines)} lines read)",
            file=file,
        )
    return ranks


def _read_json_object(file: Path) -> dict:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read: {error.strerror}", file=file) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"line {error.lineno}: not valid JSON, {error.msg}", file=file
        ) from None
    except (ValueError, RecursionError):
        raise CheckpointError("line 1: not valid UTF-8 JSON", file=file) from None
    if not isinstance(content, dict):
        raise CheckpointError("line 1: expected a JSON object", file=file)
    return content


def _slot_names(config: dict, n_base: int, file: Path) -> tuple[dict[int, str], frozenset[int]]:
    """Name of every reserved slot, and the slots that the file marks `"special": false`."""
    named = config.get("added_tokens_decoder") or {}
    if not isinstance(named, dict):
        raise CheckpointError("added_tokens_decoder must be an object", file=file)
    slots = range(n_base, n_base + NUM_RESERVED)
    names = {slot: f"<|reserved_token_{slot}|>" for slot in slots}
    visible = set()
    owner: dict[str, int] = {}
    for key, entry in named.items():
        slot = int(key) if key.isascii() and key.isdigit() else -1
        if slot not in slots:
            raise CheckpointError(
                f"added_tokens_decoder names id {key}, but tiktoken.model has {n_base} ranks and "
                f"so the reserved slots are {slots.start}..{slots.stop - 1}",
                file=file,
            )
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise CheckpointError(f"added_tokens_decoder[{key}] has no content", file=file)
        if content in owner:
            raise CheckpointError(
                f"added_tokens_decoder gives {content!r} to ids {owner[content]} and {slot}",
                file=file,
            )
        owner[content] = slot
        names[slot] = content
        if entry.get("special") is False:
            visible.add(slot)
    if len(set(names.values())) != NUM_RESERVED:
        raise CheckpointError(
            "added_tokens_decoder uses the name of another, unnamed slot", file=file
        )
    return names, frozenset(visible)


def _eos_ids(config: dict, vocab_size: int, file: Path) -> set[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise CheckpointError(
                f"eos_token_id {token_id!r} is not an id in 0..{vocab_size - 1}", file=file
            )
    return set(ids)
