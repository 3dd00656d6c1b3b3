"""Peak memory and speed of loading a sharded checkpoint.

Regime: one process, one CPU device, MXFP4 experts and bfloat16 elsewhere, files in the page cache
or on disk as they happen to be. Ceiling: the model must be resident once, so the peak cannot be
below 1x its bytes; the limit that we hold is 1.3x with the interpreter included.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from k3jax.errors import CheckpointError
from k3jax.flags import parse_flags, run_script


@dataclass
class Flags:
    """Writes a checkpoint of about 2 GB, loads it in a fresh process, reports peak memory."""

    folder: str | None = None  # load this checkpoint instead of writing one
    child: bool = False  # used by the script itself: load and report
    save: bool = False  # keep the result under benchmarks/results


def main() -> None:
    flags = parse_flags(Flags)
    if flags.child:
        if flags.folder is None:
            raise CheckpointError("--child needs --folder")
        measure(flags.folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = flags.folder or scratch
        if flags.folder is None:
            write_big(scratch)
        command = [sys.executable, __file__, "--child", "--folder", folder]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            raise CheckpointError("the checkpoint did not load", file=folder)
    from k3jax.benchmarking import report

    report("load", [json.loads(result.stdout.splitlines()[-1])], save=flags.save)


def write_big(folder: str) -> None:
    """A valid checkpoint of 2 GB in several shards, written without ever holding it."""
    import dataclasses

    import ml_dtypes
    import numpy as np
    from flax import nnx

    from k3jax.checkpoint import names
    from k3jax.checkpoint.safetensors import write_checkpoint
    from k3jax.config import K3Config
    from k3jax.models.k3 import K3Model

    tiny = K3Config.preset("tiny")
    linear = dataclasses.replace(
        tiny.linear_attn_config,
        num_heads=8,
        head_dim=128,
        kda_layers=(1, 2, 3, 5),
        full_attn_layers=(4,),
    )
    config = tiny.replace(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=5,
        num_attention_heads=8,
        linear_attn_config=linear,
        num_experts=256,
        moe_intermediate_size=1024,
        routed_expert_hidden_size=1024,
        dtype="bfloat16",
        vision_config=None,
        media_placeholder_token_id=None,
    )
    rng = np.random.default_rng(0)

    def values(source):
        count = int(np.prod(source.shape))
        if source.name.endswith("weight_packed"):
            return np.frombuffer(rng.bytes(count), np.uint8).reshape(source.shape)
        if source.name.endswith("weight_scale"):
            return np.full(source.shape, 121, np.uint8)
        dtype = np.float32 if source.dtype == "F32" else ml_dtypes.bfloat16
        value = (0.02 * rng.standard_normal(count, np.float32)).reshape(source.shape).astype(dtype)
        if source.name.endswith("A_log"):
            value[linear.num_heads :] = 0
        return value

    _, state = nnx.split(K3Model(config))
    avals = {key: variable.get_value() for key, variable in nnx.to_flat_state(state)}
    plan = names.sources(
        config, {key: a.shape for key, a in avals.items()}, names.published_prefix(config)
    )
    tensors = [
        source._replace(make=lambda source=source: values(source))
        for key, parameter in plan.items()
        for source in parameter.write(lambda: None, avals[key].dtype)
    ]
    write_checkpoint(folder, tensors, max_shard_bytes=300_000_000)
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config.to_dict()))


def measure(folder: str) -> None:
    """Loads in this process and prints one JSON line."""
    import jax
    from flax import nnx

    from k3jax.models.k3 import K3Model

    jax.numpy.zeros(1).block_until_ready()
    before = peak_bytes()
    start = time.perf_counter()
    model = K3Model.from_pretrained(folder)
    seconds = time.perf_counter() - start
    resident = sum(v.get_value().nbytes for _, v in nnx.to_flat_state(nnx.state(model)))
    files = sum(f.stat().st_size for f in pathlib.Path(folder).glob("*.safetensors"))
    row = {
        "files_mb": files / 1e6,
        "model_mb": resident / 1e6,
        "peak_rss_mb": peak_bytes() / 1e6,
        "peak_over_model": peak_bytes() / resident,
        "interpreter_mb": before / 1e6,
        "seconds": seconds,
        "mb_per_s": files / 1e6 / seconds,
    }
    print(json.dumps(row))


def peak_bytes() -> int:
    """Highest resident size of this program so far. (getrusage would count the parent's, too.)"""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    run_script(main)
