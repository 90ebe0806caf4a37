"""The KV cache's memory on CPU: zeroed, of every dtype, aligned, and committed only when it is written."""

import pytest
import torch

from engine.runner.kv_cache import zeros
from tests.parity.test_committed import resident

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_is_zeroed_writable_and_aligned(dtype: torch.dtype):
    cache = zeros((3, 2, 16, 8), dtype, CPU)
    assert (tuple(cache.shape), cache.dtype) == ((3, 2, 16, 8), dtype)
    assert cache.data_ptr() % 64 == 0
    assert not cache.any()
    cache[1, 0, 3] = 2.5
    assert cache.sum().item() == 2.5 * 8


def test_memory_is_taken_only_where_it_is_written():
    cache = zeros((2**10, 2**10, 256), torch.float32, CPU)
    assert resident(cache) < 2**24
    cache[:16] = 1.0
    assert 2**24 <= resident(cache) < 2**26


@pytest.mark.parametrize("num_elements", [2**46, 2**100])
def test_memory_that_the_system_refuses_is_an_error_that_names_the_fields(num_elements: int):
    with pytest.raises(ValueError, match="lower cpu_kvcache_gib or num_kvcache_blocks"):
        zeros((num_elements,), torch.float32, CPU)
    with pytest.raises(ValueError, match=r"lower max_num_seqs$"):
        zeros((num_elements,), torch.float32, CPU, lower="max_num_seqs")
