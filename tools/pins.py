"""`make pins`: pins each external image and action by digest or commit, since the owner of a tag can move it.

Images get the digest that their registry reports, next to their tag; actions of workflows get the commit of their tag.
`make pins ARGS=--check` needs no network: it lists references without a pin and fails if there are any, as the
workflow of a release does.
"""

import argparse
import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FILES = ("Dockerfile", "deploy/compose.yaml", "deploy/kubernetes/*.yaml", ".github/**/*.yml", ".github/**/*.yaml")

_IMAGE = re.compile(
    r"(?m)^(?:ARG \w+_BASE=| +image: )(?P<name>[\w./-]+(?::\d+/[\w./-]+)?:[\w.-]+)(?P<pin>@sha256:\w+)?$"
)
"""An image with a tag: images that are built here have none."""
_ACTION = re.compile(r"(?m)uses: (?P<name>[\w.-]+/[\w.-]+)@(?P<ref>[\w.-]+)(?: # (?P<tag>\S+))?$")
_REFERENCE = re.compile(
    r"""(?m)^(?:[ -]*(?P<kind>image|uses):[ ]+|ARG \w+_BASE=|FROM (?:--\S+ +)*|\#[ ]*syntax=|COPY .*?--from=)"""
    r"""["']?(?P<name>[^\s"'#,]+)"""
)
"""A reference to an image or action, in any form, also in one that `pinned` does not write."""
_OWN = re.compile(r"kaon(?:-\w+)?|scratch|\./.*|\{.*|\$\{?\w+_BASE\}?")
"""References that need no pin: images that are built here, the empty image, actions of this repository, fields of an
operator's own image in the chart's values, and bases, whose `ARG` is checked."""
_STAGE = re.compile(r"(?m)^FROM .* AS (\w+)$")
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_SECONDS = 30


class Unpinned(NamedTuple):
    """A reference to an image or action that its owner can replace."""

    line: int
    text: str


def unpinned(text: str) -> Iterator[Unpinned]:
    """The references without a digest or commit in a file."""
    stages = _STAGE.findall(text)
    for match in _REFERENCE.finditer(text):
        name = match["name"]
        is_action = match["kind"] == "uses" and not name.startswith("docker://")
        is_pinned = _COMMIT.fullmatch(name.rpartition("@")[2]) if is_action else _DIGEST.fullmatch(name)
        if not is_pinned and name not in stages and not _OWN.fullmatch(name):
            yield Unpinned(text.count("\n", 0, match.start()) + 1, name)


def pinned(text: str, digest_of: Callable[[str], str], commit_of: Callable[[str, str], str]) -> str:
    """Return a file with its tags pinned. `digest_of` takes an image, `commit_of` a repository and a tag."""

    def image(match: re.Match[str]) -> str:
        return f"{match[0].removesuffix(match['pin'] or '')}@{digest_of(match['name'])}"

    def action(match: re.Match[str]) -> str:
        tag = match["tag"] or match["ref"]
        return f"uses: {match['name']}@{commit_of(match['name'], tag)} # {tag}"

    return _ACTION.sub(action, _IMAGE.sub(image, text))


def digest_of(image: str) -> str:
    """The digest of an image's tag, as its registry reports it. Raises `OSError`."""
    name, _, tag = image.rpartition(":")
    host, _, path = name.partition("/")
    if not path or not ("." in host or ":" in host):
        host, path = "registry-1.docker.io", name if "/" in name else f"library/{name}"
    scheme = "http" if host.startswith("127.0.0.1:") else "https"
    request = urllib.request.Request(
        f"{scheme}://{host}/v2/{path}/manifests/{tag}", method="HEAD", headers={"Accept": _MANIFESTS}
    )
    try:
        answer = urllib.request.urlopen(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        request.add_header("Authorization", f"Bearer {_token(error.headers['WWW-Authenticate'])}")
        answer = urllib.request.urlopen(request, timeout=_SECONDS)
    with answer:
        digest = str(answer.headers["Docker-Content-Digest"])
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise OSError(f"{host} reports no digest for {image}")
    return digest


def _token(challenge: str) -> str:
    """The token that a registry gives to anonymous clients."""
    fields = dict(_CHALLENGE.findall(challenge))
    query = urllib.parse.urlencode({name: fields[name] for name in ("service", "scope") if name in fields})
    with urllib.request.urlopen(f"{fields['realm']}?{query}", timeout=_SECONDS) as answer:
        found = json.load(answer)
    return str(found.get("token") or found["access_token"])


def commit_of(repository: str, tag: str, host: str = "https://github.com/") -> str:
    """The commit of a repository's tag. Raises `OSError`."""
    command = ["git", "ls-remote", f"{host}{repository}", f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    # If a tag is an object of its own, the second line has the commit.
    found = [line.split()[0] for line in done.stdout.splitlines()]
    if not found:
        raise OSError(f"{repository} has no tag {tag}: {done.stderr.strip()}")
    return found[-1]


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Pin or check the references. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="make pins", description="Name images and actions by digest and commit.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where one has none")
    check = parser.parse_args(argv).check
    missing = 0
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
        text = path.read_text(encoding="utf-8")
        if not check:
            path.write_text(pinned(text, digest_of, commit_of), encoding="utf-8")
            continue
        for each in unpinned(text):
            missing += 1
            sys.stderr.write(f"{path.relative_to(root)}:{each.line}: {each.text} can be replaced by its owner\n")
    if missing:
        sys.stderr.write(f"{missing} images and actions are named without a pin; run make pins\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
