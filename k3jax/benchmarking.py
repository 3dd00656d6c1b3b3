"""What every `scripts/bench_*.py` shares: medians with spread, a table, one line of JSON."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"


def timed(run: Callable[[], object], *, repeats: int, warmup: int = 1) -> dict[str, float]:
    """Seconds of `run`, which must wait for its own result: median, min and max after warm-up."""
    for _ in range(warmup):
        run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def report(name: str, rows: Sequence[Mapping[str, object]], *, save: bool = False) -> None:
    """Prints the rows as a table and, as the last line, one JSON object, which `save` keeps."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    machine = environment()
    record = {"benchmark": name, "rows": [dict(row) for row in rows], **machine}
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{name}-{machine['device'].lower().replace(' ', '-')}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


def environment() -> dict[str, str]:
    """Machine, versions, date and commit."""
    import jax

    device = jax.devices()[0]
    versions = {}
    for package in ("jax", "jaxlib", "flax", "numpy", "torch", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device.device_kind,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": ", ".join(f"{key} {value}" for key, value in versions.items()),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
    }


def _commit() -> str:
    try:
        git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class PeerModel:
    """transformers: `generate` with its cache, and one forward pass."""

    def __init__(self, path: str):
        import torch
        import transformers

        torch.set_num_threads(os.cpu_count() or 1)
        transformers.logging.set_verbosity_error()
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model.eval()

    def generate(self, ids: np.ndarray, new_tokens: int) -> np.ndarray:
        with self._torch.no_grad():
            out = self._model.generate(
                self._torch.as_tensor(ids),
                attention_mask=self._torch.ones(ids.shape, dtype=self._torch.int64),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                use_cache=True,
            )
        return out[:, ids.shape[1] :].numpy()

    def logits(self, ids: np.ndarray) -> np.ndarray:
        with self._torch.no_grad():
            return self._model(self._torch.as_tensor(ids)).logits.numpy()
