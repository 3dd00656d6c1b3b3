"""The small checkpoints of random weights."""

import json
import multiprocessing

import numpy as np
import pytest
from flax import nnx

from k3jax import K3Config, K3Model
from k3jax.chat.tokenizer import load_tokenizer
from k3jax.checkpoint import tiny
from k3jax.checkpoint.safetensors import open_checkpoint
from k3jax.checkpoint.tiny import ensure_tiny, is_untrained, make_tiny, random_model
from k3jax.distributed.mesh import make_mesh
from k3jax.errors import ConfigError
from tests.checkpoint.folders import assert_same_tensors, read_tensors
from tests.micro import MICRO


def weights(model: K3Model) -> dict[str, np.ndarray]:
    """Parameters by dotted name."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in state}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_tiny(folder)
    return folder


def test_checkpoint_that_loads(made):
    model = K3Model.from_pretrained(made)
    assert model.config == K3Config.preset("tiny").replace(vision_config=None)
    assert is_untrained(made) and not is_untrained(made.parent)
    with open_checkpoint(made) as checkpoint:
        assert checkpoint.total_bytes < 8_000_000  # small enough to make on every machine


def test_tokenizer_fits(made):
    tokenizer = load_tokenizer(made)
    assert tokenizer.vocab_size <= K3Config.from_pretrained(made).vocab_size
    assert tokenizer.decode(tokenizer.encode("Two and two")) == "Two and two"
    eos = json.loads((made / "generation_config.json").read_text())["eos_token_id"]
    stops = {eos} if isinstance(eos, int) else set(eos)
    assert stops <= set(range(tokenizer.vocab_size))


def test_same_seed_same_bytes(made, tmp_path):
    make_tiny(tmp_path / "again")
    assert_same_tensors(read_tensors(tmp_path / "again"), read_tensors(made))
    make_tiny(tmp_path / "other", seed=1)
    other, first = read_tensors(tmp_path / "other"), read_tensors(made)
    name = "language_model.lm_head.weight"
    assert (other[name] != first[name]).mean() > 0.99


def test_unknown_preset_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="unknown preset"):
        make_tiny(tmp_path / "checkpoint", preset="huge")
    assert not list(tmp_path.iterdir())


def test_random_weights_show_in_the_output():
    """Nothing is left at a value that would hide a fault."""
    found = weights(random_model(MICRO))
    for name, value in found.items():
        if not name.endswith("_scale"):
            assert len(np.unique(value)) > 1, name
    bias = found["layers.1.block_sparse_moe.gate.e_score_correction_bias"]
    rate = np.exp(found["layers.0.self_attn.A_log"])
    assert bias.std() > 0.03 and (rate >= 1).all() and (rate <= 16).all()
    assert np.abs(found["output_attn_res.proj"]).max() > 0.1


def test_random_model_takes_dtype_and_mesh():
    model = random_model(MICRO, dtype="bfloat16", mesh=make_mesh(tp=2))
    assert model.dtype.name == "bfloat16" and model.mesh.shape["tp"] == 2
    whole = weights(random_model(MICRO, dtype="bfloat16"))
    assert_same_tensors(weights(model), whole)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the user, where a micro model takes the place of the tiny one."""
    monkeypatch.setenv("K3JAX_CACHE_DIR", str(tmp_path / "cache"))

    def make(path, **_):
        random_model(MICRO).save_pretrained(path)
        (path / tiny.UNTRAINED).write_text("")

    monkeypatch.setattr(tiny, "make_tiny", make)
    return tmp_path / "cache"


def test_default_checkpoint_is_made_once(cache):
    folder = ensure_tiny()
    assert folder.parent == cache and is_untrained(folder)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_tiny() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_half_a_checkpoint_is_replaced(cache):
    folder = ensure_tiny()
    (folder / tiny.UNTRAINED).unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    assert ensure_tiny() == folder
    K3Model.from_pretrained(folder)


def _ensure(queue):
    """Body of a process that wants the default checkpoint."""
    queue.put(str(ensure_tiny()))


def test_two_processes_at_once(cache):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_ensure, args=(queue,)) for _ in range(2)]
    for process in processes:
        process.start()
    places = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(places) == 1
    K3Model.from_pretrained(places.pop())
