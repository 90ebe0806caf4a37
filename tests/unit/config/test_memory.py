"""Numbers of KV-cache blocks and threads of a runner: the rules, for given figures of the machine."""

from pathlib import Path

import pytest

from engine.config.config import Config
from engine.distributed.host_resources import available_host_memory
from engine.runner.memory_sizing import GIB, MemoryBudget, cpu_budget, gpu_budget, kv_cache_size

BLOCK = 1000


def size(
    config: Config,
    num_bytes: int,
    max_model_len: int = 4096,
    max_tokens: int | None = None,
    *,
    block_bytes: int = BLOCK,
    slot_bytes: int = 0,
):
    budget = MemoryBudget(num_bytes, "said so", "cpu_kvcache_gib", max_tokens)
    return kv_cache_size(
        config, block_bytes=block_bytes, slot_bytes=slot_bytes, max_model_len=max_model_len, budget=lambda: budget
    )


def host(root: Path, available_kib: int, cgroup: str | None = None, files: dict[str, object] | None = None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_the_budget_is_filled_with_whole_blocks():
    found = size(Config(), 12_999)
    assert (found.num_blocks, found.num_bytes, found.reason) == (12, 12_000, "said so")


def test_an_explicit_number_of_blocks_wins_and_nothing_is_measured():
    def measure() -> MemoryBudget:
        raise AssertionError("measured")

    config = Config(num_kvcache_blocks=7, max_num_seqs=1)
    found = kv_cache_size(config, block_bytes=BLOCK, slot_bytes=0, max_model_len=16, budget=measure)
    assert (found.num_blocks, found.num_bytes) == (7, 7000)
    assert "num_kvcache_blocks is 7" in found.reason


def test_no_more_blocks_than_all_sequences_could_fill():
    found = size(Config(max_num_seqs=3, kv_cache_block_size=16), 10**9, max_model_len=33)
    assert found.num_blocks == 3 * 3
    assert "3 sequences of 33 tokens" in found.reason


@pytest.mark.parametrize(("max_model_len", "blocks"), [(100, 10), (1000, 63)])
def test_unasked_the_cache_holds_no_more_than_the_most_tokens_or_one_whole_sequence(max_model_len: int, blocks: int):
    assert size(Config(), 10**9, max_model_len, max_tokens=160).num_blocks == blocks


@pytest.mark.parametrize("num_bytes", [BLOCK - 1, 0, -5 * GIB])
def test_room_for_less_than_a_block_is_an_error_that_names_the_field(num_bytes: int):
    with pytest.raises(ValueError, match=r"one block of 16 tokens takes 1000; .*raise cpu_kvcache_gib"):
        size(Config(), num_bytes)


def test_states_are_counted_beside_the_blocks():
    found = size(Config(max_num_seqs=4), 20_500, slot_bytes=2000)
    assert (found.num_slots, found.num_blocks, found.num_bytes) == (4, 12, 20_000)


def test_fewer_sequences_run_where_their_states_would_fill_over_half_of_the_budget():
    found = size(Config(max_num_seqs=512), 20_500, slot_bytes=3000)
    assert (found.num_slots, found.num_blocks) == (3, 11)


def test_states_are_counted_beside_an_explicit_number_of_blocks():
    found = size(Config(max_num_seqs=4, num_kvcache_blocks=7), 0, slot_bytes=50)
    assert (found.num_slots, found.num_bytes) == (4, 7200)


def test_room_for_no_sequences_states_is_an_error_that_names_the_field():
    with pytest.raises(ValueError, match=r"twice the states of one sequence take 20002; .*raise cpu_kvcache_gib"):
        size(Config(), 20_000, slot_bytes=10_001)


def test_a_model_that_keeps_nothing_but_states_has_blocks_that_cost_nothing():
    found = size(Config(max_num_seqs=2), 10**6, max_model_len=100, block_bytes=0, slot_bytes=1000)
    assert (found.num_blocks, found.num_bytes) == (2 * 7, 2000)


def test_cpu_takes_a_quarter_of_what_is_available_up_to_four_gib(tmp_path: Path):
    assert cpu_budget(Config(), host(tmp_path / "small", 8 * 2**20)).num_bytes == 2 * GIB
    assert cpu_budget(Config(), host(tmp_path / "large", 64 * 2**20)).num_bytes == 4 * GIB


def test_a_given_cpu_size_is_taken_as_it_is(tmp_path: Path):
    budget = cpu_budget(Config(cpu_kvcache_gib=0.5), tmp_path / "nothing to read")
    assert budget.num_bytes == GIB // 2
    assert budget.field == "cpu_kvcache_gib"


def test_what_the_largest_step_takes_is_left_to_it(tmp_path: Path):
    root = host(tmp_path, 8 * 2**20)
    assert cpu_budget(Config(), root, activations=4 * GIB).num_bytes == GIB
    assert cpu_budget(Config(), root, activations=9 * GIB).num_bytes == 0
    assert cpu_budget(Config(cpu_kvcache_gib=4), root, activations=4 * GIB).num_bytes == 4 * GIB
    with pytest.raises(ValueError, match=r"cpu_kvcache_gib is 5 and .*max_num_batched_tokens 16384 takes 4.00 GiB"):
        cpu_budget(Config(cpu_kvcache_gib=5), root, activations=4 * GIB)


def test_ranks_share_what_one_would_take(tmp_path: Path):
    root = host(tmp_path, 8 * 2**20)
    assert cpu_budget(Config(), root, ranks=2).num_bytes == GIB
    assert cpu_budget(Config(cpu_kvcache_gib=3), root, ranks=4).num_bytes == 3 * GIB // 4
    # Each needs that much for its steps.
    assert cpu_budget(Config(), root, activations=2 * GIB, ranks=2).num_bytes == GIB // 2
    with pytest.raises(ValueError, match=r"takes 6.00 GiB, but 8.00 GiB are available"):
        cpu_budget(Config(cpu_kvcache_gib=3), root, activations=3 * GIB, ranks=2)


def test_a_control_group_v2_limit_nearer_than_the_systems_memory_counts(tmp_path: Path):
    files = {
        "pods/kaon/memory.max": 3 * GIB,
        "pods/kaon/memory.current": 2 * GIB,
        "pods/kaon/memory.stat": f"anon {GIB}\ninactive_file {GIB // 2}",
    }
    root = host(tmp_path, 64 * 2**20, "0::/pods/kaon\n", files)
    assert available_host_memory(root) == GIB + GIB // 2


def test_the_limit_of_a_parent_group_counts_and_no_limit_does_not(tmp_path: Path):
    files = {
        "pods/memory.max": 2 * GIB,
        "pods/memory.current": GIB,
        "pods/memory.stat": "inactive_file 0",
        "pods/kaon/memory.max": "max",
        "pods/kaon/memory.current": GIB,
        "pods/kaon/memory.stat": "inactive_file 0",
    }
    assert available_host_memory(host(tmp_path, 64 * 2**20, "0::/pods/kaon\n", files)) == GIB


def test_a_container_whose_group_path_is_the_hosts_finds_its_limit_at_the_root(tmp_path: Path):
    files = {"memory.max": GIB, "memory.current": 0, "memory.stat": "inactive_file 0"}
    assert available_host_memory(host(tmp_path, 64 * 2**20, "0::/kubepods/pod7\n", files)) == GIB


def test_a_control_group_v1_limit_counts(tmp_path: Path):
    files = {
        "memory/docker/7/memory.limit_in_bytes": 2 * GIB,
        "memory/docker/7/memory.usage_in_bytes": GIB,
        "memory/docker/7/memory.stat": f"total_inactive_file {GIB // 4}",
    }
    root = host(tmp_path, 64 * 2**20, "5:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n", files)
    assert available_host_memory(root) == GIB + GIB // 4


def test_a_group_over_its_limit_leaves_nothing_and_not_less(tmp_path: Path):
    files = {"memory.max": GIB, "memory.current": 2 * GIB, "memory.stat": "inactive_file 0"}
    assert available_host_memory(host(tmp_path, 64 * 2**20, "0::/\n", files)) == 0


def test_without_control_groups_the_systems_figure_stands(tmp_path: Path):
    assert available_host_memory(host(tmp_path, 1024)) == 2**20


class FakeGpu:
    """80 GiB, of which other processes use 4; the model takes 16 and its worst step 10 more, of which 2 stay
    cached."""

    def __init__(self, slot_bytes: int = 0) -> None:
        self.in_use = self.most = self.reserved = 16 * GIB
        self.slot_bytes = slot_bytes
        self.calls: list[str] = []

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return 76 * GIB - self.reserved

    def held(self) -> int:
        return self.reserved

    def peak(self) -> int:
        return self.most

    def give_back(self) -> None:
        self.calls.append("give_back")
        self.reserved = self.in_use

    def reset_peak(self) -> None:
        self.calls.append("reset_peak")
        self.most = self.in_use

    def step(self, num_seqs: int) -> None:
        self.calls.append(f"step of {num_seqs}")
        self.most = self.in_use + 10 * GIB + num_seqs * self.slot_bytes
        self.reserved += 2 * GIB


def test_a_gpu_gives_what_utilization_leaves_beside_the_peak_and_what_others_hold():
    gpu = FakeGpu()
    config = Config(gpu_memory_utilization=0.5, max_num_seqs=64)
    budget = gpu_budget(config, gpu, gpu.step, block_bytes=GIB, slot_bytes=0)
    assert gpu.calls == ["give_back", "reset_peak", "step of 64"]
    # The block to which the step wrote is part of the cache.
    assert budget.num_bytes == (40 - 25 - 4) * GIB
    assert budget.field == "gpu_memory_utilization"
    assert "50% of 80.00 GiB, less 25.00 GiB at the peak" in budget.reason
    # The probabilities that rejection sampling stores for drafts are allocated while steps run.
    other = FakeGpu()
    keeping = gpu_budget(config, other, other.step, block_bytes=GIB, slot_bytes=0, kept_bytes=3 * GIB)
    assert keeping.num_bytes == budget.num_bytes - 3 * GIB


@pytest.mark.parametrize(("slot_bytes", "num_seqs"), [(GIB // 8, 64), (GIB, 28), (100 * GIB, 1)])
def test_states_of_the_worst_case_step_are_the_caches_own(slot_bytes: int, num_seqs: int) -> None:
    """They are for at most as many sequences as fit in half of the free 60 GiB, in sixteenths of all."""
    gpu = FakeGpu(slot_bytes)
    gpu.reserved += 20 * GIB  # Cached by torch, and released first.
    budget = gpu_budget(Config(max_num_seqs=64), gpu, gpu.step, block_bytes=0, slot_bytes=slot_bytes)
    assert gpu.calls == ["give_back", "reset_peak", f"step of {num_seqs}"]
    assert budget.num_bytes == (72 - 26 - 4) * GIB
    size = kv_cache_size(
        Config(max_num_seqs=64), block_bytes=1, slot_bytes=1, max_model_len=100, budget=lambda: budget
    )
    assert size.num_slots == num_seqs


def test_ranks_with_other_room_measure_a_step_of_as_many_sequences() -> None:
    roomy, full = FakeGpu(GIB), FakeGpu(GIB)
    full.in_use = full.reserved = 40 * GIB
    for gpu, other in ((roomy, full), (full, roomy)):
        answers = iter([other.free() // 2 >= 64 * share // 16 * GIB for share in range(16, 0, -1)])
        gpu_budget(
            Config(max_num_seqs=64),
            gpu,
            gpu.step,
            block_bytes=0,
            slot_bytes=GIB,
            agree=lambda is_so, answers=answers: next(answers) and is_so,
        )
    assert roomy.calls == full.calls == ["give_back", "reset_peak", "step of 16"]


@pytest.mark.parametrize(
    ("block_bytes", "missing"),
    [
        (GIB, r"0\.50 GiB"),
        (GIB // 2 + 2**21, r"2\.00 MiB"),
        (GIB // 2 + 4000, r"3\.91 KiB"),
        (GIB // 2 + 1, "1 bytes"),
    ],
)
def test_a_cache_without_room_for_a_block_says_how_much_is_missing(block_bytes: int, missing: str) -> None:
    found = MemoryBudget(GIB // 2, "half a GiB is left", "gpu_memory_utilization")
    with pytest.raises(ValueError, match=f"{missing} are missing: free memory or raise gpu_memory_utilization$"):
        kv_cache_size(Config(), block_bytes=block_bytes, slot_bytes=0, max_model_len=100, budget=lambda: found)
