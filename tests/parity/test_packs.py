"""Packed weights on disk: a start from them has the same model, and a file with a fault costs only time."""

import errno
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from models.architectures.config import ModelConfig
from models.layers.parameter import packed_of
from models.loading import loader, packs
from models.loading.loader import load_model
from models.loading.packs import PackCache
from models.loading.quantize import write_quantized
from models.ops.cpu import dense, runtime
from models.quantization.config import Rounding
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import CPU
from tests.parity.test_quantization import first_family

pytestmark = pytest.mark.skipif(
    runtime.load_library() is None, reason="the operators were not built: install again where there is a C compiler"
)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small models be kept, also on a disk that is nearly full."""
    monkeypatch.setattr(packs, "_LEAST_BYTES", 0)
    monkeypatch.setattr(packs, "_FREE_SHARE", 0.0)
    runtime.start(2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", dtype=torch.bfloat16)


@pytest.fixture
def cache(tmp_path: Path) -> PackCache:
    return PackCache(tmp_path / "cache" / "packs", GIB, 2)


def load(
    path: Path, cache: PackCache | None, rounding: Rounding | None = None
) -> tuple[dict[str, torch.Tensor], bool]:
    """The memory of each parameter, and whether the checkpoint's weights were read."""
    reads = []
    real = loader._read

    def read(*arguments: Any, **options: Any) -> bool:
        reads.append(1)
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_read", read)
        config = ModelConfig.from_checkpoint(path)
        model: Any = load_model(
            path, config, dtype=torch.bfloat16, device=CPU, progress=False, packs=cache, rounding=rounding
        )
    if cache is not None:
        cache.write()
    return {
        name: parameter.data if (packed := packed_of(parameter)) is None else packed.memory.view(torch.uint8)
        for name, parameter in model.named_parameters()
    }, bool(reads)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("form", ["dense", "int8", "int4", "mxfp4", "awq", "gpt-oss", "experts"])
def test_the_second_start_maps_what_the_first_has_packed(form: str, tmp_path: Path, cache: PackCache) -> None:
    rounding: Any = form if form in ("int8", "int4", "mxfp4") else None
    if form == "awq":
        path = q.write_pair(tmp_path, q.awq, q.AWQ_CONFIG).quantised
    elif form == "gpt-oss":
        sizes = {"intermediate_size": 128, "hidden_size": 64}
        path = q.write_gpt_oss_pair(tmp_path, first_family("GptOssForCausalLM"), **sizes).quantised
    else:
        family = first_family("Qwen3MoeForCausalLM") if form == "experts" else "llama"
        path = make_checkpoint(tmp_path / "dense", family, dtype=torch.bfloat16)
    first, is_read = load(path, cache, rounding)
    assert is_read
    second, is_read = load(path, cache, rounding)
    assert not is_read
    assert same(first, second)
    # Writes of a process to its weights are private.
    next(iter(second.values())).view(torch.uint8).fill_(7)
    third, is_read = load(path, cache, rounding)
    assert not is_read
    assert same(first, third)


def test_a_file_is_of_one_content_and_one_way_of_loading(checkpoint: Path, cache: PackCache) -> None:
    load(checkpoint, cache)
    assert load(checkpoint, cache, "int8")[1]
    assert not load(checkpoint, cache)[1]
    q.change(checkpoint, lambda tensors: tensors["model.norm.weight"].add_(1))
    first, is_read = load(checkpoint, cache)
    assert is_read
    assert same(first, load(checkpoint, None)[0])
    edit_json(checkpoint / "config.json", rms_norm_eps=1e-3)
    assert load(checkpoint, cache)[1]


