"""`PackCache`: a disk cache of models packed for the CPU operators; the next start maps its weights into memory.

A file holds every parameter of one model in the operators' layout. Its name is a digest of everything that its content
depends on: size and modification time of the checkpoint's files, the form of each weight, and the code that reads and
packs them. Files are mapped privately: processes share the memory, and none can change another's weights.

    magic, length and digest of the header | header, JSON | segments, each at a multiple of 4096 bytes

A file is written under a temporary name and renamed, while the engine is idle or else at a slow pace, since writing
takes memory bandwidth from the steps. A damaged file is removed. Whenever no file can be used (it is
damaged, the directory is not writable, the disk is full), the model is read from the checkpoint. The least recently
used files are evicted once the cache exceeds `most_bytes`.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import mmap
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from models.layers.mla import MLAAttention
from models.layers.parameter import packed_of, restore_packed
from models.ops.cpu import runtime

_log = logging.getLogger(__name__)

_MAGIC = b"KAONPCK1"
_PREAMBLE = struct.Struct("<8sQ8s")
_ALIGNED = 4096
_LEAST_BYTES = 64 << 20
"""A model of fewer bytes is not cached, since it is read from its checkpoint as fast as it is mapped."""
_WRITE_BYTES = 2 << 20
_QUIET_SECONDS = 0.005
"""Operators that have not run for this long are idle: between the decode steps of a stream they rest less."""
_PAUSE_FACTOR = 12
"""While steps run, the writer pauses for this many times as long as it has worked, a few milliseconds at a time."""
_DIGITS = 24
_RELEASES = 2
"""Files kept per model: of the current code version and of the one used before it."""
_FREE_SHARE = 0.1
"""Share of the disk that is left free."""
_CODE = Path(__file__).parents[1]
"""The package that reads and packs weights."""


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/kaon/packs`, by default `~/.cache/kaon/packs`.

    Raises `RuntimeError` if the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kaon" / "packs"


class _Segment(NamedTuple):
    """The entry of one parameter in a file's header."""

    name: str
    shape: list[int]
    dtype: str
    form: list[Any] | None
    """`PackedWeight.form` of a packed weight; None if the segment is the dense parameter."""
    offset: int
    num_bytes: int
    digest: str


