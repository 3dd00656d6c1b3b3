"""Safetensors files in the published folder layout: a strict streaming reader and a writer.

A file is eight bytes (little endian) that count the bytes of a JSON header, the header (dtype,
shape and byte range of every tensor), then the tensors' bytes, row major and without gaps. A folder
holds either `model.safetensors` or several shards and `model.safetensors.index.json`, which maps
every tensor to its shard.

The reader checks all headers before it reads any tensor. It copies the wanted bytes into fresh
arrays and maps nothing: mapped pages count as resident, and a mapped file that is truncated kills
the process instead of raising. The writer needs memory for one tensor.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np
import numpy.typing as npt

from k3jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

NUMPY_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

FLOAT_DTYPES = ("BF16", "F16", "F32")
PACKED_SUFFIXES = (".weight_packed", ".weight_scale")

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's other readers
_ALIGNMENT = 64  # what XLA on a CPU wants in order to take an array over without a copy
_STAGING_BYTES = 4 << 20  # rows read at once where only some of their columns are wanted
_DIRECT_BYTES = 64 << 10  # from here on a run of bytes is worth a read of its own
_PARTIAL_SUFFIX = ".partial"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about one tensor; `dtype` is spelled as in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int  # of the first byte, from the start of the file
    nbytes: int


class TensorSource(NamedTuple):
    """A tensor to be written: `make` is called when its turn comes and its result dropped after."""

    name: str
    dtype: str
    shape: Sequence[int]
    make: Callable[[], npt.ArrayLike]


def dtype_name(dtype: npt.DTypeLike) -> str:
    """The spelling of a NumPy or ml_dtypes dtype in a header, e.g. "BF16"."""
    try:
        return _DTYPE_NAMES[np.dtype(dtype)]
    except KeyError:
        raise CheckpointError(f"safetensors files cannot hold {np.dtype(dtype)}") from None


def check_stored_dtype(info: TensorInfo) -> None:
    """Refuses a tensor whose stored dtype no parameter of a model may have.

    Packed codes and their scales are U8, everything else is BF16, F16 or F32.
    """
    if info.name.endswith(PACKED_SUFFIXES):
        allowed: tuple[str, ...] = ("U8",)
    else:
        allowed = FLOAT_DTYPES
    if info.dtype not in allowed:
        raise CheckpointError(
            f"stored as {info.dtype}, which is not supported: {' or '.join(allowed)} is expected",
            file=info.file,
            tensor=info.name,
        )


def open_checkpoint(folder: str | os.PathLike[str]) -> "SafetensorsFolder":
    """Opens the tensors of a checkpoint folder and checks every header; reads no tensor yet.

    With an index the index decides: exactly the files it names are opened, and it has to agree with
    them about every tensor. Without one `model.safetensors` is opened. Other safetensors files in
    the folder are reported by one warning and never merged.
    """
    folder = Path(folder)
    _check_folder(folder)
    weight_map = None
    file_names = [SINGLE_NAME]
    if os.path.lexists(folder / INDEX_NAME):
        weight_map = _read_index(folder / INDEX_NAME)
        file_names = sorted(set(weight_map.values()))
    _check_files(folder, file_names, weight_map)

    tensors: dict[str, TensorInfo] = {}
    descriptors: dict[Path, int] = {}
    try:
        for name in file_names:
            path = folder / name
            with _disk_errors("cannot be opened", path):
                descriptors[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            for info in _read_header(path, descriptors[path]):
                if info.name in tensors:
                    raise CheckpointError(
                        f"stands in two shards, also in {tensors[info.name].file.name}",
                        file=path,
                        tensor=info.name,
                    )
                tensors[info.name] = info
        if weight_map is not None:
            _check_against_index(folder, tensors, weight_map)
    except BaseException:
        _close(descriptors)
        raise
    return SafetensorsFolder(folder, tensors, descriptors)


class SafetensorsFolder:
    """The tensors of one checkpoint folder. Made by `open_checkpoint`; safe to use from threads.

    The files stay open until `close`, so that one replaced meanwhile is still read consistently.
    """

    def __init__(
        self, folder: Path, tensors: dict[str, TensorInfo], descriptors: dict[Path, int]
    ) -> None:
        self.folder = folder
        self._tensors = tensors
        self._descriptors = descriptors
        self._bytes_read = 0
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, descriptors)

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the order of the files: reading in this order reads each file forwards."""
        return tuple(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Size of all tensors as stored."""
        return sum(info.nbytes for info in self._tensors.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from files so far."""
        return self._bytes_read

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def info(self, name: str) -> TensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(
                "the checkpoint has no such tensor", file=self.folder, tensor=name
            ) from None

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        *,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Reads a tensor, or the part of it that `index` selects, in its stored dtype.

        `index` holds one slice of step 1 per leading axis, as jax gives to the callback of
        `make_array_from_callback`. Leading rows and long runs are read alone; for short pieces of
        rows whole rows are read in blocks of a few MiB and cut: the peak is the result and a block.

        The result is a fresh array aligned to 64 bytes, or `out` (C-contiguous, same shape and
        dtype), e.g. one expert's place in a stacked array.
        """
        info = self.info(name)
        dtype = NUMPY_DTYPES[info.dtype]
        ranges = _ranges(info, index)
        shape = tuple(stop - start for start, stop in ranges)
        if out is None:
            out = _empty_aligned(shape, dtype)
        elif out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"out for {name} must be a C-contiguous {dtype} array of shape {shape},"
                f" not {out.dtype} {out.shape}"
            )
        if out.size:
            shape_in_file, ranges = _merge_full_axes(info.shape, ranges)
            # Bytes as the last axis: from here on dtypes play no role.
            lengths = [stop - start for start, stop in ranges]
            target: npt.NDArray[np.uint8] = (
                out.reshape(-1).view(np.uint8).reshape(*lengths, dtype.itemsize)
            )
            self._fill(target, info, info.offset, shape_in_file, ranges)
        return out

    def close(self) -> None:
        """Closes the files. No read may be in progress; later ones raise ValueError."""
        self._finalizer()

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(
        self,
        target: npt.NDArray[np.uint8],
        info: TensorInfo,
        offset: int,
        shape: tuple[int, ...],
        ranges: list[tuple[int, int]],
    ) -> None:
        """Fills `target` with the slab `ranges` of an array `shape` that starts at `offset`.

        Every axis but the first is cut on at least one side (`_merge_full_axes`).
        """
        itemsize = target.shape[-1]
        row_bytes = math.prod(shape[1:]) * itemsize
        start, stop = ranges[0]
        if len(shape) == 1:
            self._read_into(target, info, offset + start * row_bytes)
        elif len(shape) == 2 and target[0].nbytes < _DIRECT_BYTES and row_bytes <= _STAGING_BYTES:
            rows_at_once = _STAGING_BYTES // row_bytes
            columns = slice(*ranges[1])
            staging = np.empty((min(rows_at_once, stop - start), shape[1], itemsize), np.uint8)
            for row in range(start, stop, rows_at_once):
                rows = staging[: min(rows_at_once, stop - row)]
                self._read_into(rows, info, offset + row * row_bytes)
                target[row - start : row - start + len(rows)] = rows[:, columns]
        else:
            for row in range(start, stop):
                self._fill(
                    target[row - start], info, offset + row * row_bytes, shape[1:], ranges[1:]
                )

    def _read_into(self, target: npt.NDArray[np.uint8], info: TensorInfo, offset: int) -> None:
        if not self._finalizer.alive:
            raise ValueError(f"read of {info.name} after close")
        view = target.reshape(-1).data
        with _disk_errors("cannot be read", info.file, info.name):
            done = _pread(self._descriptors[info.file], view, offset)
        with self._lock:
            self._bytes_read += done
        if done != len(view):
            raise CheckpointError(
                f"{len(view) - done} bytes are missing: the file was truncated after it was opened",
                file=info.file,
                tensor=info.name,
            )


def _check_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.exists():
        raise CheckpointError("a checkpoint is a folder, this is a file", file=folder)
    message = "no such checkpoint folder"
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(folder)):
        message += (
            "; if this is the name of a repository on the Hugging Face hub, download it first with"
            f" `hf download {folder} --local-dir {folder.name}` and pass the folder {folder.name}"
        )
    raise CheckpointError(message, file=folder)


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name -> plain file name."""
    with _disk_errors("cannot be read", path):
        text = path.read_bytes()
    content = _parse_json(text, path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map from tensors to files", file=path)
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or re.search(r"[/\\\0]", file):
            raise CheckpointError(
                f"the index must name a file of this folder, not {file!r}", file=path, tensor=tensor
            )
    return weight_map


def _check_files(folder: Path, file_names: list[str], weight_map: dict[str, str] | None) -> None:
    """Refuses absent files and warns once of safetensors files that do not belong."""
    with _disk_errors("cannot be listed", folder):
        present = set(os.listdir(folder))
    strays = sorted(n for n in present - set(file_names) if n.endswith(".safetensors"))
    missing = [name for name in file_names if name not in present]
    if missing and weight_map is None:
        hint = f"; {', '.join(strays[:3])} cannot be used without the index" if strays else ""
        raise CheckpointError(
            f"the folder holds neither {INDEX_NAME} nor {SINGLE_NAME}{hint}", file=folder
        )
    if missing:
        assert weight_map is not None
        tensor = next(t for t, file in weight_map.items() if file == missing[0])
        raise CheckpointError(
            f"{INDEX_NAME} names {len(missing)} of {len(file_names)} files that are absent:"
            f" {_some(missing)}",
            file=folder / missing[0],
            tensor=tensor,
        )
    if strays:
        owner = SINGLE_NAME if weight_map is None else INDEX_NAME
        _log.warning(
            "%s: ignored %d safetensors file(s) that do not belong to %s: %s",
            folder,
            len(strays),
            owner,
            _some(strays),
        )


def _check_against_index(
    folder: Path, tensors: dict[str, TensorInfo], weight_map: dict[str, str]
) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            found = f"; it stands in {tensors[name].file.name}" if name in tensors else ""
            raise CheckpointError(
                f"{INDEX_NAME} names a tensor that the file does not hold{found}",
                file=folder / file,
                tensor=name,
            )
    unknown = [name for name in tensors if name not in weight_map]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensor(s) of the file are not in {INDEX_NAME}: {_some(unknown)}",
            file=tensors[unknown[0]].file,
            tensor=unknown[0],
        )


def _read_header(path: Path, descriptor: int) -> list[TensorInfo]:
    """Reads and checks the header of one file; the tensors come in the order of their bytes."""
    with _disk_errors("cannot be read", path):
        file_bytes = os.fstat(descriptor).st_size
        prefix = bytearray(min(_LENGTH_BYTES, file_bytes))
        _pread(descriptor, memoryview(prefix), 0)
    if len(prefix) < _LENGTH_BYTES:
        raise CheckpointError(f"the file is truncated: only {file_bytes} bytes long", file=path)
    if prefix == b"version ":
        raise CheckpointError(
            "this is a Git LFS pointer, not the weights: run `git lfs pull`", file=path
        )
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"no safetensors file: its header would be {header_bytes} bytes long", file=path
        )
    start = _LENGTH_BYTES + header_bytes
    if start > file_bytes:
        raise CheckpointError(
            f"the file is truncated inside its header: {file_bytes} of at least {start} bytes",
            file=path,
        )
    text = bytearray(header_bytes)
    with _disk_errors("cannot be read", path):
        _pread(descriptor, memoryview(text), _LENGTH_BYTES)
    header = _parse_json(bytes(text), path)
    if not isinstance(header, dict):
        raise CheckpointError("corrupt header: not a JSON object", file=path)
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise CheckpointError("corrupt header: __metadata__ is not an object", file=path)

    infos = [_tensor_info(name, entry, path, start) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_layout(infos, path, start, file_bytes)
    return infos


def _tensor_info(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    def refuse(message: str) -> CheckpointError:
        return CheckpointError(f"corrupt header: {message}", file=path, tensor=name)

    if not isinstance(entry, dict):
        raise refuse("the entry is not an object")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    offsets = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise refuse(f"unknown dtype {dtype!r}")
    if not _is_list_of_sizes(shape):
        raise refuse(f"shape {shape!r} is no list of sizes")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets {offsets!r} is no range of bytes")
    nbytes = offsets[1] - offsets[0]
    needed = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if nbytes != needed:
        raise refuse(f"{dtype} of shape {shape} takes {needed} bytes, its range has {nbytes}")
    return TensorInfo(name, dtype, tuple(shape), path, start + offsets[0], nbytes)


def _is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_layout(infos: list[TensorInfo], path: Path, start: int, file_bytes: int) -> None:
    """Tensors must lie back to back from `start` to the end of the file."""
    last = max(infos, key=lambda info: info.offset + info.nbytes, default=None)
    if last is not None and last.offset + last.nbytes > file_bytes:
        raise CheckpointError(
            f"the file is truncated: {file_bytes} of {last.offset + last.nbytes} bytes",
            file=path,
            tensor=last.name,
        )
    end = start
    before = None
    for info in infos:
        if info.offset < end:
            raise CheckpointError(
                f"corrupt header: the bytes overlap those of {before}", file=path, tensor=info.name
            )
        if info.offset > end:
            raise CheckpointError(
                f"corrupt header: {info.offset - end} bytes before the tensor belong to none",
                file=path,
                tensor=info.name,
            )
        end += info.nbytes
        before = info.name
    if end != file_bytes:
        raise CheckpointError(
            f"the last {file_bytes - end} bytes of the file belong to no tensor", file=path
        )


def _parse_json(text: bytes, path: Path) -> Any:
    """JSON in which no key appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            (twice, _), *_ = collections.Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError("the name appears twice", file=path, tensor=twice)
        return content

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"corrupt JSON: {error}", file=path) from error


def _ranges(info: TensorInfo, index: tuple[slice, ...] | None) -> list[tuple[int, int]]:
    """(start, stop) on every axis. Out-of-range slices are errors here, never clipped."""
    parts = () if index is None else index
    if len(parts) > len(info.shape):
        raise ValueError(f"{len(parts)} slices for {info.name} of shape {info.shape}")
    parts += (slice(None),) * (len(info.shape) - len(parts))
    ranges = []
    for size, part in zip(info.shape, parts, strict=True):
        start = 0 if part.start is None else int(part.start)
        stop = size if part.stop is None else int(part.stop)
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"slice {part} does not fit {info.name} of shape {info.shape}")
        ranges.append((start, stop))
    return ranges


def _merge_full_axes(
    shape: tuple[int, ...], ranges: list[tuple[int, int]]
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Folds each axis that is wanted whole into the axis before it: fewer and longer runs."""
    merged_shape, merged_ranges = [1], [(0, 1)]
    for size, (start, stop) in zip(shape, ranges, strict=True):
        if (start, stop) == (0, size):
            merged_shape[-1] *= size
            before_start, before_stop = merged_ranges[-1]
            merged_ranges[-1] = (before_start * size, before_stop * size)
        elif merged_shape == [1]:
            merged_shape, merged_ranges = [size], [(start, stop)]
        else:
            merged_shape.append(size)
            merged_ranges.append((start, stop))
    return tuple(merged_shape), merged_ranges


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    buffer: npt.NDArray[np.uint8] = np.empty(nbytes + _ALIGNMENT, np.uint8)
    shift = -buffer.ctypes.data % _ALIGNMENT
    return buffer[shift : shift + nbytes].view(dtype).reshape(shape)


def _pread(descriptor: int, target: memoryview, offset: int) -> int:
    """Fills `target` from `offset` on; returns the bytes read, fewer only at the file's end."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _close(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def write_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Iterable[TensorSource | tuple[str, str, Sequence[int], Callable[[], npt.ArrayLike]]],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Writes tensors into a folder, one in memory at a time, and returns the files in order.

    Shards are planned from the shapes alone and filled in the order given; one tensor larger than
    `max_shard_bytes` gets a shard of its own. What fits one shard becomes `model.safetensors`
    without an index. Within a shard wide dtypes come first, which keeps every tensor aligned.

    Nothing appears under its final name before everything is written, and the checkpoint that
    stood in the folder stays whole until a single rename replaces it: new shards never take a name
    that it uses. Then its files are removed. One writer at a time per folder.
    """
    sources = [TensorSource(*tensor) for tensor in tensors]
    _check_sources(sources)
    shards = _plan_shards(sources, max_shard_bytes)
    total_bytes = sum(_source_bytes(source) for source in sources)

    folder = Path(folder)
    with _disk_errors("cannot be created", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"*.safetensors*{_PARTIAL_SUFFIX}"):
            stale.unlink()
        free_bytes = shutil.disk_usage(folder).free
    if total_bytes > free_bytes:
        raise CheckpointError(
            f"not enough space: {total_bytes} bytes to write, {free_bytes} free", file=folder
        )

    index_path = folder / INDEX_NAME
    has_old_index = os.path.lexists(index_path)
    old_names = _files_in_use(folder, has_old_index)
    file_names, needs_index = _choose_names(len(shards), old_names, has_old_index)
    files = [folder / name for name in file_names]
    weight_map = {
        source.name: name
        for name, shard in zip(file_names, shards, strict=True)
        for source in shard
    }

    unfinished: list[Path] = []
    try:
        for file, shard in zip(files, shards, strict=True):
            unfinished.append(_partial(file))
            _write_shard(file, shard)
        if needs_index:
            index = {
                "metadata": {"total_size": total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            unfinished.append(_partial(index_path))
            with _written(index_path) as descriptor:
                _write(descriptor, json.dumps(index, indent=2).encode() + b"\n", index_path)
        # The one step that swaps checkpoints is the rename of the index or, without an index, of
        # the only file, or the removal of an old index that hid this file.
        with _disk_errors("cannot be renamed into place", folder):
            for file in files:
                os.replace(_partial(file), file)
            if needs_index:
                os.replace(_partial(index_path), index_path)
            elif has_old_index:
                index_path.unlink()
            _sync_folder(folder)
    except BaseException:
        _remove(unfinished)
        raise
    replaced = old_names - set(file_names)
    _remove(folder / name for name in replaced if name.endswith(".safetensors"))
    return files


def _check_sources(sources: list[TensorSource]) -> None:
    if not sources:
        raise ValueError("a checkpoint needs at least one tensor")
    names = set()
    for source in sources:
        if source.name in names or source.name == "__metadata__":
            raise CheckpointError("the name is given twice or reserved", tensor=source.name)
        if source.dtype not in NUMPY_DTYPES:
            raise CheckpointError(f"unknown dtype {source.dtype!r}", tensor=source.name)
        names.add(source.name)


def _plan_shards(sources: list[TensorSource], max_shard_bytes: int) -> list[list[TensorSource]]:
    shards: list[list[TensorSource]] = [[]]
    filled = 0
    for source in sources:
        nbytes = _source_bytes(source)
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(source)
        filled += nbytes
    for shard in shards:
        shard.sort(key=lambda source: -NUMPY_DTYPES[source.dtype].itemsize)
    return shards


def _source_bytes(source: TensorSource) -> int:
    return math.prod(source.shape) * NUMPY_DTYPES[source.dtype].itemsize


def _files_in_use(folder: Path, has_index: bool) -> set[str]:
    """Names of the files that make up the checkpoint in this folder, if there is one."""
    if has_index:
        return set(_read_index(folder / INDEX_NAME).values())
    return {SINGLE_NAME} if os.path.lexists(folder / SINGLE_NAME) else set()


def _choose_names(count: int, old_names: set[str], has_old_index: bool) -> tuple[list[str], bool]:
    """Names for the new files, and whether an index is needed to find them."""
    if count == 1 and not (has_old_index and SINGLE_NAME in old_names):
        return [SINGLE_NAME], False
    stems = itertools.chain(["model"], (f"model-v{version}" for version in itertools.count(2)))
    candidates = (
        [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for stem in stems
    )
    return next(names for names in candidates if old_names.isdisjoint(names)), True


def _write_shard(file: Path, shard: list[TensorSource]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in shard:
        start, end = end, end + _source_bytes(source)
        header[source.name] = {
            "dtype": source.dtype,
            "shape": [int(size) for size in source.shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with _written(file) as descriptor:
        _write(descriptor, len(text).to_bytes(_LENGTH_BYTES, "little") + text, file)
        for source in shard:
            array = np.asarray(source.make())
            dtype = NUMPY_DTYPES[source.dtype]
            if array.shape != tuple(source.shape) or array.dtype != dtype:
                raise CheckpointError(
                    f"planned as {dtype} {tuple(source.shape)}, got {array.dtype} {array.shape}",
                    file=file,
                    tensor=source.name,
                )
            contents = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            del array
            _write(descriptor, contents.data, file, source.name)
            del contents  # before the next tensor is made


@contextlib.contextmanager
def _written(file: Path) -> Iterator[int]:
    """A descriptor of the partial file, which is on disk when the block ends without an error."""
    with _disk_errors("cannot be written", file):
        descriptor = os.open(_partial(file), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield descriptor
        with _disk_errors("cannot be written", file):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(
    descriptor: int, contents: bytes | memoryview, file: Path, tensor: str | None = None
) -> None:
    view = memoryview(contents)
    with _disk_errors("cannot be written", file, tensor):
        while view:
            view = view[os.write(descriptor, view) :]


def _partial(file: Path) -> Path:
    return file.with_name(file.name + _PARTIAL_SUFFIX)


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # a file left over is ignored and reported by the reader
            file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes renames durable; some network file systems cannot, and need not fail the save."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(what: str, file: Path, tensor: str | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: {error.strerror or error}", file=file, tensor=tensor
        ) from error


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
