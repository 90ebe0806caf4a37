"""The control groups this process is in, and the time on cores they leave it. Used for sizing memory and threads."""

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
