"""Checkpoints on disk: the published Hugging Face layout and Orbax."""

from k3jax.errors import CheckpointError


def load_model(path, *, dtype=None, mesh=None):
    """A `K3Model` from a Hugging Face or an Orbax folder; see `K3Model.from_pretrained`."""
    from k3jax.checkpoint import huggingface, orbax

    load = orbax.load_orbax if orbax.is_orbax(path) else huggingface.load_huggingface
    return load(path, dtype=dtype, mesh=mesh)


def save_model(model, path) -> None:
    """Writes a `K3Model` in the published layout; see `K3Model.save_pretrained`."""
    from k3jax.checkpoint.huggingface import save_huggingface

    save_huggingface(model, path)


__all__ = ["CheckpointError", "load_model", "save_model"]
