"""The strict reader of safetensors folders and the writer, on good files and on bad ones."""

import errno
import gc
import json
import logging
import os
import shutil
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from k3jax.checkpoint import safetensors
from k3jax.checkpoint.safetensors import (
    INDEX_NAME,
    NUMPY_DTYPES,
    SINGLE_NAME,
    TensorInfo,
    check_stored_dtype,
    dtype_name,
    open_checkpoint,
    write_checkpoint,
)
from k3jax.errors import CheckpointError

BF16 = ml_dtypes.bfloat16


def sample(shape, dtype="F32", seed=0):
    """An array of random bytes: every dtype, and every element distinct in practice."""
    dtype = NUMPY_DTYPES[dtype]
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def raw(array):
    return array.tobytes()


def source(name, array):
    return (name, dtype_name(array.dtype), array.shape, lambda: array)


def save(folder, arrays, **options):
    return write_checkpoint(folder, [source(*item) for item in arrays.items()], **options)


def load(folder):
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def assert_holds(folder, arrays):
    loaded = load(folder)
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape
        assert raw(loaded[name]) == raw(array)


def small(seed=0):
    """Four tensors; in shards of 2,500 bytes they take three files."""
    return {
        "a.weight": sample((16, 32), "F32", seed),
        "b.weight": sample((8, 64), "BF16", seed + 1),
        "c.weight_packed": sample((4, 16), "U8", seed + 2),
        "c.weight": sample((32, 32), "BF16", seed + 3),
    }


@pytest.fixture
def sharded(tmp_path):
    files = save(tmp_path, small(), max_shard_bytes=2500)
    assert len(files) == 3
    return tmp_path


def file_of(header, data=b""):
    """Bytes of a file with this header, given as an object or as raw bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def edit_index(folder, change):
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def refused(folder, *fragments, file=None, tensor=None):
    """The folder is refused, and the error names file, tensor and what was wrong."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message
    if file is not None:
        assert Path(caught.value.file).name == file and file in message
    if tensor is not None:
        assert caught.value.tensor == tensor and tensor in message


def test_single_file(tmp_path):
    files = save(tmp_path, small())
    assert files == [tmp_path / SINGLE_NAME] and not (tmp_path / INDEX_NAME).exists()
    assert_holds(tmp_path, small())


def test_shards(sharded):
    index = json.loads((sharded / INDEX_NAME).read_text())
    arrays = small()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    assert set(index["weight_map"].values()) == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    assert_holds(sharded, arrays)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_round_trips(tmp_path, dtype):
    save(
        tmp_path,
        {"x": sample((3, 4), "U8" if dtype == "BOOL" else dtype).astype(NUMPY_DTYPES[dtype])},
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.info("x").dtype == dtype
        assert checkpoint.read("x").dtype == NUMPY_DTYPES[dtype]


def test_info_and_order(sharded):
    with open_checkpoint(str(sharded)) as checkpoint:
        info = checkpoint.info("b.weight")
        assert (info.dtype, info.shape, info.nbytes) == ("BF16", (8, 64), 1024)
        assert info.file.name == "model-00002-of-00003.safetensors"
        assert len(checkpoint) == 4 and "b.weight" in checkpoint and "d" not in checkpoint
        assert checkpoint.total_bytes == sum(array.nbytes for array in small().values())
        places = [(checkpoint.info(n).file, checkpoint.info(n).offset) for n in checkpoint.names]
        assert places == sorted(places)


def test_unknown_name(sharded):
    with open_checkpoint(sharded) as checkpoint:
        for call in (checkpoint.info, checkpoint.read):
            with pytest.raises(CheckpointError, match="no such tensor.*tensor d.weight"):
                call("d.weight")


def test_result_is_fresh_aligned_and_not_mapped(sharded):
    with open_checkpoint(sharded) as checkpoint:
        for name in checkpoint.names:
            array = checkpoint.read(name)
            assert array.ctypes.data % 64 == 0 and array.flags.writeable
            assert array.flags.c_contiguous
        maps = Path("/proc/self/maps")
        if maps.exists():
            assert str(sharded) not in maps.read_text()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 5, 1)])
def test_odd_shapes(tmp_path, shape):
    arrays = {"x": sample(shape), "y": sample((2,), seed=1)}
    save(tmp_path, arrays)
    assert_holds(tmp_path, arrays)


