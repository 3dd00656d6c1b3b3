"""The scripts as programs: what they write, and how they refuse."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3jax import K3Model
from k3jax.checkpoint import names
from k3jax.checkpoint.safetensors import open_checkpoint
from k3jax.checkpoint.tiny import is_untrained, random_model
from tests.micro import MICRO

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments, code: int = 0) -> str:
    """Output of a script, or its error, which must be one line."""
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stdout or done.stderr


def test_make_tiny_and_convert(tmp_path):
    tiny, store, back = (tmp_path / name for name in ("tiny", "store", "back"))
    assert "wrote" in run("make_tiny.py", tiny, "--seed", 3)
    assert is_untrained(tiny)
    run("convert.py", tiny, "--target", store, "--to", "orbax")
    assert is_untrained(store) and (store / "tiktoken.model").exists()
    run("convert.py", store, "--target", back)
    with open_checkpoint(tiny) as first, open_checkpoint(back) as second:
        assert sorted(first.names) == sorted(second.names)
        for name in first.names:
            np.testing.assert_array_equal(first.read(name), second.read(name), name)
    assert "already holds orbax" in run("convert.py", tiny, "--target", store, code=1)


def test_convert_quantizes(tmp_path):
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    random_model(MICRO.replace(quantization_config=None)).save_pretrained(dense)
    (dense / "notes.bin").write_text("not of the checkpoint")
    run("convert.py", dense, "--target", packed, "--quantize", "mxfp4")
    model = K3Model.from_pretrained(packed)
    assert model.config.quantization_config is not None
    assert model.layers[1].block_sparse_moe.experts.gate_up_packed.get_value().dtype == np.uint8
    assert not (packed / "notes.bin").exists()
    with open_checkpoint(dense) as first, open_checkpoint(packed) as second:
        head = names.lm_head("language_model.model.")
        np.testing.assert_array_equal(first.read(head), second.read(head))


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("make_tiny.py", ["{new}", "--seed", "-1"], "--seed -1"),
        ("make_tiny.py", ["{new}", "--preset", "k3"], "--preset"),
        ("make_tiny.py", [], "target is required"),
        ("convert.py", ["{new}", "--target", "{new}2"], "no such checkpoint folder"),
        ("convert.py", ["{file}", "--target", "{new}"], "{file}"),
        ("bench_load.py", ["--folder", "{new}", "--child"], "no such checkpoint folder"),
        ("bench_cpu.py", ["--repeats", "0"], "--repeats 0"),
    ],
)
def test_refusals(script, arguments, said, tmp_path):
    (tmp_path / "file").write_text("{}")
    places = {"new": tmp_path / "new", "file": tmp_path / "file"}
    code = 2 if said in ("--preset", "target is required") else 1
    error = run(script, *(a.format(**places) for a in arguments), code=code)
    assert said.format(**places) in error
    assert not (tmp_path / "new").exists()
