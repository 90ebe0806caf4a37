"""Writes the tables of docs/models.md from the tests' own registry: `python -m tests.parity.models_docs [--check]`.

A table is between two markers; the other text is written by hand. `make lint` checks them.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from models.architectures.registry import ARCHITECTURES, TEXT_PARTS
from tests.parity.foreign_models import ALSO_REFUSED, REFUSED, REFUSED_CONFIGS, SERVED
from tests.parity.variants import PARTLY_TORCH, all_variants

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"


def architectures_table() -> str:
    """Each architecture that has a class here, its file, and the variants by which it is tested."""
    variants = all_variants()
    rows = [
        (
            f"`{name}`",
            f"[{file}](../{file})",
            "operator by operator" if name in PARTLY_TORCH else "one call",
            "; ".join(variant.name for variant in variants if variant.architecture == name),
        )
        for name in sorted(ARCHITECTURES)
        for file in [f"{ARCHITECTURES[name].model_class.__module__.replace('.', '/')}.py"]
    ]
    return _table(("Architecture", "Model file", "A step on the CPU", "Proven with"), rows)


def text_parts_table() -> str:
    """Architectures that read images too, and the one that computes the text part."""
    rows = []
    for whole, kinds in sorted(TEXT_PARTS.items()):
        first, *others = dict.fromkeys(kinds.values())
        is_any = len(others) > 1
        named = (
            f"`{first}`, or as `text_config` says"
            if is_any
            else ", ".join(f"`{text}`" for text in sorted((first, *others)))
        )
        rows.append((f"`{whole}`", named))
    return _table(("Architecture", "Its text part runs as"), rows)


def general_route_table() -> str:
    """The models that test the general route, and those that test its refusals."""
    served = ", ".join(f"`{foreign.architecture}`" for foreign in SERVED)
    refused = ", ".join(f"`{foreign.architecture}`" for foreign, _ in REFUSED)
    return _table(("Proven to", "Architectures"), [("run", served), ("be refused", refused)])


def causal_models_table() -> str:
    """Every causal model of the installed transformers, by the code that runs it, or by the reason why none does."""
    reasons = {foreign.architecture: reason for foreign, reason in (*REFUSED, *ALSO_REFUSED)}
    reasons |= dict(REFUSED_CONFIGS.values())
    kinds = {foreign.architecture: "the general route" for foreign in SERVED}
    kinds |= {name: f"none: {reason.replace(' of .*', '')}" for name, reason in reasons.items()}
    kinds |= dict.fromkeys((*ARCHITECTURES, *TEXT_PARTS), "Kaon's own model")
    rows: dict[str, list[str]] = {}
    for name in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        rows.setdefault(kinds.get(name, "the general route, not proven"), []).append(f"`{name}`")
    order = sorted(rows, key=lambda kind: (kind.startswith("none"), kind))
    return _table(("Run by", "Architectures"), [(kind, ", ".join(rows[kind])) for kind in order])


def multimodal_models_table() -> str:
    """Every multimodal model of the installed transformers whose text part does not run by Kaon's own code."""
    as_causal, refused = "judged as its causal model in the table of causal models", "refused"
    rows: dict[str, set[str]] = {as_causal: set(), refused: set()}
    by_type, causal = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    served = {*TEXT_PARTS, *ARCHITECTURES, *causal.values()}
    for kind, names in by_type.items():
        found = {names} if isinstance(names, str) else set(names)
        rows[as_causal if kind in causal else refused] |= {f"`{name}`" for name in found - served}
    return _table(("Text part", "Architectures"), [(how, ", ".join(sorted(names))) for how, names in rows.items()])


TABLES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "architectures": architectures_table,
        "text parts": text_parts_table,
        "causal models": causal_models_table,
        "multimodal models": multimodal_models_table,
        "general route": general_route_table,
    }
)
"""Tables by the name in their markers."""


def main(argv: Sequence[str]) -> int:
    """Write the page, or with `--check` only compare it. Returns 1 if it is out of date."""
    check = list(argv) == ["--check"]
    if argv and not check:
        sys.stderr.write("usage: python -m tests.parity.models_docs [--check]\n")
        return 2
    text = updated = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        updated = with_table(updated, name, table())
    if text != updated and check:
        sys.stderr.write("docs/models.md is not what tests/parity/variants say; run make docs\n")
        return 1
    if text != updated:
        PAGE.write_text(updated, encoding="utf-8")
    return 0


def with_table(page: str, name: str, table: str) -> str:
    """Return `page` with `table` between the markers of `name`. Raises `ValueError` if one is missing."""
    begin, end = f"<!-- table of {name}: written by `make docs` -->\n", f"<!-- end of the table of {name} -->"
    before, opening, rest = page.partition(begin)
    _, closing, after = rest.partition(end)
    if not opening or not closing:
        raise ValueError(f"docs/models.md needs the lines {begin.strip()} and {end}")
    return before + opening + table + closing + after


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