ALL = slice(None)
INDEX_CASES = {  # index -> bytes that have to be read of a BF16 tensor [6, 4, 10, 8]
    "all": ((), 6 * 4 * 10 * 16),
    "leading_rows": ((slice(2, 5),), 3 * 4 * 10 * 16),
    "leading_rows_spelled_out": (
        (slice(2, 5, 1), ALL, slice(0, 10), slice(None, 8)),
        3 * 4 * 10 * 16,
    ),
    "one_row": ((slice(5, 6),), 4 * 10 * 16),
    "no_row": ((slice(3, 3),), 0),
    "second_axis": ((ALL, slice(1, 3)), None),
    "third_axis": ((ALL, ALL, slice(4, 9)), None),
    "last_axis": ((ALL, ALL, ALL, slice(3, 4)), None),
    "first_and_last": ((slice(1, 2), ALL, ALL, slice(0, 7)), None),
    "first_and_third": ((slice(0, 2), ALL, slice(9, 10)), None),
    "all_axes": ((slice(1, 6), slice(0, 1), slice(2, 4), slice(7, 8)), None),
    "middle_empty": ((ALL, slice(4, 4)), 0),
}


@pytest.mark.parametrize("index, nbytes", INDEX_CASES.values(), ids=INDEX_CASES.keys())
@pytest.mark.parametrize("staging", [0, 64, 4 << 20])
@pytest.mark.parametrize("direct", [1, 40, 64 << 10])
def test_slices(tmp_path, monkeypatch, index, nbytes, staging, direct):
    """Every slab equals the slice of the whole, by direct reads and through blocks of any size."""
    monkeypatch.setattr(safetensors, "_STAGING_BYTES", staging)
    monkeypatch.setattr(safetensors, "_DIRECT_BYTES", direct)
    array = sample((6, 4, 10, 8), "BF16")
    save(tmp_path, {"before": sample((3,)), "x": array, "after": sample((3,))})
    with open_checkpoint(tmp_path) as checkpoint:
        part = checkpoint.read("x", index)
        assert part.shape == array[index].shape and raw(part) == raw(array[index])
        if nbytes is not None:
            assert checkpoint.bytes_read == nbytes
        assert part.nbytes <= checkpoint.bytes_read <= array.nbytes


def test_long_runs_are_read_alone(tmp_path):
    """Column slices of 64 KiB and more per row skip the rest of the row."""
    array = sample((3, 100_000), "U8")
    save(tmp_path, {"x": array})
    with open_checkpoint(tmp_path) as checkpoint:
        part = checkpoint.read("x", (ALL, slice(20_000, 90_000)))
        assert raw(part) == raw(array[:, 20_000:90_000])
        assert checkpoint.bytes_read == part.nbytes


BAD_INDICES = {
    "step": (slice(0, 4, 2),),
    "backwards": (slice(4, 0, -1),),
    "beyond_the_end": (slice(0, 17),),
    "negative": (slice(-4, None),),
    "stop_before_start": (slice(4, 2),),
    "too_many_axes": (ALL, ALL, ALL),
}


@pytest.mark.parametrize("index", BAD_INDICES.values(), ids=BAD_INDICES.keys())
def test_slices_that_do_not_fit_are_errors(sharded, index):
    with open_checkpoint(sharded) as checkpoint, pytest.raises(ValueError, match="a.weight"):
        checkpoint.read("a.weight", index)


def test_read_into_a_stacked_array(sharded):
    stacked = np.zeros((3, 16, 32), np.float32)
    with open_checkpoint(sharded) as checkpoint:
        assert checkpoint.read("a.weight", out=stacked[1]).base is stacked
        checkpoint.read("a.weight", (slice(4, 6),), out=stacked[2, :2])
    assert raw(stacked[1]) == raw(small()["a.weight"])
    assert raw(stacked[2, :2]) == raw(small()["a.weight"][4:6])
    assert not stacked[0].any() and not stacked[2, 2:].any()


@pytest.mark.parametrize(
    "out",
    [np.zeros((16, 31), np.float32), np.zeros((16, 32)), np.zeros((32, 16), np.float32).T],
    ids=["shape", "dtype", "not_contiguous"],
)
def test_unfit_out_is_an_error(sharded, out):
    with (
        open_checkpoint(sharded) as checkpoint,
        pytest.raises(ValueError, match="out for a.weight"),
    ):
        checkpoint.read("a.weight", out=out)


