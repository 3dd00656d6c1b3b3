"""The chat format of Kimi K3: tokenizer, prompt renderer, output parser. Imports no jax."""

from k3jax.chat.parse import Delta, Message, StreamParser, ToolCall, channel_of_prompt, parse
from k3jax.chat.render import Rendered, Segment, image_parts, render
from k3jax.chat.stops import StopMatcher
from k3jax.chat.tokenizer import Detokenizer, Tokenizer, load_tokenizer, shipped_tokenizer

__all__ = [
    "Delta",
    "Detokenizer",
    "Message",
    "Rendered",
    "Segment",
    "StopMatcher",
    "StreamParser",
    "ToolCall",
    "Tokenizer",
    "channel_of_prompt",
    "image_parts",
    "load_tokenizer",
    "parse",
    "render",
    "shipped_tokenizer",
]
