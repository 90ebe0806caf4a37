"""The facts that `kaon doctor` found, and its sentences about problems. Needs no torch: the API process prints it."""

import msgspec

ANOTHER_TRITON = (
    "another release of Triton, and of torch with it, may help; on NVIDIA's GPUs also another ptxas, by "
    "TRITON_PTXAS_PATH"
)
"""Remedy for wrong kernels."""
_LOW_SHARE = 0.5
_LITTLE_GIB = 2.0
"""GiB of host memory below which only the smallest models can be served."""
_LITTLE_SHARED_MIB = 128.0
"""Bytes of /dev/shm that are needed. Containers have 64 MiB by default."""
_INSTINCT = ("gfx90a", "gfx942", "gfx950")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that torch sees."""

    name: str
    arch: str
    memory_gib: float
    free_gib: float | None
    """None: its driver does not say."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about this machine."""

    user: str = ""
    python: str = ""
    torch: str | None = None
    """Its version; None: it could not be imported."""
    torch_error: str | None = None
    build: str = "CPU"
    """Platform that torch was built for: `CPU`, `ROCm 7.0`, `CUDA 13.0`."""
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str | None = None
    """torch's error when it finds no GPU."""
    has_kfd: bool = False
    """Whether the driver of AMD's GPUs is present: /dev/kfd."""
    closed_devices: tuple[str, ...] = ()
    """Device files of AMD's GPUs that the user may not open."""
    closed_groups: tuple[str, ...] = ()
    """Groups that may open them."""
    has_nvidia: bool = False
    """Whether the driver of NVIDIA's GPUs is present: /dev/nvidia0, or another number."""
    triton: str | None = None
    triton_reason: str | None = None
    """Reason why Triton's kernels do not run on the first GPU; None if they do."""
    ptxas: str | None = None
    """The release of NVIDIA's assembler that Triton uses for the first GPU."""
    kernels_checked: tuple[str, ...] = ()
    """Operators whose kernels were compared with torch on the first GPU, at usual sizes."""
    kernels_like: str | None = None
    """The target whose tile sizes they use: that of the first GPU, or the nearest one."""
    kernel_reasons: dict[str, str] = {}
    """By operator, the difference of its kernels from torch on the first GPU, at usual sizes."""
    aiter: str | None = None
    """Its version; None: it is not installed."""
    aiter_reasons: dict[str, str | None] = {}
    """By operator, the reason why aiter is not used; None if it is. Empty if aiter does not support the first GPU."""
    aiter_when_asked: tuple[str, ...] = ()
    """Operators among them that aiter computes only if a setting asks for it."""
    operators: tuple[str, ...] = ()
    """The implementation of each operator, such as `norm by triton`."""
    cpu_library: str | None = None
    """The instruction set of the CPU's compiled operators; None: they were not built."""
    cpu_paths: tuple[str, ...] = ()
    """All instruction sets that this processor runs, from the slowest to the fastest."""
    cpu_isa_problem: str | None = None
    """Problem with the instruction set that KAON_CPU_ISA asks for; None without a problem."""
    cpu_limits: tuple[float, float, float, float] | None = None
    """GB/s that a plain loop reads and that a product of one row reads, GFLOP/s of a plain loop of products and of a
    product of many rows, on all threads; None: not measured."""
    memory_gib: float = 0.0
    """Available memory of the host."""
    shared_memory_mib: float | None = None
    """Size of /dev/shm; None: there is none."""
    sandbox_gaps: tuple[str, ...] = ()
    """Features that the kernel or container lacks to confine the processes that handle untrusted input, as
    sentences."""
    has_numa_balancing: bool = False
    """Whether the kernel moves memory to the processors that use it."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The facts, and a sentence about each problem."""

    facts: Facts
    problems: list[str]


def slow_rates(facts: Facts) -> list[str]:
    """Return a sentence for each measured rate that is under half of the machine's limit.

    These are no problems of the installation: another program that uses the processor or the memory has this effect.
    """
    if facts.cpu_limits is None:
        return []
    read, row, matrix, product = facts.cpu_limits
    shares = (("one row reads", row / read), ("products reach", product / matrix))
    return [
        f"{what} {share:.0%} of what a plain loop reaches, and {_LOW_SHARE:.0%} or more are usual: end other "
        "programs, check the limits of the container, and run kaon doctor again"
        for what, share in shares
        if share < _LOW_SHARE
    ]