def test_threads(tmp_path):
    arrays = {f"x{i}": sample((50, 40 + i), "BF16", i) for i in range(8)}
    save(tmp_path, arrays, max_shard_bytes=10_000)
    wrong = []
    with open_checkpoint(tmp_path) as checkpoint:

        def work(seed):
            for i in np.random.default_rng(seed).permutation(np.arange(40) % 8):
                index = (slice(10, 30), slice(int(i), 30))
                if raw(checkpoint.read(f"x{i}", index)) != raw(arrays[f"x{i}"][index]):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert checkpoint.bytes_read == 4 * 5 * sum(20 * 2 * (40 + i) for i in range(8))


def test_close(sharded):
    checkpoint = open_checkpoint(sharded)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ValueError, match="after close"):
        checkpoint.read("a.weight")


def test_no_descriptor_leaks(sharded):
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("counts descriptors in /proc")
    gc.collect()
    before = len(os.listdir(folder))
    open_checkpoint(sharded)  # dropped without close
    edit_index(sharded, lambda weight_map: weight_map.pop("c.weight_packed"))
    refused(sharded)
    gc.collect()
    assert len(os.listdir(folder)) == before


def test_file_replaced_after_opening_is_read_as_it_was(tmp_path):
    arrays = small()
    save(tmp_path, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        save(tmp_path, small(seed=10))
        assert raw(checkpoint.read("a.weight")) == raw(arrays["a.weight"])


def test_hub_name_gets_the_download_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("moonshotai/Kimi-K3", Path("moonshotai/Kimi-K3")):
        refused(name, "hf download moonshotai/Kimi-K3 --local-dir Kimi-K3", file="Kimi-K3")


def test_missing_folder_that_is_no_hub_name(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint folder") as caught:
        open_checkpoint(tmp_path / "org" / "name")
    assert "hf download" not in str(caught.value)


def test_file_instead_of_a_folder(tmp_path):
    save(tmp_path, small())
    refused(tmp_path / SINGLE_NAME, "a checkpoint is a folder", file=SINGLE_NAME)


def test_empty_folder(tmp_path):
    refused(tmp_path, INDEX_NAME, SINGLE_NAME)


def test_shards_without_their_index(sharded):
    (sharded / INDEX_NAME).unlink()
    refused(sharded, INDEX_NAME, "model-00001-of-00003.safetensors")


def test_missing_shard(sharded):
    """F058: a shard was deleted."""
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "absent", file="model-00002-of-00003.safetensors", tensor="b.weight")


def test_index_names_a_file_that_never_was(sharded):
    edit_index(sharded, lambda weight_map: weight_map.update({"d.weight": "other.safetensors"}))
    refused(sharded, "absent", file="other.safetensors", tensor="d.weight")


def test_tensor_missing_from_the_index(sharded):
    """F058: one tensor was deleted from the index."""
    edit_index(sharded, lambda weight_map: weight_map.pop("c.weight_packed"))
    refused(
        sharded,
        "not in",
        INDEX_NAME,
        file="model-00002-of-00003.safetensors",
        tensor="c.weight_packed",
    )


def test_shard_missing_from_the_index_is_a_stray(sharded, caplog):
    """Nothing in the index leads to the file, so only its warning tells that a.weight is gone."""
    edit_index(sharded, lambda weight_map: weight_map.pop("a.weight"))
    with caplog.at_level(logging.WARNING):
        assert "a.weight" not in load(sharded)
    assert "model-00001-of-00003.safetensors" in caplog.text


def test_index_names_a_tensor_of_no_file(sharded):
    """F058: the index names a tensor that is in no file."""
    shard = "model-00001-of-00003.safetensors"
    edit_index(sharded, lambda weight_map: weight_map.update({"d.weight": shard}))
    refused(sharded, "does not hold", file=shard, tensor="d.weight")


def test_index_names_another_file_than_the_tensors(sharded):
    shard, name = "model-00003-of-00003.safetensors", "c.weight_packed"
    edit_index(sharded, lambda weight_map: weight_map.update({name: shard}))
    refused(sharded, "stands in model-00002-of-00003.safetensors", file=shard, tensor=name)


def test_tensor_in_two_shards(sharded):
    """F059: duplicate tensor in two shards that the index names."""
    shutil.copy(
        sharded / "model-00001-of-00003.safetensors", sharded / "model-00003-of-00003.safetensors"
    )
    refused(sharded, "two shards", file="model-00003-of-00003.safetensors", tensor="a.weight")


def test_stray_file_is_reported_and_ignored(sharded, caplog):
    """F059: a consolidated file with other values lies beside the shards."""
    write_strays = {"a.weight": np.zeros((16, 32), np.float32), "z": np.zeros(1, np.float32)}
    other = sharded / "elsewhere"
    save(other, write_strays)
    shutil.move(other / SINGLE_NAME, sharded / SINGLE_NAME)
    shutil.copy(sharded / SINGLE_NAME, sharded / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        assert_holds(sharded, small())
    assert len(caplog.records) == 1
    assert "consolidated.safetensors, model.safetensors" in caplog.text


def test_stray_file_beside_a_single_file(tmp_path, caplog):
    save(tmp_path, small())
    (tmp_path / "adapter.safetensors").write_bytes(b"not even a header")
    with caplog.at_level(logging.WARNING):
        assert_holds(tmp_path, small())
    assert "adapter.safetensors" in caplog.text


def test_clean_folder_warns_of_nothing(sharded, caplog):
    with caplog.at_level(logging.DEBUG):
        open_checkpoint(sharded).close()
    assert not caplog.records


BAD_INDEX_FILES = {
    "not_json": b"{",
    "not_utf8": b'{"weight_map": {"\xff": "a"}}',
    "a_list": b"[]",
    "no_weight_map": b'{"metadata": {}}',
    "empty_weight_map": b'{"weight_map": {}}',
    "file_is_a_number": b'{"weight_map": {"a.weight": 3}}',
    "file_outside_the_folder": b'{"weight_map": {"a.weight": "../model.safetensors"}}',
    "absolute_file": b'{"weight_map": {"a.weight": "/model.safetensors"}}',
    "parent_folder": b'{"weight_map": {"a.weight": ".."}}',
    "tensor_twice": b'{"weight_map": {"a.weight": "x", "a.weight": "y"}}',
    "nested_too_deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", BAD_INDEX_FILES.values(), ids=BAD_INDEX_FILES.keys())
def test_bad_index(sharded, content):
    (sharded / INDEX_NAME).write_bytes(content)
    refused(sharded, file=INDEX_NAME, tensor="a.weight" if b'"a.weight"' in content else None)


def test_dangling_link_as_index_is_not_overlooked(tmp_path):
    save(tmp_path, small())
    (tmp_path / INDEX_NAME).symlink_to("gone")
    refused(tmp_path, "cannot be read", file=INDEX_NAME)


def test_folder_in_place_of_a_file(tmp_path):
    (tmp_path / SINGLE_NAME).mkdir()
    refused(tmp_path, "cannot be", file=SINGLE_NAME)


DATA = bytes(range(8))
CORRUPT = {  # content of the file, what the message says, tensor
    "empty": (b"", "truncated", None),
    "shorter_than_its_length_field": (b"\x08\0\0", "truncated", None),
    "git_lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull", None),
    "absurd_header_length": (b"\xff" * 64, "no safetensors file", None),
    "header_cut_off": (file_of({"x": entry()}, DATA)[:30], "truncated inside its header", None),
    "header_not_json": (file_of(b'{"x": {"dtype":', DATA), "corrupt JSON", None),
    "header_not_utf8": (file_of(b'{"\xff": 1}', DATA), "corrupt JSON", None),
    "header_is_a_list": (file_of([], DATA), "not a JSON object", None),
    "header_nested_too_deep": (file_of(b"[" * 100_000), "corrupt JSON", None),
    "metadata_is_a_list": (file_of({"__metadata__": []}), "__metadata__", None),
    "name_twice": (
        file_of(b'{"x":%b,"x":%b}' % ((json.dumps(entry()).encode(),) * 2), DATA),
        "appears twice",
        "x",
    ),
    "entry_is_a_number": (file_of({"x": 3}), "not an object", "x"),
    "dtype_absent": (file_of({"x": {"shape": [2], "data_offsets": [0, 8]}}, DATA), "dtype", "x"),
    "dtype_unknown": (file_of({"x": entry("F4")}, DATA), "unknown dtype 'F4'", "x"),
    "dtype_is_a_list": (file_of({"x": entry(["F32"])}, DATA), "unknown dtype", "x"),
    "shape_absent": (file_of({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, DATA), "shape", "x"),
    "shape_negative": (file_of({"x": entry(shape=(-2,))}, DATA), "shape", "x"),
    "shape_fractional": (file_of({"x": entry(shape=(2.0,))}, DATA), "shape", "x"),
    "shape_boolean": (file_of({"x": entry("F64", shape=(True,))}, DATA), "shape", "x"),
    "offsets_absent": (file_of({"x": {"dtype": "F32", "shape": [2]}}, DATA), "data_offsets", "x"),
    "offsets_backwards": (file_of({"x": entry(offsets=(8, 0))}, DATA), "data_offsets", "x"),
    "offsets_negative": (file_of({"x": entry(offsets=(-8, 0))}, DATA), "data_offsets", "x"),
    "three_offsets": (file_of({"x": entry(offsets=(0, 4, 8))}, DATA), "data_offsets", "x"),
    "too_few_bytes": (file_of({"x": entry(shape=(3,))}, DATA), "takes 12 bytes", "x"),
    "too_many_bytes": (file_of({"x": entry(shape=(1,))}, DATA), "takes 4 bytes", "x"),
    "overflowing_shape": (file_of({"x": entry(shape=(2**40, 2**40))}, DATA), "takes", "x"),
    "data_cut_off": (file_of({"x": entry()}, DATA[:-1]), "truncated", "x"),
    "no_data": (file_of({"x": entry()}), "truncated", "x"),
    "far_outside": (file_of({"x": entry(offsets=(2**60, 2**60 + 8))}, DATA), "truncated", "x"),
    "overlap": (
        file_of({"x": entry(), "y": entry(offsets=(4, 12))}, DATA + DATA[:4]),
        "overlap those of x",
        "y",
    ),
    "same_bytes_twice": (file_of({"x": entry(), "y": entry()}, DATA), "overlap", "y"),
    "hole": (
        file_of({"x": entry(), "y": entry(offsets=(12, 20))}, DATA + bytes(4) + DATA),
        "4 bytes before",
        "y",
    ),
    "hole_at_the_start": (file_of({"x": entry(offsets=(8, 16))}, DATA * 2), "8 bytes before", "x"),
    "bytes_left_over": (file_of({"x": entry()}, DATA + b"!"), "last 1 bytes", None),
}


@pytest.mark.parametrize("content, message, tensor", CORRUPT.values(), ids=CORRUPT.keys())
def test_corrupt_file(tmp_path, content, message, tensor):
    (tmp_path / SINGLE_NAME).write_bytes(content)
    refused(tmp_path, message, file=SINGLE_NAME, tensor=tensor)


@pytest.mark.parametrize("position", range(0, 220, 11))
def test_file_cut_anywhere(tmp_path, position):
    save(tmp_path, {"x": sample((4, 8), "BF16"), "y": sample((3,))})
    file = tmp_path / SINGLE_NAME
    content = file.read_bytes()
    assert position < len(content)
    file.write_bytes(content[:position])
    refused(tmp_path, file=SINGLE_NAME)


def test_truncated_shard(sharded):
    shard = sharded / "model-00003-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refused(sharded, "truncated", file=shard.name, tensor="c.weight")


@pytest.mark.parametrize("index", [None, (slice(10, 16),), (ALL, slice(0, 3))])
def test_file_truncated_after_opening(tmp_path, index):
    save(tmp_path, {"x": sample((16, 32))})
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / SINGLE_NAME, (tmp_path / SINGLE_NAME).stat().st_size - 200)
        with pytest.raises(CheckpointError, match="200 bytes are missing.*tensor x") as caught:
            checkpoint.read("x", index)
        assert caught.value.file == str(tmp_path / SINGLE_NAME)
        checkpoint.read("x", (slice(0, 9),))


def test_read_error_names_file_and_tensor(tmp_path, monkeypatch):
    save(tmp_path, small())

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with open_checkpoint(tmp_path) as checkpoint:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(
            CheckpointError, match="Input/output error.*model.safetensors.*a.weight"
        ):
            checkpoint.read("a.weight")


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """The kernel may return less than asked for, e.g. at 2 GiB."""
    save(tmp_path, small())
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:100]], at))
    assert_holds(tmp_path, small())


