"""The real tokenizer, for tests that can use it."""

import os
from pathlib import Path

import pytest

from k3jax.chat.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def kimi_tokenizer() -> Tokenizer:
    """The published ranks, where a copy of them is at hand: they are not part of the repository."""
    folder = Path(
        os.environ.get("K3JAX_KIMI_TOKENIZER") or ROOT.parent / "shared/golden/chat/kimi_tokenizer"
    )
    if not (folder / "tiktoken.model").exists():
        pytest.skip("set K3JAX_KIMI_TOKENIZER to a folder with the published tiktoken.model")
    return load_tokenizer(folder)
