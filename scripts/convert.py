"""Converts a checkpoint: published layout <-> Orbax, bfloat16 experts -> MXFP4, or another dtype.

python scripts/convert.py SOURCE --target FOLDER --to orbax
python scripts/convert.py SOURCE --target FOLDER --quantize mxfp4
"""

from dataclasses import dataclass
from typing import Literal

from k3jax.checkpoint import load_model
from k3jax.checkpoint.convert import quantize_experts
from k3jax.checkpoint.folder import copy_companions
from k3jax.checkpoint.huggingface import save_huggingface
from k3jax.checkpoint.orbax import save_orbax
from k3jax.errors import ConfigError
from k3jax.flags import parse_flags, run_script


@dataclass
class Flags:
    """Converts a checkpoint folder into a new one."""

    source: str  # folder to read, published layout or Orbax
    target: str  # folder to write
    to: Literal["safetensors", "orbax"] = "safetensors"  # form to write; the first is the
    # published layout
    quantize: Literal["mxfp4"] | None = None  # pack the routed experts (safetensors only)
    dtype: Literal["float32", "bfloat16"] | None = None  # of the other weights; as stored if absent


def main() -> None:
    flags = parse_flags(Flags, positional="source")
    if flags.quantize is None:
        save = save_orbax if flags.to == "orbax" else save_huggingface
        save(load_model(flags.source, dtype=flags.dtype), flags.target)
        copy_companions(flags.source, flags.target)
    elif flags.to == "safetensors" and flags.dtype is None:
        quantize_experts(flags.source, flags.target)
    else:
        raise ConfigError("--quantize copies all other tensors as they are: convert in two steps")
    print(f"wrote {flags.target}")


if __name__ == "__main__":
    run_script(main)
