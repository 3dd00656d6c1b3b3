"""Orbax stores: restored bit by bit into any mesh, refused by name when they do not fit."""

import gc
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from k3jax import K3Config, K3Model
from k3jax.checkpoint import orbax
from k3jax.checkpoint.orbax import is_orbax, save_orbax
from k3jax.checkpoint.tiny import random_model
from k3jax.distributed.mesh import make_mesh
from k3jax.distributed.sharding import RULES
from k3jax.errors import CheckpointError, ConfigError
from tests.checkpoint.folders import assert_same_tensors, edit_config
from tests.micro import MICRO


def weights(model: K3Model) -> dict[str, np.ndarray]:
    """Parameters by dotted name."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in state}


@pytest.fixture(scope="module")
def model() -> K3Model:
    return random_model(MICRO)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    """MICRO as an Orbax folder. Not to be changed."""
    folder = tmp_path_factory.mktemp("orbax")
    save_orbax(model, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def test_round_trip(saved, model):
    assert is_orbax(saved) and not is_orbax(saved.parent)
    loaded = K3Model.from_pretrained(saved)
    assert loaded.config == model.config
    assert_same_tensors(weights(loaded), weights(model))
    assert {file.name for file in saved.iterdir()} == {"config.json", orbax.ORBAX_STORE}


def test_through_both_forms(golden, tmp_path):
    """Published layout -> Orbax -> published layout, packed experts and bfloat16 included."""
    first = K3Model.from_pretrained(golden / "k3_full_mxfp4")
    save_orbax(first, tmp_path / "orbax")
    second = K3Model.from_pretrained(str(tmp_path / "orbax"))
    assert second.dtype == jnp.bfloat16
    assert_same_tensors(weights(second), weights(first))
    second.save_pretrained(tmp_path / "published")
    third = K3Model.from_pretrained(tmp_path / "published")
    assert third.config == second.config
    assert_same_tensors(weights(third), weights(first))


@pytest.mark.parametrize("tp", [1, 2])
def test_restores_onto_a_mesh(saved, model, tp):
    mesh = make_mesh(tp=tp)
    loaded = K3Model.from_pretrained(saved, mesh=mesh)
    assert_same_tensors(weights(loaded), weights(model))
    for path, variable in nnx.to_flat_state(nnx.state(loaded, nnx.Param)):
        array = variable.get_value()
        assert array.sharding.mesh == mesh, path
        assert array.sharding.spec == RULES.spec(variable.get_metadata()["logical_axes"]), path
        assert len(array.addressable_shards) == tp


def test_saves_from_a_mesh(saved, model, tmp_path):
    save_orbax(K3Model.from_pretrained(saved, mesh=make_mesh(tp=2)), tmp_path)
    alone = K3Model.from_pretrained(tmp_path)
    assert_same_tensors(weights(alone), weights(model))
    for _, variable in nnx.to_flat_state(nnx.state(alone, nnx.Param)):
        assert variable.get_value().devices() == {jax.devices()[0]}


def test_dtype_override(saved, model):
    exact, narrow = weights(model), weights(K3Model.from_pretrained(saved, dtype="bfloat16"))
    for name, value in exact.items():
        always = name.endswith(
            ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
        )
        wanted = value.dtype if always or value.dtype == np.uint8 else jnp.bfloat16
        assert narrow[name].dtype == wanted, name
        np.testing.assert_array_equal(narrow[name], value.astype(wanted))
    with pytest.raises(ConfigError, match="float16"):
        K3Model.from_pretrained(saved, dtype="float16")


def test_mesh_that_does_not_divide(saved):
    with pytest.raises(ConfigError, match="tp=3 does not divide vocab_size"):
        K3Model.from_pretrained(saved, mesh=make_mesh(tp=3))


def refused(folder, *fragments, tensor=None):
    with pytest.raises(CheckpointError) as caught:
        K3Model.from_pretrained(folder)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    assert caught.value.file.startswith(str(folder))
    assert caught.value.tensor == tensor


def test_missing_weight(folder):
    def one_more_layer(config):
        config["num_hidden_layers"] = 3
        config["linear_attn_config"]["kda_layers"] = [1, 3]

    edit_config(folder, one_more_layer)
    refused(folder, "is missing", tensor="layers.2.block_sparse_moe.experts.down_packed")


def test_weight_of_no_part(folder):
    edit_config(folder, lambda c: c.update(latent_moe_use_norm=False))
    name = "layers.1.block_sparse_moe.routed_expert_norm.weight"
    refused(folder, "belongs to no part", tensor=name)


def test_wrong_shape(folder):
    edit_config(folder, lambda c: c.update(intermediate_size=64))
    refused(folder, "[40, 48]", "[40, 64]", tensor="layers.0.mlp.down_proj.weight")


def test_store_with_a_hole(saved, tmp_path):
    """A store from elsewhere that lacks a weight."""
    shutil.copy(saved / "config.json", tmp_path)
    held = {name: jnp.asarray(x) for name, x in weights(random_model(MICRO)).items()}
    del held["norm.weight"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / orbax.ORBAX_STORE, held)
    refused(tmp_path, "is missing", tensor="norm.weight")


def largest_file(folder: Path) -> Path:
    files = (file for file in (folder / orbax.ORBAX_STORE).rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


DAMAGE = {
    "truncated_data": lambda folder: largest_file(folder).write_bytes(
        largest_file(folder).read_bytes()[: largest_file(folder).stat().st_size // 2]
    ),
    "deleted_data": lambda folder: largest_file(folder).unlink(),
    "no_metadata": lambda folder: (folder / orbax.ORBAX_STORE / "_METADATA").unlink(),
    "broken_metadata": lambda folder: (folder / orbax.ORBAX_STORE / "_METADATA").write_text("{"),
    "empty_store": lambda folder: (
        shutil.rmtree(folder / orbax.ORBAX_STORE),
        (folder / orbax.ORBAX_STORE).mkdir(),
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_store(folder, damage):
    DAMAGE[damage](folder)
    refused(folder)
    gc.collect()  # Orbax leaves failed futures behind, which complain when they are collected


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json"):
        K3Model.from_pretrained(folder)


class FailingCheckpointer:
    """Stands in for Orbax's: fails when a few bytes are on disk."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def save(self, path, weights):
        path.mkdir()
        (path / "d").write_bytes(b"half")
        raise OSError(28, "No space left on device")


