"""The device on which a rank of a replica computes."""

import pytest
import torch

from engine.config.config import Config, ParallelConfig
from engine.distributed.cluster import spread_evenly
from engine.distributed.host_resources import HostShare, Shard
from engine.runner import build


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "require_backend", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def device_of(replicas: int, ranks: int, replica: int, rank: int, device: str = "cuda") -> torch.device:
    parallel = ParallelConfig(data_parallel_size=replicas, tensor_parallel_size=ranks)
    config = Config.model_validate({"parallel_config": parallel, "device": device})
    shard = None if ranks == 1 else Shard(rank, ranks, rank, ranks, "", None, 0)
    return build._resolve_device(config, shard, HostShare(replica, replica, replicas))


@pytest.mark.parametrize(("replicas", "ranks"), [(4, 1), (2, 2), (1, 4), (2, 1)])
def test_each_rank_of_each_replica_has_a_gpu_of_its_own_and_neighbours_in_its_replica(
    replicas: int, ranks: int
) -> None:
    found = [device_of(replicas, ranks, replica, rank) for replica in range(replicas) for rank in range(ranks)]
    assert found == [torch.device("cuda", number) for number in range(replicas * ranks)]


@pytest.mark.parametrize(
    ("hip", "kind", "is_left"), [("7.2", "cuda", True), (None, "cuda", False), (None, "cpu", False)]
)
def test_steps_leave_the_default_stream_on_amd_gpus(
    hip: str | None, kind: str, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[object] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    build._leave_default_stream(torch.device(kind))
    assert streams == (["stream of cuda"] if is_left else [])


def test_one_engine_takes_the_device_that_the_user_sees_first() -> None:
    assert device_of(1, 1, 0, 0) == torch.device("cuda")


@pytest.mark.parametrize(
    ("replicas", "ranks", "sentence"),
    [
        (5, 1, "data_parallel_size is 5, which takes 5 GPUs, but this machine has 4; set it to at most 4"),
        (1, 8, "tensor_parallel_size is 8, which takes 8 GPUs, but this machine has 4; set it to at most 4"),
        (
            2,
            4,
            "data_parallel_size is 2 and tensor_parallel_size is 4, which takes 8 GPUs, but this machine has 4; set "
            "them to a product of at most 4",
        ),
    ],
)
def test_more_than_there_are_is_refused_in_a_sentence_by_every_replica(
    replicas: int, ranks: int, sentence: str
) -> None:
    for replica in range(replicas):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            device_of(replicas, ranks, replica, 0)


@pytest.mark.parametrize(("size", "per_host"), [(2, 1), (8, 4)])
def test_ranks_share_out_the_gpus_of_their_own_host(size: int, per_host: int) -> None:
    config = Config.model_validate({"parallel_config": {"tensor_parallel_size": size}, "device": "cuda"})
    for rank in range(size):
        shard = Shard(rank, size, rank % per_host, per_host, "", None, 0)
        assert build._resolve_device(config, shard, HostShare()) == torch.device("cuda", rank % per_host)


def test_more_ranks_on_a_host_than_it_has_gpus_are_refused_in_a_sentence() -> None:
    config = Config.model_validate({"parallel_config": {"tensor_parallel_size": 16}, "device": "cuda"})
    sentence = (
        "tensor_parallel_size is 16, which takes 8 GPUs on each host, but this machine has 4; set it to at most 8"
    )
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        build._resolve_device(config, Shard(8, 16, 0, 8, "", None, 0), HostShare())


def test_on_the_cpu_replicas_need_no_gpus() -> None:
    assert device_of(64, 2, 63, 1, "cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("replicas", "ranks", "replica", "rank", "place"),
    [(1, 1, 0, 0, (0, 1)), (1, 2, 0, 1, (1, 2)), (3, 1, 2, 0, (2, 3)), (2, 2, 1, 0, (2, 4)), (2, 2, 1, 1, (3, 4))],
)
def test_cores_are_shared_out_over_the_ranks_of_all_replicas(
    replicas: int, ranks: int, replica: int, rank: int, place: tuple[int, int]
) -> None:
    shard = None if ranks == 1 else Shard(rank, ranks, rank, ranks, "", None, 0)
    assert build._rank_on_host(shard, HostShare(replica, replica, replicas)) == place


@pytest.mark.parametrize(("replicas", "ranks"), [(8, 1), (4, 2), (2, 4)])
def test_on_two_hosts_each_has_half_of_the_replicas_and_all_gpus_for_them(replicas: int, ranks: int) -> None:
    parallel = ParallelConfig(data_parallel_size=replicas, tensor_parallel_size=ranks, nnodes=2)
    config = Config.model_validate({"parallel_config": parallel, "device": "cuda"})
    found = []
    for replica, (_, place, places) in enumerate(spread_evenly(replicas, 2)):
        for rank in range(ranks):
            shard = None if ranks == 1 else Shard(rank, ranks, rank, ranks, "", None, 0)
            found.append(build._resolve_device(config, shard, HostShare(replica, place, places)))
    assert found == [torch.device("cuda", number) for number in range(4)] * 2


def test_more_replicas_on_a_host_than_it_has_gpus_are_refused_in_a_sentence() -> None:
    parallel = ParallelConfig(data_parallel_size=16, nnodes=2)
    config = Config.model_validate({"parallel_config": parallel, "device": "cuda"})
    sentence = "data_parallel_size is 16, which takes 8 GPUs on each host, but this machine has 4; set it to at most 8"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        build._resolve_device(config, None, HostShare(9, 1, 8))
