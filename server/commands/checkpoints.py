"""`kaon pull`, `kaon list` and `kaon rm`: download, list and delete checkpoints in the hub's cache of this machine."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from engine.config.paths import resolve_checkpoint
from models.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub.utils import CachedRepoInfo

USAGE = {
    "pull": "usage: kaon pull ID [REVISION]   download what serving needs of a hub repository\n",
    "list": "usage: kaon list                 checkpoints in the hub's cache, with their size and last use\n",
    "rm": "usage: kaon rm ID [ID ...]       delete checkpoints from the hub's cache\n",
}


def run(arguments: Sequence[str], command: str) -> int:
    """Run one of the three commands. Returns the exit code: 0 done, 1 failed, 2 bad usage."""
    if arguments and arguments[0] in ("--help", "-h"):
        sys.stdout.write(USAGE[command])
        return 0
    allowed = {"pull": (1, 2), "list": (0, 0), "rm": (1, sys.maxsize)}[command]
    if not allowed[0] <= len(arguments) <= allowed[1] or any(each.startswith("-") for each in arguments):
        if not arguments:
            wrong = "an ID is missing"
        elif len(arguments) == 1:
            wrong = f"the argument {arguments[0]} is not understood"
        else:
            wrong = f"the arguments {' '.join(arguments)} are not understood"
        sys.stderr.write(f"kaon {command}: {wrong}; {USAGE[command]}")
        return 2
    try:
        if command == "pull":
            _pull(*arguments)
        elif command == "list":
            sys.stdout.write(_table(_cached()))
        else:
            _remove(arguments)
    except CheckpointError as error:
        sys.stderr.write(f"kaon {command}: {error}\n")
        return 1
    return 0


def _pull(id: str, revision: str | None = None) -> None:
    if os.path.isdir(id):
        raise CheckpointError(f"{id} is a directory here, which kaon serve takes as it is; give a hub id to download")
    directory = resolve_checkpoint(id, revision)
    sys.stdout.write(f"{id} is in {directory}; serve it with: kaon serve {id}\n")


def _remove(ids: Sequence[str]) -> None:
    from huggingface_hub import scan_cache_dir

    repositories = {repository.repo_id: repository for repository in _cached()}
    missing = [id for id in ids if id not in repositories]
    if missing:
        raise CheckpointError(f"{missing[0]} is not in the cache; kaon list shows what is; nothing was deleted")
    for id in dict.fromkeys(ids):
        # Limit the cache's view to this repository: a copy under another name may have the same commits.
        alone = dataclasses.replace(scan_cache_dir(), repos=frozenset([repositories[id]]))
        deletion = alone.delete_revisions(*(revision.commit_hash for revision in repositories[id].revisions))
        deletion.execute()
        sys.stdout.write(f"deleted {id}: {deletion.expected_freed_size_str} freed\n")


def _cached() -> list["CachedRepoInfo"]:
    """Return the cached model repositories, sorted by name; none if there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((each for each in repositories if each.repo_type == "model"), key=lambda each: each.repo_id)


def _table(repositories: Sequence["CachedRepoInfo"]) -> str:
    """Format a line per repository. A repository without weights and configuration cannot be served."""
    if not repositories:
        return "the hub's cache holds no checkpoint; kaon pull ID downloads one\n"
    rows = [("ID", "SIZE", "LAST USED", "")]
    for each in repositories:
        used = datetime.fromtimestamp(each.last_accessed).astimezone().strftime("%Y-%m-%d %H:%M")
        rows.append((each.repo_id, each.size_on_disk_str, used, "" if _is_servable(each) else "incomplete"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _is_servable(repository: "CachedRepoInfo") -> bool:
    names = {file.file_name for revision in repository.revisions for file in revision.files}
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)
