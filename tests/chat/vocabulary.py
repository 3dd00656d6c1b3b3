"""Tokenizer files of a small vocabulary."""

import base64
import json
from pathlib import Path

# The ranks of the single bytes: lines of tiktoken.model.
BYTES = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]


def write_tokenizer(folder: Path, *, ranks=None, names=None, config=None, generation=None) -> Path:
    """A byte-level vocabulary of 256 ranks with the given slot names."""
    (folder / "tiktoken.model").write_text("\n".join(ranks or BYTES))
    slots = {str(256 + slot): {"content": name} for slot, name in (names or {}).items()}
    content = {"added_tokens_decoder": slots} if config is None else config
    (folder / "tokenizer_config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
