"""Reports what this machine has and what is wrong with it: `python -m engine.commands.doctor`, JSON for `kaon doctor`.

It runs in a child process, so that a crash of a driver or a library is reported as a finding.
"""

import contextlib
import ctypes
import getpass
import grp
import logging
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.doctor_report import Facts, Gpu, Report, problems
from engine.text import sandbox

if TYPE_CHECKING:
    import torch

    from models.ops.cpu.runtime import Library


# Free memory of a GPU as its driver reports it: AMD's in sysfs, NVIDIA's through its management library, NVML.
#
# No context is created on the GPU, which would take seconds and memory.

_NVML = "libnvidia-ml.so.1"


class _NvmlMemory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def pci_address(properties: Any) -> str | None:
    """A GPU's PCI address from torch's device properties, `0000:c1:00.0`; None where they lack it."""
    try:
        domain, bus, device = (getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device"))
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def free_memory(address: str | None, root: Path = Path("/sys")) -> int | None:
    """Free bytes of the GPU at a PCI address; None where no driver reports them."""
    if address is None:
        return None
    device = root / "bus/pci/devices" / address
    with suppress(OSError, ValueError):
        total, used = (int((device / f"mem_info_vram_{what}").read_text()) for what in ("total", "used"))
        return total - used
    with suppress(OSError):
        return free_by_nvml(ctypes.CDLL(_NVML), address)
    return None


def free_by_nvml(nvml: Any, address: str) -> int | None:
    """Free bytes by NVIDIA's management library."""
    if nvml.nvmlInit_v2():
        return None
    try:
        device, memory = ctypes.c_void_p(), _NvmlMemory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(device)):
            return None
        return None if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else int(memory.free)
    finally:
        nvml.nvmlShutdown()


MIB, GIB = 2**20, 2**30
_TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm")
"""Names of Triton's package: for torch on CUDA, on ROCm, and on ROCm up to torch 2.9."""


def gather() -> Facts:
    """Gather all facts. Takes seconds, since kernels are compiled and run."""
    closed, groups = _closed_devices()
    facts = Facts(
        user=_user(),
        python=platform.python_version(),
        has_kfd=Path("/dev/kfd").exists(),
        has_nvidia=_has_nvidia(),
        closed_devices=closed,
        closed_groups=groups,
        shared_memory_mib=_shared_memory(),
        sandbox_gaps=sandbox.gaps(),
        has_numa_balancing=_has_numa_balancing(),
    )
    try:
        import torch  # noqa: F401
    # A broken installation may raise any exception; its text is reported.
    except Exception as error:  # noqa: BLE001
        return msgspec.structs.replace(facts, torch_error=f"{type(error).__name__}: {error}")
    return _with_torch(facts)


