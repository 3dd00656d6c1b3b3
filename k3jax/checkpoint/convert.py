"""Conversions between checkpoint forms, one tensor in flight where the form allows it."""

import functools
import json
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from k3jax.checkpoint.folder import ORBAX_STORE, copy_companions, saving
from k3jax.checkpoint.huggingface import check_huggingface
from k3jax.checkpoint.mxfp4 import quantize
from k3jax.checkpoint.safetensors import (
    SafetensorsFolder,
    TensorSource,
    write_checkpoint,
)
from k3jax.config import QuantizationConfig
from k3jax.errors import CheckpointError

_EXPERT = re.compile(r"(.*\.block_sparse_moe\.experts\.\d+\.w[123])\.weight")


def quantize_experts(source, target, *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Copies a folder in the published layout with its routed experts packed as MXFP4.

    Every other tensor keeps its bytes, vision included. The config names the quantisation.
    """
    source, target = pathlib.Path(source), pathlib.Path(target)
    config, folder = check_huggingface(source)
    with folder:
        if config.quantization_config is not None:
            raise CheckpointError("the routed experts are MXFP4 already", file=source)
        quantized = config.replace(quantization_config=QuantizationConfig()).to_dict()
        inner = quantized.get("text_config", quantized)["quantization_config"]
        raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
        raw.get("text_config", raw)["quantization_config"] = inner
        with saving(target, raw, [ORBAX_STORE]):
            write_checkpoint(target, _quantized_tensors(folder), max_shard_bytes=max_shard_bytes)
    copy_companions(source, target)


def _quantized_tensors(folder: SafetensorsFolder) -> Iterator[TensorSource]:
    @functools.lru_cache(maxsize=1)  # codes and scales of a tensor are written one after the other
    def packed(name: str) -> tuple[np.ndarray, np.ndarray]:
        weight = folder.read(name).astype(np.float32)
        return quantize(weight, file=folder.info(name).file, tensor=name)

    for name in folder.names:
        info = folder.info(name)
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield TensorSource(name, info.dtype, info.shape, functools.partial(folder.read, name))
            continue
        rows, columns = info.shape
        for i, (suffix, width) in enumerate((("packed", columns // 2), ("scale", columns // 32))):
            yield TensorSource(
                f"{match.group(1)}.weight_{suffix}",
                "U8",
                (rows, width),
                functools.partial(lambda name, i: packed(name)[i], name, i),
            )