def test_extra_spaces_and_unsorted_headers_are_fine(tmp_path):
    header = {"y": entry(offsets=(8, 16)), "__metadata__": {"format": "pt"}, "x": entry()}
    (tmp_path / SINGLE_NAME).write_bytes(
        file_of(json.dumps(header).encode() + b"   ", DATA + DATA[::-1])
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == ("x", "y")
        assert raw(checkpoint.read("y")) == DATA[::-1]


ALLOWED = [
    ("layers.0.w.weight", "BF16"),
    ("layers.0.w.weight", "F16"),
    ("layers.0.w.weight", "F32"),
    ("experts.0.w1.weight_packed", "U8"),
    ("experts.0.w1.weight_scale", "U8"),
]
FORBIDDEN = [
    *(
        ("layers.0.w.weight", dtype)
        for dtype in NUMPY_DTYPES
        if dtype not in ("BF16", "F16", "F32")
    ),
    ("experts.0.w1.weight_packed.lora_A.weight", "U8"),
    ("experts.0.w1.weight_packed_norm", "U8"),
    ("experts.0.w1_weight_packed", "U8"),
    ("weight_scale", "U8"),
    ("experts.0.w1.weight_packed", "BF16"),
    ("experts.0.w1.weight_packed", "I8"),
    ("experts.0.w1.weight_scale", "F32"),
    ("experts.0.w1.weight_scale", "F8_E8M0"),
]


def info_of(name, dtype):
    return TensorInfo(name, dtype, (2,), Path("model.safetensors"), 8, 16)


@pytest.mark.parametrize("name, dtype", ALLOWED)
def test_allowed_dtypes(name, dtype):
    check_stored_dtype(info_of(name, dtype))


@pytest.mark.parametrize("name, dtype", FORBIDDEN)
def test_forbidden_dtypes_are_refused_by_name(name, dtype):
    with pytest.raises(CheckpointError) as caught:
        check_stored_dtype(info_of(name, dtype))
    assert f"stored as {dtype}," in str(caught.value)
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", name)


def test_dtype_names():
    assert dtype_name(BF16) == "BF16" and dtype_name("float32") == "F32"
    with pytest.raises(CheckpointError, match="complex128"):
        dtype_name(np.complex128)


def test_one_tensor_in_memory_at_a_time(tmp_path):
    alive, most = 0, 0

    class Counted(np.ndarray):
        def __del__(self):
            nonlocal alive
            if self.base is None:
                alive -= 1

    def make():
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        array = np.ndarray.__new__(Counted, (4, 4), np.float32)
        array[...] = 0
        return array

    write_checkpoint(
        tmp_path, [(f"x{i}", "F32", (4, 4), make) for i in range(6)], max_shard_bytes=130
    )
    assert (alive, most) == (0, 1)


def test_shards_are_planned_before_anything_is_made(tmp_path):
    """A generator of sources, sizes around the limit, a tensor larger than it."""
    made = []

    def make(size):
        made.append(size)
        return np.zeros(size, np.uint8)

    def sources():
        for i, size in enumerate([60, 40, 41, 300, 10]):
            assert not made
            yield (f"x{i}", "U8", (size,), lambda size=size: make(size))

    files = write_checkpoint(tmp_path, sources(), max_shard_bytes=100)
    with open_checkpoint(tmp_path) as checkpoint:
        held = [[n for n in checkpoint.names if checkpoint.info(n).file == file] for file in files]
    assert held == [["x0", "x1"], ["x2"], ["x3"], ["x4"]]
    assert made == [60, 40, 41, 300, 10]


def test_tensors_are_aligned_in_the_file(tmp_path):
    arrays = {"a": sample((3,), "U8"), "b": sample((3,), "BF16"), "c": sample((3,), "F32")}
    save(tmp_path, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == ("c", "b", "a")
        for name in checkpoint.names:
            assert checkpoint.info(name).offset % arrays[name].dtype.itemsize == 0
    assert_holds(tmp_path, arrays)


def test_views_are_written_in_row_major_order(tmp_path):
    array = sample((8, 6), "BF16").T[1:5]
    save(tmp_path, {"x": array})
    assert_holds(tmp_path, {"x": array})


def test_readable_by_the_safetensors_package(sharded):
    package = pytest.importorskip("safetensors")
    arrays = small()
    weight_map = json.loads((sharded / INDEX_NAME).read_text())["weight_map"]
    for name, file in weight_map.items():
        with package.safe_open(sharded / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            part = opened.get_slice(name)
            assert part.get_shape() == list(arrays[name].shape)
            assert part.get_dtype() == dtype_name(arrays[name].dtype)
    for shard in set(weight_map.values()):
        for name, held in package.deserialize((sharded / shard).read_bytes()):
            assert bytes(held["data"]) == raw(arrays[name])


def test_reads_what_the_safetensors_package_writes(tmp_path):
    package = pytest.importorskip("safetensors.numpy")
    arrays = {name: array for name, array in small().items() if array.dtype != BF16}
    package.save_file(arrays, tmp_path / SINGLE_NAME)
    assert_holds(tmp_path, arrays)


REFUSED_SOURCES = {
    "name_twice": [source("x", sample((2,))), source("x", sample((2,)))],
    "reserved_name": [source("__metadata__", sample((2,)))],
    "unknown_dtype": [("x", "float32", (2,), lambda: sample((2,)))],
    "other_shape": [("x", "F32", (3,), lambda: sample((2,)))],
    "other_dtype": [("x", "BF16", (2,), lambda: sample((2,)))],
}


@pytest.mark.parametrize("sources", REFUSED_SOURCES.values(), ids=REFUSED_SOURCES.keys())
def test_refused_sources(tmp_path, sources):
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "new", sources)
    assert caught.value.tensor == sources[0][0]
    assert not list(tmp_path.rglob("*.*"))


def test_nothing_to_write(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        write_checkpoint(tmp_path, [])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Interrupt(BaseException):
    """Stands for a Ctrl-C."""


def interrupted_sources(arrays, after):
    """Sources of which the one at position `after` is interrupted."""

    def stop():
        raise Interrupt

    sources = [source(*item) for item in arrays.items()]
    name, dtype, shape, _ = sources[after]
    sources[after] = (name, dtype, shape, stop)
    return sources


OLD = {"nothing": None, "single": 10**9, "shards": 2500}


@pytest.mark.parametrize("old_shard_bytes", OLD.values(), ids=OLD.keys())
@pytest.mark.parametrize("new_shard_bytes", [10**9, 2500], ids=["single", "shards"])
@pytest.mark.parametrize("after", [0, 3])
def test_interrupted_save_changes_nothing(tmp_path, old_shard_bytes, new_shard_bytes, after):
    if old_shard_bytes:
        save(tmp_path, small(), max_shard_bytes=old_shard_bytes)
    (tmp_path / "config.json").write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(Interrupt):
        write_checkpoint(
            tmp_path, interrupted_sources(small(seed=10), after), max_shard_bytes=new_shard_bytes
        )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("old_shard_bytes", OLD.values(), ids=OLD.keys())
@pytest.mark.parametrize("new_shard_bytes", [10**9, 2500], ids=["single", "shards"])
def test_save_over_a_checkpoint(tmp_path, caplog, old_shard_bytes, new_shard_bytes):
    """The new one stands alone; files that belong to neither are left."""
    if old_shard_bytes:
        save(tmp_path, small(), max_shard_bytes=old_shard_bytes)
    (tmp_path / "config.json").write_text("{}")
    for seed in (10, 20, 30):
        files = save(tmp_path, small(seed), max_shard_bytes=new_shard_bytes)
        with caplog.at_level(logging.WARNING):
            assert_holds(tmp_path, small(seed))
        others = {path.name for path in tmp_path.iterdir()} - {file.name for file in files}
        assert others - {INDEX_NAME} == {"config.json"}
        assert not caplog.records


@pytest.mark.parametrize("old_shard_bytes", OLD.values(), ids=OLD.keys())
@pytest.mark.parametrize("new_shard_bytes", [10**9, 2500], ids=["single", "shards"])
def test_killed_at_any_step_the_old_or_the_new_checkpoint_is_whole(
    tmp_path, monkeypatch, old_shard_bytes, new_shard_bytes
):
    """The folder is copied at every system call that could be the last one."""
    old, new = small(), small(seed=10)
    folder = tmp_path / "folder"
    folder.mkdir()
    if old_shard_bytes:
        save(folder, old, max_shard_bytes=old_shard_bytes)
    snapshots = []

    def recorded(call):
        def run(*args, **kwargs):
            snapshots.append(shutil.copytree(folder, tmp_path / f"snapshot{len(snapshots)}"))
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patched:
        for name in ("replace", "unlink", "fsync"):
            patched.setattr(os, name, recorded(getattr(os, name)))
        patched.setattr(Path, "unlink", recorded(Path.unlink))
        save(folder, new, max_shard_bytes=new_shard_bytes)
    snapshots.append(folder)
    assert len(snapshots) >= 4

    states = []
    for snapshot in snapshots:
        try:
            loaded = load(snapshot)
        except CheckpointError:
            states.append(None)
            continue
        states.append(raw(loaded["a.weight"]) == raw(new["a.weight"]))
        expected = new if states[-1] else old
        assert {name: raw(array) for name, array in loaded.items()} == {
            name: raw(array) for name, array in expected.items()
        }
    # First the old one (or none), from one step on the new one.
    first = None if old_shard_bytes is None else False
    assert states[0] is first and states[-1] is True
    switch = states.index(True)
    assert set(states[:switch]) == {first} and set(states[switch:]) == {True}


def test_index_over_a_single_file(tmp_path):
    """An index that names model.safetensors: replacing that file would damage the old one."""
    save(tmp_path, small())
    weight_map = dict.fromkeys(small(), SINGLE_NAME)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    before = contents(tmp_path)
    with pytest.raises(Interrupt):
        write_checkpoint(tmp_path, interrupted_sources(small(seed=10), 3))
    assert contents(tmp_path) == before
    files = save(tmp_path, small(seed=10))
    assert [file.name for file in files] == ["model-00001-of-00001.safetensors"]
    assert_holds(tmp_path, small(seed=10))
    assert not (tmp_path / SINGLE_NAME).exists()


def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path):
    leftover = tmp_path / "model-00007-of-00009.safetensors.partial"
    leftover.write_bytes(b"half a tensor")
    refused(tmp_path, "neither")
    save(tmp_path, small())
    assert not leftover.exists()
    assert_holds(tmp_path, small())


def test_unreadable_old_index_stops_a_save(sharded):
    (sharded / INDEX_NAME).write_text("{")
    before = contents(sharded)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        save(sharded, small(seed=10))
    assert contents(sharded) == before


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_full_disk(sharded, monkeypatch, call):
    before = contents(sharded)
    real, calls = getattr(os, call), 0

    def fail_at_the_third(*args):
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, fail_at_the_third)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(sharded, small(seed=10), max_shard_bytes=2500)
    monkeypatch.undo()
    assert not list(sharded.glob("*.partial"))
    assert before.items() <= contents(sharded).items()
    assert_holds(sharded, small())


def test_full_disk_names_file_and_tensor(tmp_path, monkeypatch):
    def fail(descriptor, view):
        if len(view) == 1024:  # b.weight
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(view)

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, small())
    assert caught.value.tensor == "b.weight" and Path(caught.value.file).name == SINGLE_NAME


def test_too_little_space_is_said_before_anything_is_made(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    made = []
    with pytest.raises(CheckpointError, match=r"not enough space: \d+ bytes"):
        write_checkpoint(tmp_path, [("x", "U8", (free + 10**12,), lambda: made.append(1))])
    assert not made and not list(tmp_path.iterdir())


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:100]))
    save(tmp_path, small(), max_shard_bytes=2500)
    monkeypatch.undo()
    assert_holds(tmp_path, small())


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created.*taken"):
        save(tmp_path / "taken" / "folder", small())


def test_errors_of_a_source_pass_through(tmp_path):
    """A source that reads another checkpoint keeps its own error."""

    def fail():
        raise CheckpointError("truncated", file="other.safetensors", tensor="y")

    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path, [("x", "F32", (2,), fail)])
    assert (caught.value.file, caught.value.tensor) == ("other.safetensors", "y")
    assert not list(tmp_path.iterdir())


def test_needs_neither_jax_nor_the_safetensors_package():
    for module in (safetensors, __import__("k3jax.checkpoint.mxfp4", fromlist=["mxfp4"])):
        text = Path(module.__file__).read_text()
        assert "import jax" not in text and "from safetensors" not in text
        assert "import safetensors" not in text
