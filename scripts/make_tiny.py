"""Writes a small checkpoint with seeded random weights (untrained: its output means nothing)."""

import sys
from dataclasses import dataclass

from k3jax.checkpoint.tiny import make_tiny
from k3jax.errors import K3Error
from k3jax.flags import parse_flags


@dataclass
class Flags:
    """Writes an untrained checkpoint of a small preset in the published layout."""

    target: str  # folder to write
    preset: str = "tiny"  # tiny or tiny-8
    seed: int = 0  # of the weights


def main() -> int:
    flags = parse_flags(Flags, positional="target")
    try:
        make_tiny(flags.target, preset=flags.preset, seed=flags.seed)
    except K3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {flags.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