@dataclass(slots=True)
class PackCache:
    """The cache files of one directory, which several processes may use at the same time."""

    directory: Path
    most_bytes: int
    """Limit of the total size of all files."""
    threads: int = 1
    """Number of threads that verify a file's digests."""
    _unwritten: tuple[nn.Module, str] | None = None
    """The model that `keep` scheduled for writing, and its key."""

    def restore(self, model: nn.Module, key: str) -> bool:
        """Fill an unfilled model from its file. Return False if there is no intact file."""
        path = self.directory / f"{key}.pack"
        try:
            _check_directory(self.directory)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.warning("packed weights are neither read nor kept: %s", error)
            return False
        try:
            mapped, segments = _open(path)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            self._discard(path, error)
            return False
        parameters = dict(model.named_parameters())
        shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
        if {segment.name: segment.shape for segment in segments} != shapes:
            self._discard(path, "it is of another model")
            return False
        whole = memoryview(mapped)
        with ThreadPoolExecutor(self.threads) as pool:
            digests = pool.map(lambda each: _digest(whole[each.offset : each.offset + each.num_bytes]), segments)
            if list(digests) != [segment.digest for segment in segments]:
                self._discard(path, "a part of it is not what was written")
                return False
        try:
            for segment in segments:
                _fill(parameters[segment.name], segment, mapped)
        except ValueError as error:
            self._discard(path, error)
            return False
        with contextlib.suppress(OSError):
            os.utime(path)  # Eviction is ordered by modification time.
        _log.info("weights are mapped from %s", path)
        return True

    def keep(self, model: nn.Module, key: str) -> None:
        """Schedule a filled model for `write`, if it can be restored and is at least `_LEAST_BYTES` large."""
        parameters = list(model.named_parameters())
        if sum(_bytes_of(parameter) for _, parameter in parameters) >= _LEAST_BYTES and can_keep(model):
            self._unwritten = model, key

    def write_in_background(self) -> None:
        """Write the scheduled model in a background thread of the lowest priority, which gives way to steps."""
        if self._unwritten is not None:
            threading.Thread(target=self._write_slowly, name="kaon-packs", daemon=True).start()

    def _write_slowly(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        self.write()

    def write(self) -> None:
        """Write the scheduled model. An `OSError` is logged and not raised, since the cache is optional."""
        if self._unwritten is None:
            return
        model, key = self._unwritten
        self._unwritten = None
        try:
            self._write(model, key)
        except OSError as error:
            _log.info("the packed weights are not kept in %s for the next start (%s)", self.directory, error)

    def _write(self, model: nn.Module, key: str) -> None:
        began = time.monotonic()
        self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        _check_directory(self.directory)
        needed = sum(_bytes_of(parameter) + _ALIGNED for parameter in model.parameters())
        if needed > self.most_bytes:
            _log.info("the packed weights are not kept: they take %.2f GiB, over pack_cache_gib", needed / 2**30)
            return
        self._make_room(key, needed)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.directory)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                # The lock shows `_make_room` of other processes that this file is still being written.
                fcntl.flock(file, fcntl.LOCK_EX)
                _write_file(file.fileno(), model, needed)
                os.fsync(file)
                os.rename(name, self.directory / f"{key}.pack")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _log.info("the packed weights are kept in %s, in %.1f s", self.directory, time.monotonic() - began)

    def _make_room(self, key: str, needed: int) -> None:
        """Remove unfinished files of dead processes, and evict files until `needed` bytes fit.

        Raises `OSError` if they do not fit the disk even then.
        """
        model = key.partition("-")[0]
        for path in self.directory.glob(".*.tmp"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        files = []
        for path in self.directory.glob("*.pack"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        files.sort(reverse=True)
        for _, _, path in [file for file in files if file[2].name.startswith(f"{model}-")][_RELEASES - 1 :]:
            path.unlink(missing_ok=True)
        files = [file for file in files if file[2].exists()]
        disk = os.statvfs(self.directory)
        free = disk.f_bavail * disk.f_frsize - int(_FREE_SHARE * disk.f_blocks * disk.f_frsize)
        used = sum(size for _, size, _ in files)
        while files and (used + needed > self.most_bytes or needed > free):
            _, size, path = files.pop()
            path.unlink(missing_ok=True)
            used, free = used - size, free + size
        if needed > free:
            raise OSError(f"the disk has too little room for {needed / 2**30:.2f} GiB")

    @staticmethod
    def _discard(path: Path, reason: object) -> None:
        _log.warning("%s is not used, and removed: %s", path, reason)
        with contextlib.suppress(OSError):
            path.unlink()


def can_keep(model: nn.Module) -> bool:
    """Whether the model can be restored from its parameters alone.

    MLA layers cannot: they keep a packed copy of `kv_b_proj` that is no parameter.
    """
    if any(isinstance(module, MLAAttention) for module in model.modules()):
        return False
    packed = (packed_of(parameter) for parameter in model.parameters())
    return all(each is None or each.form is not None for each in packed)


def key_of(model: nn.Module, files: list[Path], *settings: object) -> str:
    """Return the file name of an unfilled model: a digest of the model, and one of the code that fills it.

    `files`: the checkpoint files from which its weights are read. `settings`: other values on which the weights
    depend.
    """
    sources = sorted(_CODE.rglob("*.py")) + sorted(_CODE.glob("ops/cpu/*.so"))
    digest = hashlib.sha256(_digest_of(files).encode())
    library = runtime.load_library()
    digest.update(repr((None if library is None else library.isa, type(model).__qualname__, settings)).encode())
    for name, parameter in model.named_parameters():
        packed = packed_of(parameter)
        kind = None if packed is None else (type(packed).__name__, packed.options, packed.memory.nbytes)
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype} {kind}\n".encode())
    return f"{digest.hexdigest()[:_DIGITS]}-{_digest_of(sources)[:_DIGITS]}"


def _digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the files' paths, sizes and modification times."""
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(f"{file.resolve()} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _bytes_of(parameter: nn.Parameter) -> int:
    packed = packed_of(parameter)
    return parameter.nbytes if packed is None else packed.memory.nbytes


def _bytes(memory: torch.Tensor) -> memoryview:
    return memory.contiguous().flatten().view(torch.uint8).numpy().data if memory.numel() else memoryview(b"")


def _digest(data: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _memories(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[Any] | None, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        packed = packed_of(parameter)
        if packed is None:
            yield name, parameter, None, parameter.data
        else:
            yield name, parameter, packed.form, packed.memory


def _write_file(file: int, model: nn.Module, room: int) -> None:
    """Write a filled model to a file descriptor. `room`: upper limit of the file's size. Raises `OSError`."""
    # Allocating first makes a full disk fail before anything is written.
    os.posix_fallocate(file, 0, room)
    pace = _Pace()
    segments, offset = [], 0
    for name, parameter, form, memory in _memories(model):
        digest = xxhash.xxh3_128()
        data = _bytes(memory)
        for start in range(0, len(data), _WRITE_BYTES):
            digest.update(data[start : start + _WRITE_BYTES])
            pace.give_way()
        dtype = str(memory.dtype).removeprefix("torch.")
        segments.append(_Segment(name, list(parameter.shape), dtype, form, offset, memory.nbytes, digest.hexdigest()))
        offset += -(-memory.nbytes // _ALIGNED) * _ALIGNED
    # Offsets are relative to the aligned end of the header, because the header's length depends on their digits.
    header = json.dumps(segments).encode()
    first = -(-(_PREAMBLE.size + len(header)) // _ALIGNED) * _ALIGNED
    os.truncate(file, first + offset)
    preamble = _PREAMBLE.pack(_MAGIC, len(header), xxhash.xxh3_64_digest(header)) + header
    pieces = itertools.chain([memoryview(preamble)], (_bytes(memory) for *_, memory in _memories(model)))
    _write_aligned(file, pieces, pace)


def _write_aligned(file: int, pieces: Iterable[memoryview], pace: "_Pace") -> None:
    """Write the pieces in order, each padded to a multiple of 4096 bytes.

    Writes are 2 MiB at multiples of 2 MiB, so that the page cache can hold them in huge pages, which are mapped so.
    """
    buffer, filled, offset = memoryview(bytearray(_WRITE_BYTES)), 0, 0
    for piece in pieces:
        for part in (piece, memoryview(bytes(-len(piece) % _ALIGNED))):
            left = part
            while left:
                count = min(len(left), _WRITE_BYTES - filled)
                buffer[filled : filled + count] = left[:count]
                filled, left = filled + count, left[count:]
                if filled == _WRITE_BYTES:
                    _write_all(file, buffer, offset)
                    filled, offset = 0, offset + _WRITE_BYTES
                    pace.give_way()
    _write_all(file, buffer[:filled], offset)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


class _Pace:
    """Lets the CPU operators have the memory bandwidth: the writer works while they are idle, and else seldom."""

    def __init__(self) -> None:
        self._library = runtime.load_library()
        self._resumed = time.monotonic()

    def give_way(self) -> None:
        """Return at once after little work; else wait until the operators are idle, or `_PAUSE_FACTOR` times as long
        as the work took."""
        library, worked = self._library, time.monotonic() - self._resumed
        if library is None or worked < _QUIET_SECONDS:
            return
        until = time.monotonic() + _PAUSE_FACTOR * worked
        before = library.activity()
        while time.monotonic() < until:
            time.sleep(_QUIET_SECONDS)
            if before == (before := library.activity()) and before % 2 == 0:
                break
        self._resumed = time.monotonic()


def _check_directory(directory: Path) -> None:
    """Raise `OSError` if another user could add or replace files; XDG_CACHE_HOME may be a world-writable directory."""
    for path, others in ((directory.parent, 0o002), (directory, 0o022)):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & others:
            raise PermissionError(
                f"{path} is not a directory of this user alone; remove it, or set XDG_CACHE_HOME; for a "
                "pod with fsGroup set fsGroupChangePolicy to OnRootMismatch first"
            )


def _open(path: Path) -> tuple[mmap.mmap, list[_Segment]]:
    """Map a file, and return it with its segments, whose offsets are made absolute.

    Raises `OSError` if the file cannot be read, and `ValueError` if it is damaged or writable by other users.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError("others may write it")
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError):  # A kernel may be built without transparent huge pages.
            mapped.madvise(mmap.MADV_HUGEPAGE)
    if len(mapped) < _PREAMBLE.size:
        raise ValueError("it ends too soon")
    magic, length, digest = _PREAMBLE.unpack_from(mapped)
    header = mapped[_PREAMBLE.size : _PREAMBLE.size + length]
    if magic != _MAGIC or xxhash.xxh3_64_digest(header) != digest:
        raise ValueError("its header is not what was written")
    first = -(-(_PREAMBLE.size + length) // _ALIGNED) * _ALIGNED
    segments = [_Segment(*fields) for fields in json.loads(header)]
    segments = [each._replace(offset=first + each.offset) for each in segments]
    if any(each.offset + each.num_bytes > len(mapped) for each in segments):
        raise ValueError("it ends too soon")
    return mapped, segments


def _fill(parameter: nn.Parameter, segment: _Segment, mapped: mmap.mmap) -> None:
    dtype: torch.dtype = getattr(torch, segment.dtype)
    count = segment.num_bytes // dtype.itemsize
    memory = torch.empty(0, dtype=dtype)
    if count:
        memory = torch.frombuffer(mapped, dtype=dtype, count=count, offset=segment.offset)
    if segment.form is None:
        parameter.data = memory.view(segment.shape)
    else:
        restore_packed(parameter, segment.form, memory)
