"""Decode and prefill on the CPU beside Hugging Face transformers, same checkpoint, same threads.

Regime: a toy Kimi-Linear checkpoint in float32, where per-operation overhead decides: the ceiling
is not arithmetic (a token costs about 0.5 MFLOP) but how many operations a step dispatches. Both
programs generate greedily from the same prompts, in one process, in turn; tokens are compared.
Decode is the time of all tokens less that of the first one, which holds the prefill and the call.
"""

import functools
import pathlib
from dataclasses import dataclass

import numpy as np

from k3jax.benchmarking import PeerModel, report, timed
from k3jax.errors import ConfigError
from k3jax.flags import parse_flags, run_script

DEFAULT = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "kimi_linear"


@dataclass
class Flags:
    """k3jax against transformers on one Kimi-Linear checkpoint."""

    model: str = str(DEFAULT)  # checkpoint folder, Kimi-Linear layout
    prompt_len: int = 16  # tokens before decoding starts
    new_tokens: int = 64  # tokens to decode
    prefill_len: int = 512  # tokens of the prefill measurement
    repeats: int = 5  # timed runs; the median counts
    peer: bool = True  # run transformers too (needs the bench extra)
    save: bool = False  # keep the result under benchmarks/results


def main() -> None:
    flags = parse_flags(Flags)
    if flags.repeats < 1:
        raise ConfigError(f"--repeats {flags.repeats} must be at least 1")
    ours, peer = OurModel(flags.model), PeerModel(flags.model) if flags.peer else None
    rng = np.random.default_rng(0)
    rows = []
    for batch in (1, 8):
        ids = rng.integers(3, ours.vocab_size, (batch, flags.prompt_len))
        decode = {"case": f"decode, batch {batch}", "tokens": batch * (flags.new_tokens - 1)}
        whole = functools.partial(generate, ids, flags.new_tokens)
        rows.append(compare(decode, flags, ours, peer, whole, functools.partial(generate, ids, 1)))
    ids = rng.integers(3, ours.vocab_size, (1, flags.prefill_len))
    prefill = {"case": f"prefill, T = {flags.prefill_len}", "tokens": flags.prefill_len}
    rows.append(compare(prefill, flags, ours, peer, lambda m: m.logits(ids)))
    report("cpu", rows, save=flags.save)


def generate(ids: np.ndarray, new_tokens: int, model) -> np.ndarray:
    return model.generate(ids, new_tokens)


def compare(row: dict, flags: Flags, ours, peer, run, less=None) -> dict:
    """One row: tokens/s of both by medians of `run` minus `less`, and whether results agree."""
    rates = {}
    for name, model in {"k3jax": ours, "peer": peer}.items():
        if model is None:
            continue
        times = timed(functools.partial(run, model), repeats=flags.repeats)
        seconds = times["median_s"]
        if less is not None:
            first = timed(functools.partial(less, model), repeats=flags.repeats)
            seconds -= first["median_s"]
        rates[name] = row["tokens"] / seconds
        row |= {f"{name}_tok_s": rates[name], f"{name}_spread": spread(times)}
    if peer is None:
        return row
    return row | {
        "ratio": rates["k3jax"] / rates["peer"],
        "agree": bool(agree(run(ours), run(peer))),
    }


def spread(times: dict[str, float]) -> str:
    """Fastest and slowest run as multiples of the median."""
    return f"{times['min_s'] / times['median_s']:.2f}-{times['max_s'] / times['median_s']:.2f}"


def agree(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal tokens, or logits within 1e-4 of their maximum."""
    if a.dtype.kind == "i":
        return np.array_equal(a, b)
    return np.abs(a - b).max() <= 1e-4 * np.abs(b).max()


class OurModel:
    """k3jax: one call of `generate` or of the model."""

    def __init__(self, path: str):
        import k3jax

        self._model = k3jax.K3Model.from_pretrained(path, dtype="float32")
        self._generate = k3jax.generate
        self.vocab_size = self._model.config.vocab_size

    def generate(self, ids: np.ndarray, new_tokens: int) -> np.ndarray:
        return self._generate(self._model, ids, max_new_tokens=new_tokens).token_ids

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(self._model(ids))


if __name__ == "__main__":
    run_script(main)
