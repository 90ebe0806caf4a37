"""The report of `kaon doctor` for each possible fault, and if the examination itself fails."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.commands import doctor as engine_doctor
from engine.commands.doctor import free_by_nvml, free_memory, pci_address
from engine.doctor_report import Facts, Gpu, problems
from server.commands import doctor

GPU = Gpu(name="MI300X", arch="gfx942", memory_gib=192.0, free_gib=191.0)
RADEON = Gpu(name="RX 7900 XTX", arch="gfx1100", memory_gib=24.0, free_gib=23.0)
HEALTHY: dict[str, Any] = {"user": "ann", "torch": "2.13", "cpu_library": "amx", "memory_gib": 64.0}
ROCM: dict[str, Any] = {**HEALTHY, "build": "ROCm 7.0", "has_kfd": True, "triton": "3.7"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({**HEALTHY, "torch": None, "torch_error": "ImportError: libfoo"}, "torch cannot be imported: .*libfoo"),
        ({**HEALTHY, "has_kfd": True}, "an AMD GPU .*but torch 2.13 is built for CPU; install a build for ROCm"),
        ({**HEALTHY, "has_kfd": True, "build": "CUDA 13.0"}, "AMD GPU .*built for CUDA 13.0"),
        ({**HEALTHY, "has_nvidia": True}, "an NVIDIA GPU .*install a build for CUDA"),
        ({**ROCM, "has_kfd": False}, "no /dev/kfd: load the amdgpu driver, or start the container with --device"),
        (
            {**ROCM, "closed_devices": ("/dev/kfd", "/dev/dri/renderD128"), "closed_groups": ("render", "video")},
            "ann may not open /dev/kfd and .*usermod -aG render,video ann.*--group-add render --group-add video",
        ),
        ({**ROCM, "gpu_error": "driver too old"}, "finds no GPU though there is a driver: driver too old"),
        ({**ROCM, "gpus": (GPU,), "triton_reason": "Triton failed"}, "Triton failed; plain torch computes instead"),
        (
            {**ROCM, "gpus": (GPU,), "kernel_reasons": {"recurrent": "its numbers are off by 31 times"}},
            "Triton's kernels for recurrent are wrong at usual sizes: .* 31 times; .*torch .*TRITON_PTXAS_PATH",
        ),
        (
            {**ROCM, "gpus": (GPU,), "aiter": "0.1", "aiter_reasons": {"norm": "it has no rmsnorm2d_fwd"}},
            "aiter is installed, but not used for norm: it has no rmsnorm2d_fwd",
        ),
        (
            {**ROCM, "gpus": (GPU,), "aiter": "0.1", "aiter_reasons": {"norm": "it hung", "activation": "it hung"}},
            "aiter is installed, but not used for norm and activation: it hung",
        ),
        ({**ROCM, "gpus": (GPU, GPU), "shared_memory_mib": 64.0}, "/dev/shm has 64 MiB, .*--ipc host"),
        ({**ROCM, "gpus": (GPU,), "has_numa_balancing": True}, "may make GPUs hang.* sysctl kernel.numa_balancing=0"),
        ({**HEALTHY, "cpu_library": None}, "without a C compiler; install gcc or clang"),
        ({**HEALTHY, "cpu_isa_problem": "KAON_CPU_ISA is sse"}, "KAON_CPU_ISA is sse"),
        ({**HEALTHY, "memory_gib": 0.5}, "0.5 GiB of memory are available"),
    ],
)
def test_each_problem_is_one_sentence(facts: dict[str, Any], words: str) -> None:
    found = problems(Facts(**facts))
    assert len(found) == 1
    assert re.search(words, found[0]), found


def test_says_which_path_runs_and_its_share_of_the_machines_limits() -> None:
    facts = Facts(
        **{**HEALTHY, "cpu_library": "avx2"}, cpu_paths=("portable", "avx2"), cpu_limits=(20.0, 17.0, 100.0, 70.0)
    )
    text = doctor.lines(doctor.Report(facts=facts, problems=[]))
    assert "CPU       avx2 operators; also runs portable" in text
    assert "CPU       one row reads 17.0 GB/s, 85% of a plain loop's 20.0" in text
    assert "CPU       products 70 GFLOP/s, 70% of a plain loop's 100" in text


def test_a_low_rate_is_named_and_is_no_problem() -> None:
    facts = Facts(**HEALTHY, cpu_limits=(20.0, 6.0, 100.0, 50.0))
    *_, slow, last = doctor.lines(doctor.Report(facts=facts, problems=problems(facts)))
    assert slow.startswith("slow      one row reads 30% of what a plain loop reaches, and 50% or more are usual")
    assert last == "Nothing else is wrong."


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        # The default build of torch, on a machine without a GPU.
        {**HEALTHY, "build": "CUDA 13.0", "gpu_error": "Found no NVIDIA driver"},
        {**ROCM, "gpus": (GPU,), "cpu_library": None},
        {**ROCM, "gpus": (GPU,), "aiter": "0.1", "aiter_reasons": {"norm": None}},
        {**ROCM, "gpus": (GPU,), "aiter_reasons": {"norm": "aiter is not installed"}},
        {**ROCM, "gpus": (GPU,), "shared_memory_mib": 64.0},
        {**ROCM, "gpus": (GPU, GPU), "shared_memory_mib": 8192.0},
        {**ROCM, "gpus": (RADEON,), "has_numa_balancing": True},
        {**HEALTHY, "has_numa_balancing": True, "shared_memory_mib": 64.0},
        # Only one of the host's GPUs is accessible to this user.
        {**ROCM, "gpus": (GPU,), "closed_devices": ("/dev/dri/renderD129",), "closed_groups": ("render",)},
    ],
)
def test_a_healthy_machine_has_no_problem(facts: dict[str, Any]) -> None:
    assert problems(Facts(**facts)) == []


def test_the_kernel_s_settings_are_read_where_they_are(tmp_path: Path) -> None:
    assert engine_doctor._shared_memory(tmp_path / "none") is None
    assert engine_doctor._shared_memory(tmp_path) == shutil.disk_usage(tmp_path).total / 2**20
    assert not engine_doctor._has_numa_balancing(tmp_path)
    for value, has in (("0\n", False), ("1\n", True), ("2\n", True)):
        (tmp_path / "numa_balancing").write_text(value)
        assert engine_doctor._has_numa_balancing(tmp_path) == has


def test_what_aiter_does_is_reported_by_operator() -> None:
    reasons = {"norm": None, "moe": "it has no fused_moe", "gemm": None, "decode": "it hung"}
    facts = Facts(**ROCM, gpus=(GPU,), aiter="0.1", aiter_reasons=reasons, aiter_when_asked=("decode", "gemm"))
    # An optional feature that was not requested is no problem.
    found = problems(facts)
    assert found == ["aiter is installed, but not used for moe: it has no fused_moe"]
    printed = doctor.lines(doctor.Report(facts=facts, problems=found))
    assert [line for line in printed if line.startswith("aiter")] == [
        "aiter     0.1",
        "aiter     norm: used",
        "aiter     moe: not used: it has no fused_moe",
        "aiter     gemm: works; used with --kernel-backend gemm=aiter",
        "aiter     decode: not used: it hung",
    ]


def test_which_kernels_were_compared_and_whose_tiles_they_have_is_printed() -> None:
    facts = Facts(
        **{**ROCM, "gpus": (RADEON,)},
        kernels_checked=("attention", "norm", "moe"),
        kernels_like="gfx1100",
        kernel_reasons={"norm": "its numbers are off by 31 times"},
    )
    printed = doctor.lines(doctor.Report(facts=facts, problems=[]))
    assert "kernels   tiles of gfx1100; equal to torch: attention, moe" in printed


def test_free_memory_of_gpus_is_what_their_drivers_say(tmp_path: Path) -> None:
    address = pci_address(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0))
    assert address == "0000:c1:00.0"
    device = tmp_path / "bus/pci/devices" / address
    device.mkdir(parents=True)
    assert free_memory(address, tmp_path) is None
    (device / "mem_info_vram_total").write_text("1000\n")
    (device / "mem_info_vram_used").write_text("400\n")
    assert free_memory(address, tmp_path) == 600
    # With a torch that does not report where a GPU is.
    assert free_memory(pci_address(SimpleNamespace()), tmp_path) is None


def test_nvidias_library_is_asked_by_address_and_left_as_it_was() -> None:
    asked: list[str] = []

    def handle(address: bytes, _device: Any) -> int:
        asked.append(address.decode())
        return 0

    def info(_device: Any, memory: Any) -> int:
        memory._obj.free = 700
        return 0

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByPciBusId_v2=handle,
        nvmlDeviceGetMemoryInfo=info,
        nvmlShutdown=lambda: asked.append("shut down"),
    )
    assert free_by_nvml(nvml, "0000:c1:00.0") == 700
    assert asked == ["0000:c1:00.0", "shut down"]
    nvml.nvmlDeviceGetMemoryInfo = lambda *_: 3  # Not supported, as on integrated GPUs.
    assert free_by_nvml(nvml, "0000:c1:00.0") is None


def test_a_gpu_whose_free_memory_is_unknown_is_printed_without_it() -> None:
    gpu = Gpu(name="MI300X", arch="gfx942", memory_gib=192.0, free_gib=None)
    assert "GPU       MI300X, gfx942, 192.0 GiB" in doctor.lines(
        doctor.Report(facts=Facts(**ROCM, gpus=(gpu,)), problems=[])
    )


def test_what_was_found_is_printed_line_by_line() -> None:
    facts = Facts(**ROCM, gpus=(GPU,), operators=("norm by triton",), ptxas="12.8")
    printed = doctor.lines(doctor.Report(facts=facts, problems=["it rains"]))
    assert printed[0].startswith("torch     2.13, built for ROCm 7.0")
    assert "GPU       MI300X, gfx942, 191.0 of 192.0 GiB free" in printed
    assert "aiter     not installed" in printed
    assert "ptxas     12.8" in printed
    assert "operator  norm by triton" in printed
    assert "sandbox   Landlock and seccomp" in printed
    without = msgspec.structs.replace(facts, sandbox_gaps=("there is no Landlock",))
    assert "sandbox   there is no Landlock" in doctor.lines(doctor.Report(facts=without, problems=[]))
    assert printed[-1] == "wrong     it rains"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal SIGSEGV"),
        (
            "raise RuntimeError('CUDA error: out of memory\\nCompile with X')",
            "1: RuntimeError: CUDA error: out of memory",
        ),
        ("raise OSError('no libamdhip64.so')", "exit code 1: OSError: no libamdhip64.so"),
        ("import time; time.sleep(60)", "took longer than 2 s"),
        ("import subprocess, time; subprocess.Popen(['sleep', '20']); time.sleep(60)", "took longer than 2 s"),
        ("print('nothing of use')", "exit code 0: it printed no error"),
    ],
)
def test_looking_that_goes_wrong_is_reported(code: str, words: str) -> None:
    report = doctor.examine([sys.executable, "-c", code], seconds=2.0 if "sleep" in code else 300.0)
    assert len(report.problems) == 1
    assert words in report.problems[0]


def test_what_libraries_print_around_the_report_is_left_out() -> None:
    said = json.dumps({"facts": {"torch": "2.13"}, "problems": []})
    code = f"import os; print('[aiter] hello'); print({said!r}, flush=True); os.write(1, b'\\xff bye')"
    report = doctor.examine([sys.executable, "-c", code])
    assert report.facts.torch == "2.13"


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--nonsense", 2)])
def test_other_flags(argument: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run([argument]) == code
    assert (f"kaon doctor: {argument} is not known" in capsys.readouterr().err) is (code == 2)
