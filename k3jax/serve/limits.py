"""What one request may ask for, beside what `SamplingParams` limits."""

from collections.abc import Sized
from dataclasses import dataclass

from k3jax.errors import RequestError


@dataclass(frozen=True)
class Limits:
    """Beyond any of these a request is refused, before anything expensive is done for it."""

    body_bytes: int = 32 << 20
    messages: int = 10_000
    prompts: int = 128  # of one completions request
    outputs: int = 256  # prompts times n

    def check_count(self, field: str, value: Sized, limit: int) -> None:
        """Refuses a list with too many entries."""
        if len(value) > limit:
            raise RequestError(
                f"{field} has {len(value)} entries, more than the {limit} that are allowed",
                field=field,
            )

    def check_outputs(self, num_prompts: int, n: int) -> None:
        """Refuses too many answers."""
        if num_prompts * n > self.outputs:
            raise RequestError(
                f"n={n} answers to {num_prompts} prompts are more than the {self.outputs} that "
                "one request may have",
                field="n",
            )
