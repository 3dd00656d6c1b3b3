"""Where each parameter lies in the published layout: tensor names, stored shapes, and both ways.

Paths of parameters mirror tensor names, so most of this is the identity; the few exceptions are
classes of their own. A `Source` reads any rectangular part of its parameter, so that a device's
shard is filled from that shard's bytes.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from k3jax.checkpoint.mxfp4 import check_scales
from k3jax.checkpoint.safetensors import (
    NUMPY_DTYPES,
    SafetensorsFolder,
    TensorSource,
    dtype_name,
)
from k3jax.config import K3Config
from k3jax.errors import CheckpointError

# Tensors of parts that the text model does not have.
VISION = re.compile(r"(vision_tower|mm_projector)\.")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    """One stored tensor, the parameter's own values up to a reshape."""

    name: str
    shape: tuple[int, ...]  # of the parameter
    stored_shape: tuple[int, ...]

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that hold this parameter."""
        return {self.name: self.stored_shape}

    def check(self, folder: SafetensorsFolder) -> None:
        """Refuses an absent tensor or one of another shape."""
        for name, shape in self.stored.items():
            if name not in folder:
                raise CheckpointError("tensor is missing", file=folder.folder, tensor=name)
            info = folder.info(name)
            if info.shape != shape:
                raise CheckpointError(
                    f"shape {list(info.shape)} where config.json implies {list(shape)}",
                    file=info.file,
                    tensor=name,
                )

    def read(self, folder: SafetensorsFolder, index: Index, dtype) -> np.ndarray:
        """The part of the parameter that `index` selects, in `dtype`."""
        if self.shape == self.stored_shape:
            return _checked(folder, self.name, folder.read(self.name, index), dtype)
        whole = _checked(folder, self.name, folder.read(self.name), dtype)
        return whole.reshape(self.shape)[index]

    def write(self, value: Callable[[], np.ndarray], dtype) -> Iterator[TensorSource]:
        """What to store, from a function that gives the whole parameter."""
        yield TensorSource(
            self.name,
            dtype_name(dtype),
            self.stored_shape,
            lambda: value().reshape(self.stored_shape),
        )


@dataclass(frozen=True)
class DecayRate(Source):
    """A_log: K3 pads it with zeros to a multiple of 128, Kimi-Linear stores [1, 1, H, 1]."""

    def check(self, folder: SafetensorsFolder) -> None:
        if self.name not in folder:
            raise CheckpointError("tensor is missing", file=folder.folder, tensor=self.name)
        info, heads = folder.info(self.name), self.shape[0]
        flat = len(info.shape) == 1 and info.shape[0] >= heads
        if not flat and info.shape != (1, 1, heads, 1):
            raise CheckpointError(
                f"shape {list(info.shape)}; expected [n] with n >= {heads} or [1, 1, {heads}, 1]",
                file=info.file,
                tensor=self.name,
            )

    def read(self, folder: SafetensorsFolder, index: Index, dtype) -> np.ndarray:
        whole = _checked(folder, self.name, folder.read(self.name), dtype).reshape(-1)
        if np.any(whole[self.shape[0] :] != 0):
            raise CheckpointError(
                f"padding after the {self.shape[0]} heads is not zero",
                file=folder.info(self.name).file,
                tensor=self.name,
            )
        return whole[: self.shape[0]][index]

    def write(self, value: Callable[[], np.ndarray], dtype) -> Iterator[TensorSource]:
        def padded():
            out = np.zeros(math.prod(self.stored_shape), np.float32)
            out[: self.shape[0]] = value()
            return out.reshape(self.stored_shape)

        yield TensorSource(self.name, dtype_name(dtype), self.stored_shape, padded)


@dataclass(frozen=True)
class KVUp(Source):
    """k_up or v_up [H, d, R]: rows `first` to `first + d` of each head's part of kv_b_proj."""

    first: int

    def read(self, folder: SafetensorsFolder, index: Index, dtype) -> np.ndarray:
        heads, width, rank = self.shape
        per_head = self.stored_shape[0] // heads
        start, stop, _ = index[0].indices(heads)
        rows = folder.read(self.name, (slice(start * per_head, stop * per_head), slice(None)))
        rows = _checked(folder, self.name, rows, dtype).reshape(stop - start, per_head, rank)
        return rows[:, self.first : self.first + width][:, index[1], index[2]]

    def write(self, value: Callable[[], np.ndarray], dtype) -> Iterator[TensorSource]:
        """`value` gives k_up and v_up side by side, [H, d_k + d_v, R]; k_up writes for both."""
        if self.first == 0:
            yield from super().write(value, dtype)


@dataclass(frozen=True)
class StackedExperts(Source):
    """[E, 2, F, …] from w1 and w3 of every expert, or [E, Z, …] from w2. `name` has {e} and {w}."""

    @property
    def _parts(self) -> tuple[str, ...]:
        return ("w1", "w3") if len(self.shape) == 4 else ("w2",)

    @functools.cached_property
    def stored(self) -> dict[str, tuple[int, ...]]:
        return {
            self.name.format(e=e, w=w): self.shape[-2:]
            for e in range(self.shape[0])
            for w in self._parts
        }

    def read(self, folder: SafetensorsFolder, index: Index, dtype) -> np.ndarray:
        chosen = [range(size)[part] for size, part in zip(self.shape, index, strict=True)]
        out = np.empty([len(part) for part in chosen], dtype)
        rows = out.reshape(len(chosen[0]), -1, *out.shape[-2:])
        parts = [self._parts[i] for i in (chosen[1] if len(self.shape) == 4 else (0,))]
        for i, e in enumerate(chosen[0]):
            for j, w in enumerate(parts):
                name = self.name.format(e=e, w=w)
                if NUMPY_DTYPES[folder.info(name).dtype] == out.dtype:  # straight into its place
                    _checked(folder, name, folder.read(name, index[-2:], out=rows[i, j]), dtype)
                else:
                    rows[i, j] = _checked(folder, name, folder.read(name, index[-2:]), dtype)
        return out

    def write(self, value: Callable[[], np.ndarray], dtype) -> Iterator[TensorSource]:
        for e in range(self.shape[0]):
            for i, w in enumerate(self._parts):
                pick = (e, i) if len(self.shape) == 4 else (e,)
                part = functools.partial(_part_of, value, pick)
                yield TensorSource(
                    self.name.format(e=e, w=w), dtype_name(dtype), self.shape[-2:], part
                )