def test_failed_save_changes_nothing(folder, model, monkeypatch):
    before = (folder / "config.json").read_text()
    monkeypatch.setattr(orbax.ocp, "StandardCheckpointer", FailingCheckpointer)
    other = random_model(MICRO.replace(vocab_size=80))
    with pytest.raises(CheckpointError, match="No space left"):
        save_orbax(other, folder)
    monkeypatch.undo()
    assert (folder / "config.json").read_text() == before
    assert_same_tensors(weights(K3Model.from_pretrained(folder)), weights(model))
    save_orbax(other, folder)
    assert_same_tensors(weights(K3Model.from_pretrained(folder)), weights(other))
    assert {file.name for file in folder.iterdir()} == {"config.json", orbax.ORBAX_STORE}


def test_config_beside_the_store_is_the_published_one(saved):
    raw = json.loads((saved / "config.json").read_text())
    assert K3Config.from_dict(raw) == MICRO


def test_a_folder_holds_one_form(model, saved, tmp_path):
    with pytest.raises(CheckpointError, match="already holds orbax"):
        model.save_pretrained(saved)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="already holds model.safetensors"):
        save_orbax(model, tmp_path)
    assert_same_tensors(weights(K3Model.from_pretrained(tmp_path)), weights(model))


def test_values_are_checked_as_in_the_published_layout(tmp_path):
    model = random_model(MICRO)
    norm = model.norm.weight
    norm.set_value(norm.get_value().at[3].set(jnp.nan))
    save_orbax(model, tmp_path / "nan")
    with pytest.raises(CheckpointError, match="finite") as caught:
        K3Model.from_pretrained(tmp_path / "nan")
    assert caught.value.tensor == "norm.weight"

    model = random_model(MICRO)
    scale = model.layers[1].block_sparse_moe.experts.down_scale
    scale.set_value(scale.get_value().at[0, 0, 0].set(254))
    save_orbax(model, tmp_path / "scale")
    with pytest.raises(CheckpointError, match="scale") as caught:
        K3Model.from_pretrained(tmp_path / "scale")
    assert caught.value.tensor == "layers.1.block_sparse_moe.experts.down_scale"