def _with_torch(facts: Facts) -> Facts:
    import importlib.metadata

    import torch

    from engine.distributed.host_resources import available_host_memory
    from models.ops import registry as backends
    from models.ops.cpu.runtime import INSTRUCTION_SETS, load_library

    library = load_library()
    versions: dict[str, str | None] = {}
    for name in (*_TRITON_NAMES, "aiter", "amd-aiter"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts = msgspec.structs.replace(
        facts,
        torch=str(torch.__version__),
        build=_build(),
        gpus=_gpus(),
        gpu_error=_gpu_error(),
        triton=next((versions[name] for name in _TRITON_NAMES if name in versions), None),
        aiter=versions.get("aiter") or versions.get("amd-aiter"),
        cpu_library=None if library is None else INSTRUCTION_SETS[library.isa],
        memory_gib=available_host_memory() / GIB,
    )
    if not facts.gpus:
        if library is not None:
            facts = _with_operators(facts, library)
        by = "torch" if library is None else f"the {facts.cpu_library} operators"
        named = tuple(f"{operator} by {by}" for operator in backends.OPERATORS)
        return msgspec.structs.replace(facts, operators=named)
    from models.ops import triton
    from models.ops.aiter import probe
    from models.ops.triton import probe as ptxas

    device = torch.device("cuda", 0)
    reason, reasons = triton.start(device), backends.aiter_reasons(device)
    choices = backends.choose(backends.parse(()), reason, reasons)
    checked, wrong = ((), {}) if reason is not None else _checked_kernels(device)
    choices = tuple(
        backends.Choice(choice.operator, backends.TORCH, "Triton's kernels are wrong")
        if choice.backend == backends.TRITON and choice.operator in wrong
        else choice
        for choice in choices
    )
    if probe.unfit(facts.gpus[0].arch.split(":")[0]) is not None:
        reasons = {}
    return msgspec.structs.replace(
        facts,
        triton_reason=reason,
        ptxas=ptxas.release(device),
        kernels_checked=checked,
        kernels_like=None if reason is not None else _like(device),
        kernel_reasons=wrong,
        aiter_reasons=reasons,
        aiter_when_asked=tuple(sorted(backends.WHEN_ASKED)),
        operators=tuple(str(choice) for choice in choices),
    )


def _with_operators(facts: Facts, library: "Library") -> Facts:
    """Add the CPU operators that a server in this environment uses, and their share of the machine's limits."""
    from engine.distributed.host_resources import plan_cores
    from models.ops.cpu import limits, runtime

    asked = os.environ.get("KAON_CPU_ISA", "auto")
    paths = tuple(runtime.INSTRUCTION_SETS[isa] for isa in library.available)
    if asked != "auto" and asked not in paths:
        problem = f"KAON_CPU_ISA is {asked}, which this processor does not run; set it to auto, or to one of "
        return msgspec.structs.replace(facts, cpu_paths=paths, cpu_isa_problem=problem + ", ".join(paths))
    threads = plan_cores(None, frozenset(os.sched_getaffinity(0))).threads
    runtime.start(threads, None if asked == "auto" else runtime.INSTRUCTION_SETS.index(asked))
    measured = limits.measure(threads)
    return msgspec.structs.replace(
        facts, cpu_library=runtime.INSTRUCTION_SETS[library.isa], cpu_paths=paths, cpu_limits=tuple(measured)
    )


def _checked_kernels(device: "torch.device") -> tuple[tuple[str, ...], dict[str, str]]:
    """Operators whose Triton kernels were compared with torch at sizes of common models, and the failures."""
    import torch

    from engine.runner.kernel_checks import failure_of
    from models.ops.triton.cases import common_cases

    found: dict[str, str] = {}
    try:
        cases = common_cases(device)
    except torch.OutOfMemoryError:
        logging.getLogger(__name__).warning("There is no memory to compare Triton's kernels with torch")
        return (), {}
    for operator, some in cases.items():
        try:
            reason = failure_of(some, device, operator)
        except ValueError as lost:  # The kernels made the device unusable.
            return tuple(cases), {**found, operator: str(lost)}
        if reason is not None:
            found[operator] = reason
    return tuple(cases), found


def _like(device: "torch.device") -> str:
    """The target whose recorded tile sizes the kernels use on a GPU."""
    from models.ops.triton.configs import target_of

    target = target_of(device)
    return target.like or target.arch


def _build() -> str:
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = f"sm_{properties.major}{properties.minor}" if torch.version.hip is None else properties.gcnArchName
        total, free = properties.total_memory, free_memory(pci_address(properties))
        found.append(
            Gpu(name=properties.name, arch=arch, memory_gib=total / GIB, free_gib=None if free is None else free / GIB)
        )
    return tuple(found)


def _gpu_error() -> str | None:
    """Torch's reason why there is no GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    try:
        torch.empty(0, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def _has_nvidia() -> bool:
    """Whether there is an NVIDIA device file; in a container with one GPU of several it may have any number."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _shared_memory(folder: Path = Path("/dev/shm")) -> float | None:
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return None
    return found.f_blocks * found.f_frsize / MIB


def _has_numa_balancing(root: Path = Path("/proc/sys/kernel")) -> bool:
    try:
        return (root / "numa_balancing").read_text().strip() != "0"
    except FileNotFoundError:
        return False


def _closed_devices() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """AMD's device files that this user may not open, and the groups that may."""
    kfd = Path("/dev/kfd")
    nodes = [node for node in (kfd, *sorted(Path("/dev/dri").glob("renderD*"))) if node.exists()]
    if not kfd.exists():
        return (), ()
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    return tuple(str(node) for node in closed), tuple(dict.fromkeys(_group(node) for node in closed))


def _group(node: Path) -> str:
    """The name of a file's group, or its number where it has no name, as in a container."""
    number = node.stat().st_gid
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def main() -> None:
    """Print the report as JSON, after anything that libraries print."""
    facts = gather()
    sys.stdout.write("\n" + msgspec.json.encode(Report(facts=facts, problems=problems(facts))).decode() + "\n")


if __name__ == "__main__":
    main()
