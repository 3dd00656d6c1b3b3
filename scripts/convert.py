"""Converts a checkpoint: published layout <-> Orbax, bfloat16 experts -> MXFP4, or another dtype.

python scripts/convert.py SOURCE --target FOLDER --to orbax
python scripts/convert.py SOURCE --target FOLDER --quantize mxfp4
"""

import sys
from dataclasses import dataclass

from k3jax.checkpoint import load_model
from k3jax.checkpoint.convert import copy_companions, quantize_experts
from k3jax.checkpoint.huggingface import save_huggingface
from k3jax.checkpoint.orbax import save_orbax
from k3jax.errors import ConfigError, K3Error
from k3jax.flags import parse_flags


@dataclass
class Flags:
    """Converts a checkpoint folder into a new one."""

    source: str  # folder to read, published layout or Orbax
    target: str  # folder to write
    to: str = "safetensors"  # form to write: safetensors (the published layout) or orbax
    quantize: str | None = None  # mxfp4: pack the routed experts (safetensors to safetensors)
    dtype: str | None = None  # float32 or bfloat16 for the other weights; default: as stored


def convert(flags: Flags) -> None:
    """Does what the flags say."""
    if flags.to not in ("safetensors", "orbax"):
        raise ConfigError(f"--to {flags.to}: must be safetensors or orbax")
    if flags.quantize is None:
        save = save_orbax if flags.to == "orbax" else save_huggingface
        save(load_model(flags.source, dtype=flags.dtype), flags.target)
        copy_companions(flags.source, flags.target)
        return
    if flags.quantize != "mxfp4":
        raise ConfigError(f"--quantize {flags.quantize}: must be mxfp4")
    if flags.to != "safetensors" or flags.dtype is not None:
        raise ConfigError("--quantize copies all other tensors as they are: convert in two steps")
    quantize_experts(flags.source, flags.target)


def main() -> int:
    flags = parse_flags(Flags, positional="source")
    try:
        convert(flags)
    except K3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {flags.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
