"""pallas_kernels.common, on a small Mosaic GPU kernel of its own: a row-wise RMS norm."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import compat, dispatch, testing, tuning

TILE_BF16 = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Config:
    block_t: int = 64  # rows of a tile: what the layout of a warpgroup covers, or a multiple

    def __post_init__(self):
        if self.block_t % 64:
            raise ValueError(f"block_t={self.block_t} must be a multiple of 64")


def rms_norm_xla(x, *, config=None):
    xf = x.astype(jnp.float32)
    return (xf * jax.lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rms_norm_mosaic(x, *, config=None, wait_for_load=True):
    compat.require_hopper()
    config = config or Config()
    rows, width = x.shape
    if rows % config.block_t or width % 64:
        raise NotImplementedError(f"{x.shape=} is not in tiles of {config.block_t} x 64")

    def body(x_gmem, out_gmem, x_smem, out_smem, loaded):
        tile = pl.ds(jax.lax.axis_index("t") * config.block_t, config.block_t)
        plgpu.copy_gmem_to_smem(x_gmem.at[tile], x_smem, loaded)
        if wait_for_load:
            plgpu.barrier_wait(loaded)
        values = x_smem[...].astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(values * values, axis=1) + 1e-6)
        normed = values * jax.lax.broadcast_in_dim(inverse_rms, values.shape, (0,))
        out_smem[...] = normed.astype(x.dtype)
        plgpu.commit_smem()  # the copy below reads asynchronously
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[tile])
        plgpu.wait_smem_to_gmem(0)
        if not wait_for_load:  # too late, but the barrier must not be left open
            plgpu.barrier_wait(loaded)

    def smem():
        return plgpu.SMEM((config.block_t, width), x.dtype, transforms=TILE_BF16)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // config.block_t,),
        grid_names=("t",),
        scratch_types={"x_smem": smem(), "out_smem": smem(), "loaded": plgpu.Barrier()},
        compiler_params=compat.WARPGROUP,
    )(x)


def rms_norm(x, *, implementation: dispatch.Implementation = None):
    return dispatch.first_supported(
        implementation, {"mosaic": rms_norm_mosaic, "xla": rms_norm_xla}, x
    )


def rows(count, width=128):
    return jax.random.normal(jax.random.key(count), (count, width), jnp.bfloat16)


def assert_same(actual, expected):
    np.testing.assert_allclose(
        actual.astype(jnp.float32), expected.astype(jnp.float32), **testing.tolerance(actual.dtype)
    )


@pytest.mark.parametrize("count", [64, 192])
def test_kernel_matches_reference_in_the_simulator(count):
    x = rows(count)
    with testing.simulate(detect_races=True):
        actual = rms_norm_mosaic(x)
    assert_same(actual, rms_norm_xla(x))
    assert not testing.races_found()


def test_simulation_works_under_jit_and_leaves_no_trace():
    jitted = jax.jit(lambda x: rms_norm(x, implementation="mosaic"))
    x = rows(64)
    with testing.simulate():
        assert_same(jitted(x), rms_norm_xla(x))
    if compat.target_device().platform == "cpu":
        with pytest.raises(NotImplementedError):  # traced again outside, not taken from the cache
            jitted(x)


def test_a_race_is_reported():
    with (
        pytest.raises(AssertionError, match="race"),
        testing.simulate(detect_races=True),
    ):
        rms_norm_mosaic(rows(64), wait_for_load=False)


def test_a_race_is_remembered_when_another_kernel_follows():
    with (
        pytest.raises(AssertionError, match="race"),
        testing.simulate(detect_races=True),
    ):
        rms_norm_mosaic(rows(64), wait_for_load=False)
        rms_norm_mosaic(rows(64))


def test_an_error_in_a_kernel_does_not_spoil_the_next():
    def write_out_of_bounds(x):
        def body(x_gmem, out_gmem):
            out_gmem[x.shape[0] + jax.lax.axis_index("t")] = x_gmem[0]

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(1,),
            grid_names=("t",),
            compiler_params=compat.WARPGROUP,
        )(x)

    x = rows(64)
    with pytest.raises(jax.errors.JaxRuntimeError), testing.simulate():
        write_out_of_bounds(x)
    with testing.simulate():
        assert_same(rms_norm_mosaic(x), rms_norm_xla(x))


@pytest.mark.parametrize("block_t", [64, 128])
def test_lowers_for_hopper(block_t):
    x = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16)
    text = testing.lower_for_h200(rms_norm_mosaic, x, config=Config(block_t))
    assert "mosaic_gpu" in text


def test_falls_back_where_the_kernel_refuses(caplog):
    dispatch._log_once.cache_clear()
    x = rows(65)  # not a multiple of the tile
    with testing.simulate(), caplog.at_level(logging.INFO, "pallas_kernels"):
        np.testing.assert_array_equal(rms_norm(x), rms_norm_xla(x))
        rms_norm(x)
    assert [record.getMessage() for record in caplog.records] == [f"using {__name__}.rms_norm_xla"]


def test_named_implementation_never_falls_back():
    with testing.simulate(), pytest.raises(NotImplementedError, match="65, 128"):
        rms_norm(rows(65), implementation="mosaic")
    with pytest.raises(ValueError, match=r"'triton' is none of \['mosaic', 'xla'\]"):
        rms_norm(rows(64), implementation="triton")


def test_only_a_refusal_lets_the_next_try():
    def broken(x):
        raise ValueError("a bug")

    def refuses(x):
        raise NotImplementedError

    with pytest.raises(ValueError, match="a bug"):
        dispatch.first_supported(None, {"broken": broken, "xla": rms_norm_xla}, rows(64))
    with pytest.raises(NotImplementedError, match=r"\['refuses'\]"):
        dispatch.first_supported(None, {"refuses": refuses}, rows(64))


def test_guard_follows_the_device():
    if compat.target_device().platform == "cpu":
        with pytest.raises(NotImplementedError, match="Hopper"):
            compat.require_hopper()
    compat.require_hopper(interpret=compat.InterpretGPUParams())
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=testing.H200)
    with jax.sharding.use_abstract_mesh(mesh):
        compat.require_hopper()
        assert compat.target_device().kind == "NVIDIA H200"
    other = jax.sharding.AbstractDevice(device_kind="NVIDIA A100", platform="gpu", num_cores=108)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=other)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match="A100"):
        compat.require_hopper()
    cpu = jax.devices("cpu")[1]
    with jax.default_device(cpu), pytest.raises(NotImplementedError, match="Hopper"):
        compat.require_hopper()


@pytest.mark.gpu
def test_kernel_matches_reference_on_the_gpu():
    for count in (64, 192, 4096):
        assert_same(rms_norm(rows(count), implementation="mosaic"), rms_norm_xla(rows(count)))


def test_tuning_explicit_then_table_then_heuristic(tmp_path):
    table = tmp_path / "tuning.json"
    key = {"dtype": jnp.bfloat16, "shape": {"width": 128, "rows": tuning.bucket(48)}}

    def choose(explicit=None, device_kind="NVIDIA H200"):
        return tuning.lookup(
            explicit, table, Config, lambda: Config(192), device_kind=device_kind, **key
        )

    assert choose() == Config(192)  # no table at all
    tuning.store(table, {"block_t": 128}, device_kind="NVIDIA H200", us=1.5, **key)
    assert choose() == Config(128)
    assert choose(Config(64)) == Config(64)
    assert choose(device_kind="NVIDIA A100") == Config(192)
    assert json.loads(table.read_text()) == {
        "NVIDIA H200": {"bfloat16 rows=64 width=128": {"config": {"block_t": 128}, "us": 1.5}}
    }
    key["dtype"] = jnp.float32
    assert choose() == Config(192)


def test_tuning_takes_the_device_being_lowered_for(tmp_path):
    table = tmp_path / "tuning.json"
    key = {"dtype": jnp.bfloat16, "shape": {"width": 128}}
    tuning.store(table, {"block_t": 64}, device_kind="NVIDIA H200", **key)

    def kernel(x):
        config = tuning.lookup(None, table, Config, Config, **key)
        assert config == Config(64)
        return rms_norm_mosaic(x, config=config)

    testing.lower_for_h200(kernel, jax.ShapeDtypeStruct((64, 128), jnp.bfloat16))


def test_bad_tuning_entry_is_named(tmp_path):
    table = tmp_path / "tuning.json"
    key = {"dtype": jnp.bfloat16, "shape": {"width": 128}, "device_kind": "NVIDIA H200"}
    tuning.store(table, {"no_such_field": 1}, **key)
    with pytest.raises(ValueError, match=r"tuning\.json.*bfloat16 width=128.*no_such_field"):
        tuning.lookup(None, table, Config, Config, **key)
    tuning.store(table, {"block_t": 40}, **key)
    with pytest.raises(ValueError, match=r"tuning\.json.*block_t=40"):
        tuning.lookup(None, table, Config, Config, **key)


def test_buckets_are_powers_of_two():
    assert [tuning.bucket(n) for n in (0, 1, 2, 3, 8, 9, 1000)] == [1, 1, 2, 4, 8, 16, 1024]
