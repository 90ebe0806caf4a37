"""The compiled operators compute what their torch references compute."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import models.kernels
from models.kernels import native
from models.kernels.native import NativeGroupedLinear
from models.layers.grouped_linear import grouped_linear
from models.layers.moe import FusedMoE
from models.layers.routing import softmax_top_k

KERNELS = Path(models.kernels.__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> NativeGroupedLinear:
    library = tmp_path_factory.mktemp("kernels") / "_native.so"
    source = KERNELS / "grouped_linear.c"
    flags = ["-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
    loaded = NativeGroupedLinear(library)
    if not loaded.runs_here:
        pytest.skip("the processor has no AVX512-BF16")
    return loaded


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def computed(
    kernel: NativeGroupedLinear,
    rows: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full((len(rows), weight.shape[1]), torch.nan, dtype=torch.bfloat16)
    kernel(rows, weight, bias, torch.tensor(counts), out)
    return out


def test_where_the_operators_were_not_built_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native.grouped_linear.cache_clear()
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with caplog.at_level("INFO"):
        assert native.grouped_linear() is native.grouped_linear() is None
    native.grouped_linear.cache_clear()
    assert len(caplog.messages) == 1
    assert "installed without a C compiler" in caplog.messages[0]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("counts", [[1], [0, 2, 0], [3, 0, 4, 5], [0, 0, 16, 1, 7, 0], [1] * 9])
def test_each_run_is_multiplied_by_its_expert(
    kernel: NativeGroupedLinear, counts: list[int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows, weight, bias = random(sum(counts), 96), random(len(counts), 20, 96), random(len(counts), 20)
    plain = torch.cat([run.float() @ its.float().T for run, its in zip(rows.split(counts), weight, strict=True)])
    biased = plain + bias.float().repeat_interleave(torch.tensor(counts), 0)
    torch.testing.assert_close(computed(kernel, rows, weight, counts).float(), plain, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(computed(kernel, rows, weight, counts, bias).float(), biased, rtol=2**-8, atol=1e-5)


def test_a_row_is_the_same_whatever_shares_its_batch(kernel: NativeGroupedLinear) -> None:
    rows, weight = random(9, 64), random(1, 8, 64)
    together = computed(kernel, rows, weight, [9])
    for number, row in enumerate(rows):
        assert torch.equal(computed(kernel, row[None], weight, [1])[0], together[number])


def test_only_the_weights_of_active_experts_are_read(kernel: NativeGroupedLinear) -> None:
    weight = random(4, 8, 32)
    weight[[0, 2]] = torch.nan
    assert computed(kernel, random(3, 32), weight, [0, 1, 0, 2]).isfinite().all()


def test_other_types_and_sizes_are_left_to_torch(kernel: NativeGroupedLinear) -> None:
    rows, weight = random(3, 64), random(2, 8, 64)
    assert kernel.takes(rows, weight)
    assert not kernel.takes(rows.float(), weight.float())
    assert not kernel.takes(rows[:, :48], weight[:, :, :48].contiguous())
    assert not kernel.takes(rows, weight[:, :6].contiguous())
    assert not kernel.takes(rows, random(2, 64, 8).transpose(1, 2))


@pytest.mark.parametrize("local_experts", [None, range(2, 5)])
def test_experts_err_no_more_with_the_kernel_than_without(
    kernel: NativeGroupedLinear, local_experts: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FusedMoE(64, 32, 6, bias=True, local_experts=local_experts).bfloat16()
    for parameter in layer.parameters():
        parameter.data.copy_(0.2 * random(*parameter.shape))
    hidden, chosen = random(5, 64), softmax_top_k(random(5, 6), 3, renormalize=True)
    found = []
    for available in (kernel, None):
        monkeypatch.setattr("models.kernels.native.grouped_linear", lambda found=available: found)
        found.append(layer(hidden, *chosen).float())
    exact = layer.float()(hidden.float(), *chosen)
    ours, theirs = ((one - exact).abs() for one in found)
    assert ours.mean() < 1.25 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


def test_rows_past_the_last_run_are_zero(kernel: NativeGroupedLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, counts = random(5, 64), random(2, 8, 64), torch.tensor([1, 2])
    for available in (kernel, None):
        monkeypatch.setattr("models.kernels.native.grouped_linear", lambda found=available: found)
        out = grouped_linear(rows, weight, None, counts)
        assert out[:3].all()
        assert not out[3:].any()
