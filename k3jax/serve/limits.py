"""What one request may ask for, checked before anything expensive is done for it."""

from collections.abc import Sized
from dataclasses import dataclass

from k3jax.errors import RequestError


@dataclass(frozen=True)
class Limits:
    """Beyond any of these a request is refused."""

    body_bytes: int = 32 << 20
    messages: int = 10_000
    prompts: int = 128  # of one completions request
    stop_strings: int = 64
    stop_chars: int = 1_024  # of one stop string
    stop_token_ids: int = 64

    def check_count(self, field: str, value: Sized, limit: int) -> None:
        """Refuses a list with too many entries."""
        if len(value) > limit:
            raise RequestError(
                f"{field} has {len(value)} entries, more than the {limit} that are allowed",
                field=field,
            )

    def check_stops(self, stop: str | list[str] | None, stop_token_ids: list[int] | None) -> None:
        """Refuses too many or too long stop strings, and too many stop ids."""
        stops = [stop] if isinstance(stop, str) else stop or []
        self.check_count("stop", stops, self.stop_strings)
        if any(len(text) > self.stop_chars for text in stops):
            raise RequestError(
                f"a stop string is longer than {self.stop_chars} characters", field="stop"
            )
        self.check_count("stop_token_ids", stop_token_ids or [], self.stop_token_ids)
