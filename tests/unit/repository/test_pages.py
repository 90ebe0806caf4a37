"""What the pages name exists: files, sections, flags, variables, metrics, endpoints, tests and make's targets."""

import re
from functools import cache
from pathlib import Path

import pytest

from engine.config.settings import SETTINGS
from server.endpoints import all_endpoints
from server.metrics import Metrics
from tests.unit.repository.test_house_rules import ROOT, committed_files, name_of
from tests.unit.repository.test_monitoring import known_names

OF_OTHER_PROGRAMS = {"--build-arg", "--group-add", "--ipc", "--require-hashes", "--set", "--shm-size"}
"""Flags of docker, pip and helm in the text of pages; within commands, only those of `kaon` are looked at."""
OF_OTHER_METRICS = {"kaon_rounding"}
"""Names that begin like a metric."""


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in committed_files() if path.suffix == ".md"}


@pytest.fixture(scope="module")
def of_users(pages: dict[Path, str]) -> dict[Path, str]:
    """The pages that say what is, without those of what was decided or has changed."""
    return {
        path: text for path, text in pages.items() if "decisions" not in path.parts and path.name != "CHANGELOG.md"
    }


@cache
def sources(*folders: str, kinds: tuple[str, ...] = (".py",)) -> str:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs name them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def missing(pages: dict[Path, str], pattern: str, known: object) -> list[str]:
    """What a pattern finds on pages for which `known`, a set or a function, does not hold."""
    holds = known if callable(known) else known.__contains__  # type: ignore[attr-defined]
    found = {(name_of(page), each) for page, text in pages.items() for each in re.findall(pattern, text, re.M)}
    return [f"{page}: {each}" for page, each in sorted(found) if not holds(each)]


def test_links_between_pages_lead_somewhere(pages: dict[Path, str]) -> None:
    broken = [
        f"{name_of(page)}: {link}"
        for page, text in pages.items()
        for link, file, anchor in re.findall(r"\]\((([^)#:]*)(?:#([^)]*))?)\)", text)
        if not (target := page.parent / file if file else page).exists()
        or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")))
    ]
    assert broken == []


def test_every_page_is_in_the_sites_navigation(pages: dict[Path, str]) -> None:
    navigation = re.findall(r"^ +- (?:.+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in pages if path.is_relative_to(ROOT / "docs")}
    assert docs - set(navigation) == set()


def test_files_and_folders_exist(pages: dict[Path, str]) -> None:
    in_tree = r"`((?:benchmarks|deploy|docs|engine|kvcache|models|server|tests|tools)/[\w./-]+)`"
    assert missing(pages, in_tree, lambda name: (ROOT / name).exists()) == []


def test_flags_are_those_of_kaon_s_commands(of_users: dict[Path, str]) -> None:
    known = {setting.flag for setting in SETTINGS} | OF_OTHER_PROGRAMS

    def exists(flag: str) -> bool:
        positive = flag.replace("--no-", "--", 1)
        return (
            flag in known
            or positive in known
            or f'"{flag}"' in sources("server", "tools", "tests", "engine", "benchmarks")
        )

    commands = {
        page: " ".join(re.findall(r"(?:^|`|\$ )kaon (?:[^\n`|]|\\\n)*", text, re.M)) for page, text in of_users.items()
    }
    assert missing(commands, r"(?<![\w-])--[a-z][\w-]*", exists) == []
    assert missing(of_users, r"`(--[a-z][\w-]*)", exists) == []


def test_variables_are_read_somewhere(of_users: dict[Path, str]) -> None:
    read = sources("server", "engine", "models", "kvcache", "tools", "tests", "deploy", kinds=(".py", ".sh"))
    known = {setting.env for setting in SETTINGS}
    assert missing(of_users, r"\bKAON_[A-Z_0-9]+\b", lambda name: name in known or name in read) == []


def test_metrics_are_on_the_page_of_metrics(of_users: dict[Path, str]) -> None:
    names = known_names() | OF_OTHER_METRICS

    def exists(name: str) -> bool:
        return any(each.startswith(name) for each in names) if name.endswith("_") else name in names

    assert missing(of_users, r"\bkaon_[a-z_]+\b", exists) == []
    aliases = set(re.findall(r"^# TYPE (vllm:\w+)", Metrics("1", 1, "m").render().decode(), re.M))
    # Written only while there are adapters.
    assert missing(of_users, r"\bvllm:\w+", aliases | {"vllm:lora_requests_info"}) == []


def test_endpoints_are_served(of_users: dict[Path, str]) -> None:
    def shape(path: str) -> str:
        return re.sub(r"\{[^}]*\}|\b[A-Z_]{2,}\b", "{}", path)

    served = {shape(endpoint.path) for endpoint in all_endpoints()} | {"/v1/echo"}  # that of docs/extending.md
    named = r"\b(?:GET|POST|DELETE) (/[\w/{}.-]*)"
    assert missing(of_users, named, lambda path: shape(path) in served) == []


def test_tests_that_pages_name_exist(of_users: dict[Path, str]) -> None:
    ours = {page: text for page, text in of_users.items() if page.name != "conformance.md"}
    written = sources("tests")
    assert missing(ours, r"`(test_\w+)(?:`|…)", lambda name: f"def {name}" in written) == []


def test_targets_of_make_exist(of_users: dict[Path, str]) -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert missing(of_users, r"(?:`|^|\$ )make ([a-z][\w-]*)", targets) == []