def problems(facts: Facts) -> list[str]:
    """Return sentences about everything that prevents a model from running, or from running on the right device."""
    found: list[str] = []
    if facts.torch is None:
        return [f"torch cannot be imported: {facts.torch_error}; install it, then Kaon"]
    is_rocm, is_cuda = facts.build.startswith("ROCm"), facts.build.startswith("CUDA")
    if facts.has_kfd and not is_rocm and not facts.gpus:
        found.append(
            f"there is an AMD GPU (/dev/kfd), but torch {facts.torch} is built for {facts.build}; install a build for "
            "ROCm, as pytorch.org/get-started says"
        )
    if facts.has_nvidia and not is_cuda and not facts.gpus:
        found.append(
            f"there is an NVIDIA GPU (/dev/nvidia*), but torch {facts.torch} is built for {facts.build}; install a "
            "build for CUDA, as pytorch.org/get-started says"
        )
    if is_rocm and not facts.has_kfd:
        found.append(
            f"torch is built for {facts.build}, but there is no /dev/kfd: load the amdgpu driver, or start the "
            "container with --device /dev/kfd --device /dev/dri"
        )
    # If other GPUs are found, these may be closed on purpose.
    if facts.closed_devices and not facts.gpus:
        groups = ",".join(facts.closed_groups)
        found.append(
            f"{facts.user} may not open {' and '.join(facts.closed_devices)}: add the user to the groups that may "
            f"(usermod -aG {groups} {facts.user}), or start the container with "
            + " ".join(f"--group-add {group}" for group in facts.closed_groups)
        )
    has_driver = (is_rocm and facts.has_kfd) or (is_cuda and facts.has_nvidia)
    if has_driver and not facts.gpus and not facts.closed_devices:
        found.append(
            f"torch, built for {facts.build}, finds no GPU though there is a driver: {facts.gpu_error or 'no word'}; "
            "the driver may be older than the build needs"
        )
    if facts.gpus and facts.triton_reason is not None:
        found.append(f"{facts.triton_reason}; plain torch computes instead, slowly")
    found += [
        f"Triton's kernels for {operator} are wrong at usual sizes: {wrong}; where they are at a model's own, plain "
        f"torch computes in their place, slowly; {ANOTHER_TRITON}"
        for operator, wrong in facts.kernel_reasons.items()
    ]
    if facts.aiter is not None and facts.gpus and is_rocm:
        broken: dict[str, list[str]] = {}
        for name, reason in facts.aiter_reasons.items():
            if reason is not None and name not in facts.aiter_when_asked:
                broken.setdefault(reason, []).append(name)
        found += [
            f"aiter is installed, but not used for {' and '.join(names)}: {reason}" for reason, names in broken.items()
        ]
    little = facts.shared_memory_mib is not None and facts.shared_memory_mib < _LITTLE_SHARED_MIB
    if little and len(facts.gpus) > 1:
        found.append(
            f"/dev/shm has {facts.shared_memory_mib:.0f} MiB, through which ranks on several GPUs exchange: start the "
            "container with --ipc host or --shm-size 8g, or mount memory there in a pod"
        )
    if facts.has_numa_balancing and any(gpu.arch.split(":")[0] in _INSTINCT for gpu in facts.gpus):
        found.append(
            "the kernel balances memory among NUMA nodes, which may make GPUs hang, as AMD says: on the host, sysctl "
            "kernel.numa_balancing=0"
        )
    if facts.cpu_isa_problem is not None:
        found.append(facts.cpu_isa_problem)
    if not facts.gpus and facts.cpu_library is None:
        found.append(
            "the CPU's compiled operators are missing: Kaon was installed without a C compiler; install gcc or clang, "
            "then Kaon again; plain torch computes until then"
        )
    if facts.memory_gib < _LITTLE_GIB:
        found.append(
            f"{facts.memory_gib:.1f} GiB of memory are available; a model of half a billion parameters takes more: "
            "end other programs, or raise the container's limit"
        )
    return found