def test_weights_are_written_while_no_operator_runs(
    checkpoint: Path, cache: PackCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = runtime.load_library()
    counts = itertools.count()
    has_ended = threading.Event()
    has_looked = threading.Semaphore(0)

    def activity() -> int:
        has_looked.release()
        return 0 if has_ended.is_set() else next(counts)

    monkeypatch.setattr(packs, "_PAUSE_FACTOR", 1e9)
    monkeypatch.setattr(packs, "_QUIET_SECONDS", 1e-9)
    monkeypatch.setattr(library, "activity", activity)
    config = ModelConfig.from_checkpoint(checkpoint)
    load_model(checkpoint, config, dtype=torch.bfloat16, device=CPU, progress=False, packs=cache)
    writer = threading.Thread(target=cache.write)
    writer.start()
    for _ in range(10):
        has_looked.acquire()
    assert not list(cache.directory.glob("*.pack"))
    has_ended.set()
    writer.join()
    assert not load(checkpoint, cache)[1]


def test_a_run_of_operators_counts_as_activity_when_it_begins_and_when_it_ends() -> None:
    library = runtime.load_library()
    assert library is not None
    before = library.activity()
    assert before % 2 == 0
    dense.rms_norm(torch.ones(1, 32).bfloat16(), torch.ones(32).bfloat16(), 1e-5)
    assert library.activity() == before + 2


@pytest.mark.parametrize("injury", ["cut", "header", "weight", "short", "empty", "writable"])
def test_a_damaged_file_is_removed_and_the_checkpoint_read(
    injury: str, checkpoint: Path, cache: PackCache, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = load(checkpoint, cache)
    (file,) = cache.directory.glob("*.pack")
    content = bytearray(file.read_bytes())
    if injury == "writable":
        file.chmod(0o666)
    else:
        position = {"cut": 0, "header": 40, "weight": len(content) // 2, "short": 0, "empty": 0}[injury]
        content[position] ^= injury in ("header", "weight")
        file.write_bytes(content[: {"cut": len(content) - 9000, "short": 10, "empty": 0}.get(injury, len(content))])
    found, is_read = load(checkpoint, cache)
    assert is_read
    assert same(found, expected)
    assert "is not used, and removed" in caplog.text
    # It was written again.
    assert not load(checkpoint, cache)[1]


def test_a_full_disk_and_a_directory_that_cannot_be_written_are_logged(
    checkpoint: Path, cache: PackCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        assert load(checkpoint, cache)[1]
    assert list(cache.directory.iterdir()) == []
    blocked = cache.directory / "file"
    blocked.touch()
    assert load(checkpoint, PackCache(blocked / "packs", GIB))[1]
    assert "No space left on device" in caplog.text
    assert "File exists" in caplog.text


@pytest.mark.parametrize("trap", ["linked", "writable", "of a group"])
def test_a_directory_that_others_could_fill_is_not_used(
    trap: str, tmp_path: Path, checkpoint: Path, cache: PackCache, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "history.pack").write_bytes(b"of another program")
    cache.directory.parent.mkdir()
    if trap == "linked":
        cache.directory.symlink_to(foreign)
    else:
        cache.directory.mkdir()
        cache.directory.chmod(0o777 if trap == "writable" else 0o2770)
    with caplog.at_level("INFO"):
        assert load(checkpoint, cache)[1]
        assert load(checkpoint, cache)[1]
    assert "is not a directory of this user alone" in caplog.text
    assert not list(cache.directory.glob("*-*.pack"))
    assert [each.name for each in foreign.iterdir()] == ["history.pack"]


def test_a_volume_of_a_group_holds_a_directory_of_this_user_alone(tmp_path: Path, checkpoint: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2770)  # As Kubernetes creates it for a pod with fsGroup.
    cache = PackCache(volume / "kaon" / "packs", GIB)
    assert load(checkpoint, cache)[1]
    assert not load(checkpoint, cache)[1]


def test_the_files_used_longest_ago_make_room(tmp_path: Path, cache: PackCache) -> None:
    paths = [make_checkpoint(tmp_path / str(number), dtype=torch.bfloat16) for number in range(3)]
    load(paths[0], cache)
    (file,) = cache.directory.glob("*.pack")
    os.utime(file, (1, 1))
    cache.most_bytes = int(2.9 * file.stat().st_size)
    load(paths[1], cache)
    assert not load(paths[0], cache)[1]
    (second,) = set(cache.directory.glob("*.pack")) - {file}
    os.utime(second, (2, 2))
    load(paths[2], cache)
    assert file.exists()
    assert not second.exists()
    cache.most_bytes = 1000
    assert load(paths[1], cache)[1]
    assert file.exists()


def test_what_an_ended_process_left_is_removed_and_what_another_writes_stays(
    checkpoint: Path, cache: PackCache
) -> None:
    cache.directory.mkdir(parents=True)
    left, written = cache.directory / ".left.tmp", cache.directory / ".written.tmp"
    left.touch()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=_hold, args=(written, theirs))
    other.start()
    ours.recv()
    load(checkpoint, cache)
    assert not left.exists()
    assert written.exists()
    ours.send("end")
    other.join()


def _hold(path: Path, connection: Any) -> None:
    import fcntl

    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        connection.send("held")
        connection.recv()


def test_a_written_checkpoint_is_kept_like_any_other(checkpoint: Path, tmp_path: Path, cache: PackCache) -> None:
    write_quantized(checkpoint, tmp_path / "out", "int8")
    first, _ = load(tmp_path / "out", cache, "int8")
    second, is_read = load(tmp_path / "out", cache, "int8")
    assert not is_read
    assert same(first, second)


def test_processes_of_any_hash_seed_find_the_same_file(tmp_path: Path) -> None:
    """A quantised checkpoint, whose weights that stay quantised are a set of names."""
    checkpoint = make_checkpoint(tmp_path / "model", hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    write_quantized(checkpoint, tmp_path / "out", "int8")
    script = (
        "import sys; from pathlib import Path; import torch; from models.architectures.config import ModelConfig\n"
        "from models.loading import loader, packs; from models.ops.cpu import runtime; runtime.start(1)\n"
        "packs._LEAST_BYTES = 0; packs._FREE_SHARE = 0.0; path = Path(sys.argv[1])\n"
        "cache = packs.PackCache(Path(sys.argv[2]), 1 << 30); cpu = torch.device('cpu')\n"
        "loader.load_model(path, ModelConfig.from_checkpoint(path), dtype=torch.bfloat16, device=cpu, progress=False,"
        " packs=cache)\n"
        "sys.stdout.write(str(cache._unwritten is None)); cache.write()"
    )
    found = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script, tmp_path / "out", tmp_path / "packs"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert found == ["False", "True"]


def test_only_a_thread_in_the_background_writes_at_the_lowest_priority(checkpoint: Path, cache: PackCache) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    load(checkpoint, cache)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
