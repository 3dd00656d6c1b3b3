"""Writes a small checkpoint with seeded random weights (untrained: its output means nothing)."""

from dataclasses import dataclass
from typing import Literal

from k3jax.checkpoint.tiny import make_tiny
from k3jax.errors import ConfigError
from k3jax.flags import parse_flags, run_script


@dataclass
class Flags:
    """Writes an untrained checkpoint of a small preset in the published layout."""

    target: str  # folder to write
    preset: Literal["tiny", "tiny-8"] = "tiny"  # sizes of the model
    seed: int = 0  # of the weights


def main() -> None:
    flags = parse_flags(Flags, positional="target")
    if flags.seed < 0:
        raise ConfigError(f"--seed {flags.seed} must not be negative")
    make_tiny(flags.target, preset=flags.preset, seed=flags.seed)
    print(f"wrote {flags.target}")


if __name__ == "__main__":
    run_script(main)
