"""Which row of the table a GPU uses, and the FP8 format in which its hardware reads the cache."""

import pytest
import torch

import models.ops.triton.configs  # noqa: F401, rows of the table
from models.ops.triton import cache_store as cache_view
from models.ops.triton.configs import CONFIGS, TARGETS, config_of, nearest_target
from models.ops.types import AttentionOptions, KVCacheTensor

OPTIONS = AttentionOptions(1.0, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize(
    ("arch", "row"),
    [
        ("gfx942", "gfx942"),
        ("gfx1101", "gfx1100"),
        ("gfx1150", "gfx1151"),
        ("gfx1202", "gfx1201"),
        ("sm_87", "sm_80"),
        ("sm_88", "sm_86"),
        ("sm_100", "sm_90"),
        ("sm_120", "sm_89"),
    ],
)
def test_a_gpu_without_a_row_gets_the_nearest(arch: str, row: str) -> None:
    assert nearest_target(arch).arch == row


@pytest.mark.parametrize("arch", ["gfx1030", "gfx906", "sm_75"])
def test_a_gpu_that_is_like_none_is_refused_in_words(arch: str) -> None:
    with pytest.raises(ValueError, match=f"the GPU is {arch}, for which there are no kernel configurations"):
        nearest_target(arch)


@pytest.mark.parametrize(("arch", "like"), [("gfx908", "gfx90a"), ("gfx1151", "gfx1100"), ("gfx1200", "gfx1201")])
def test_a_gpu_of_amd_that_is_like_another_takes_its_rows_and_has_its_own_limits(arch: str, like: str) -> None:
    target, other = nearest_target(arch), TARGETS[like]
    assert (target.arch, target.like, target.lds_bytes) == (arch, like, 64 * 1024)
    assert (target.fp8, target.warp_size, target.matrix) == (other.fp8, other.warp_size, other.matrix)
    shape = {"head_dim": 128, "element": 2, "rows": 16}
    assert config_of("attention_decode", target, **shape) == config_of("attention_decode", other, **shape)
    options = config_of("attention_decode", target, **shape).options
    assert options(target) == options(other)


@pytest.mark.parametrize(
    ("arch", "kib", "fp8"),
    [
        ("sm_80", 163, None),
        ("sm_86", 99, None),
        ("sm_89", 99, "e4m3fn"),
        ("sm_100", 227, "e4m3fn"),
        ("sm_120", 99, "e4m3fn"),
    ],
)
def test_an_nvidia_gpu_that_is_no_hopper_has_its_own_shared_memory_and_fp8(
    arch: str, kib: int, fp8: str | None
) -> None:
    target = nearest_target(arch)
    assert (target.lds_bytes, target.fp8) == (kib * 1024, fp8)


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        ("latent_attention", {"heads": 128, "sparse": False, "element": 2}),
        ("latent_attention", {"heads": 128, "sparse": True, "element": 2}),
        ("moe_gemm", {"block": 16, "gated": True, "element": 2}),
    ],
)
def test_tiles_that_a_smaller_gpu_has_no_room_for_are_smaller_there(kernel: str, shape: dict[str, object]) -> None:
    hopper, ada = (config_of(kernel, nearest_target(arch), **shape) for arch in ("sm_90", "sm_89"))
    assert hopper != ada
    assert config_of(kernel, nearest_target("sm_80"), **shape) == hopper


def test_the_table_is_written_for_all_that_a_gpu_may_be_like() -> None:
    for rows in CONFIGS.values():
        assert {target.arch for target in TARGETS.values() if not target.like} <= {
            arch for row in rows for arch in row.archs
        }


def test_a_problem_gets_the_first_row_that_is_for_it() -> None:
    target = TARGETS["gfx942"]
    small = config_of("attention_prefill", target, head_dim=128, element=2)
    large = config_of("attention_prefill", target, head_dim=256, element=2)
    assert small.blocks["BLOCK_M"] > large.blocks["BLOCK_M"]
    assert small.options(target)["matrix_instr_nonkdim"] == 16
    assert "matrix_instr_nonkdim" not in small.options(TARGETS["sm_90"])
    with pytest.raises(KeyError):
        config_of("no such kernel", target)


def test_gfx942_reads_the_cache_in_its_own_fp8_by_doubled_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_view, "target_of", lambda device: TARGETS["gfx942"])
    cache, options = cache_view.as_hardware_reads(_cache(torch.float8_e4m3fn), OPTIONS, torch.device("cpu"))
    assert cache.k_cache.dtype is cache.v_cache.dtype is torch.float8_e4m3fnuz
    assert (options.k_scale, options.v_scale) == (1.0, 4.0)


def test_a_gpu_without_fp8_refuses_it_and_takes_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_view, "target_of", lambda device: TARGETS["gfx90a"])
    with pytest.raises(ValueError, match="kv_cache_dtype is fp8, which gfx90a does not compute; set it to auto"):
        cache_view.as_hardware_reads(_cache(torch.float8_e4m3fn), OPTIONS, torch.device("cpu"))
    cache = _cache(torch.bfloat16)
    assert cache_view.as_hardware_reads(cache, OPTIONS, torch.device("cpu")) == (cache, OPTIONS)


def _cache(dtype: torch.dtype) -> KVCacheTensor:
    return KVCacheTensor(torch.zeros(1, 1, 16, 16, dtype=dtype), torch.zeros(1, 1, 16, 16, dtype=dtype))