def _part_of(value: Callable[[], np.ndarray], pick: tuple[int, ...]) -> np.ndarray:
    return value()[pick]


def text_prefix(names) -> str:
    """What stands before `layers.` in this checkpoint, from the names themselves."""
    found = {
        name[: match.start(1) - len("layers.")]
        for name in names
        if (match := re.match(r"(?:language_model\.)?(?:model\.)?layers\.(\d+)\.", name))
    }
    if len(found) != 1:
        raise CheckpointError(
            f"cannot tell the text model's tensors: prefixes of `layers.` are {sorted(found)}; "
            "expected one of language_model.model., language_model., model."
        )
    return found.pop()


def top_prefix(names, prefix: str) -> str:
    """What stands before `embed_tokens`: vLLM's spelling shortens the names of layers alone."""
    longer = f"{prefix}model."
    return longer if f"{longer}embed_tokens.weight" in names else prefix


def published_prefix(config: K3Config) -> str:
    """The prefix that the writer uses."""
    return "model." if config.is_kimi_linear else "language_model.model."


def sources(
    config: K3Config, shapes: dict[tuple, tuple[int, ...]], prefix: str, top: str | None = None
):
    """path -> Source for every parameter; `shapes` are those of the parameters.

    `prefix` stands before `layers.`, `top` (the same where it is None) before the other names.
    """
    top = prefix if top is None else top
    return {
        path: _source(config, path, shape, prefix if path[0] == "layers" else top)
        for path, shape in shapes.items()
    }


def skipped(config: K3Config, name: str) -> bool:
    """Whether a tensor belongs to a part left out on purpose: vision, or next-token layers."""
    if VISION.match(name):
        return True
    match = _LAYER.match(name)
    extra = config.num_hidden_layers + config.num_nextn_predict_layers
    return match is not None and config.num_hidden_layers <= int(match.group(1)) < extra


def lm_head(prefix: str) -> str:
    """The head's tensor, which stands beside the model, not in it."""
    return ("language_model." if prefix.startswith("language_model.") else "") + "lm_head.weight"


def _source(config: K3Config, path: tuple, shape: tuple[int, ...], prefix: str) -> Source:
    if path[0] == "lm_head":
        return Source(lm_head(prefix), shape, shape)
    name = prefix + ".".join(str(part) for part in path)
    if match := re.fullmatch(r"(.*_res)\.(norm|proj)", name):
        stored = (1, *shape) if match.group(2) == "proj" else shape
        return Source(f"{match.group(1)}_{match.group(2)}.weight", shape, stored)
    if path[-1] == "A_log":
        heads = shape[0]
        stored = (1, 1, heads, 1) if config.is_kimi_linear else (-(-heads // 128) * 128,)
        return DecayRate(name, shape, stored)
    if path[-1] == "dt_bias":
        return Source(name, shape, (math.prod(shape),))
    if str(path[-2]).endswith("_conv1d"):
        return Source(name, shape, (shape[0] * shape[1], 1, shape[2]))
    if path[-1] in ("k_up", "v_up"):
        per_head = config.qk_nope_head_dim + config.v_head_dim
        first = 0 if path[-1] == "k_up" else config.qk_nope_head_dim
        stored = (shape[0] * per_head, shape[2])
        return KVUp(name.rsplit(".", 1)[0] + ".kv_b_proj.weight", shape, stored, first)
    if len(path) > 2 and path[-2] == "experts":
        kind = path[-1].rsplit("_", 1)[-1]
        suffix = f"weight_{kind}" if kind in ("packed", "scale") else "weight"
        template = name.rsplit(".", 1)[0] + ".{e}.{w}." + suffix
        return StackedExperts(template, shape, shape[-2:])
    return Source(name, shape, shape)


def _checked(folder: SafetensorsFolder, name: str, value: np.ndarray, dtype) -> np.ndarray:
    """The values in `dtype`, refused if they are not finite (or, for scales, not valid)."""
    file = folder.info(name).file
    if value.dtype == np.uint8:
        if name.endswith("_scale"):
            check_scales(value, file=file, tensor=name)
        return value
    with np.errstate(over="ignore"):  # seen on the next line
        value = value.astype(dtype, copy=False)
    if not _all_finite(value):
        raise CheckpointError(f"values are not all finite in {value.dtype}", file=file, tensor=name)
    return value


def _all_finite(value: np.ndarray) -> bool:
    """np.isfinite without an array of the same size, and quick for bfloat16."""
    flat = value.reshape(-1)
    for start in range(0, flat.size, 1 << 20):
        part = flat[start : start + (1 << 20)]
        if part.dtype == ml_dtypes.bfloat16:
            if np.any((part.view(np.uint16) & 0x7F80) == 0x7F80):
                return False
        elif not np.isfinite(part).all():
            return False
    return True
