"""The control groups this process is in, and the time on cores and the memory they leave it.

Used for sizing memory and threads.
"""

from collections.abc import Iterator
from pathlib import Path


def group_directories(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Directories whose limits on `controller` bind this process, own group first, and whether they are version 2.

    `root` holds `proc` and `sys`.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        unified = controllers == ""
        if unified:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # A group's parents limit it too. In a container the path may name groups that only the host sees.
        group = base / path.strip("/")
        for directory in (group, *group.parents):
            yield directory, unified
            if directory == base:
                break


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the nearest quota on this process leaves it; None where there is none."""
    quotas = []
    for directory, unified in group_directories("cpu", root):
        try:
            if unified:
                quota, period = (directory / "cpu.max").read_text().split()
            else:
                quota = (directory / "cpu.cfs_quota_us").read_text().strip()
                period = (directory / "cpu.cfs_period_us").read_text().strip()
        except FileNotFoundError:
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_host_memory(root: Path = Path("/")) -> int:
    """Bytes this process can still use: the system's MemAvailable, or less where a control group's limit is nearer."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min((available, *_control_group_headrooms(root))))


def _control_group_headrooms(root: Path) -> Iterator[int]:
    """What each limit on this process leaves (cgroup v2 and v1); reclaimable page cache counts as free."""
    for directory, unified in group_directories("memory", root):
        if unified:
            headroom = _headroom(directory, "memory.max", "memory.current", "inactive_file")
        else:
            headroom = _headroom(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if headroom is not None:
            yield headroom


def _headroom(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    try:
        limit = (directory / limit_file).read_text().strip()
        usage = int((directory / usage_file).read_text())
        stat = (directory / "memory.stat").read_text()
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    counters = dict(line.split() for line in stat.splitlines())
    return int(limit) - usage + int(counters.get(reclaimable, 0))
