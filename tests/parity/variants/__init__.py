"""Every architecture that has a model here, in the shapes and options of its checkpoints.

Each module is a family with its `VARIANTS`; `test_architectures` tests them all, and docs/models.md lists them.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

import pytest

from tests.parity.checkpoints import Family


class Variant(NamedTuple):
    """A checkpoint to make: a family's model with some fields of its config set."""

    architecture: str
    name: str
    family: Family
    overrides: dict[str, Any]


PARTLY_TORCH = frozenset({"Gemma3nForCausalLM", "PhimoeForCausalLM"})
"""Architectures of which torch computes a part, where the CPU's operators compute others completely."""

DERIVED = frozenset(
    {
        *("Ernie4_5_MoeForCausalLM", "GlmMoeDsaForCausalLM", "Ministral3ForCausalLM", "MiniMaxM2ForCausalLM"),
        *("ArceeForCausalLM", "CohereForCausalLM", "Exaone4ForCausalLM", "Glm4ForCausalLM", "GlmForCausalLM"),
        *("GraniteForCausalLM", "GraniteMoeForCausalLM", "HunYuanMoEV1ForCausalLM", "NemotronForCausalLM"),
        *("Dots1ForCausalLM", "Gemma2ForCausalLM", "GemmaForCausalLM", "OlmoeForCausalLM"),
        *("Qwen2MoeForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
        *("BambaForCausalLM", "FalconH1ForCausalLM", "Lfm2MoeForCausalLM", "Mamba2ForCausalLM"),
        *("Lfm3ForCausalLM", "MiniMaxForCausalLM", "FalconMambaForCausalLM", "Glm4MoeLiteForCausalLM"),
        "Mistral4ForCausalLM",
        *("OlmoHybridForCausalLM", "JambaForCausalLM", "Gemma3nForCausalLM", "Zamba2ForCausalLM"),
        *("CwmForCausalLM", "ExaoneMoeForCausalLM", "Gemma4UnifiedForCausalLM", "HYV3ForCausalLM"),
        *("MinistralForCausalLM", "SolarOpenForCausalLM", "PhimoeForCausalLM"),
        *("Olmo2ForCausalLM", "Qwen3_5MoeForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM"),
        *("BailingHybridForCausalLM", "FalconForCausalLM", "Glm5NextForCausalLM", "GPTJForCausalLM", "MptForCausalLM"),
        "HyperCLOVAXForCausalLM",
    }
)
"""Architectures made of others' layers: their short form is the prompts of the first variant."""

KINDS = frozenset(
    {
        *("LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM", "BloomForCausalLM"),
        *("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Lfm2ForCausalLM", "Qwen3NextForCausalLM"),
        "MambaForCausalLM",
    }
)
"""One architecture for each kind of layer: attention with a window, sinks or slopes, latents, an indexer, states."""


def short_form(variants: Sequence[Variant], *, without: frozenset[str] = frozenset()) -> list[Any]:
    """All variants; those of `without`, and all but the first of each `DERIVED`, are in the long form only."""
    seen: set[str] = set()
    cases = []
    for each in variants:
        is_long = each.architecture in without or (each.architecture in DERIVED and each.architecture in seen)
        cases.append(pytest.param(each, marks=[pytest.mark.slow] if is_long else []))
        seen.add(each.architecture)
    return cases


def first_of_each(variants: Sequence[Variant], *, without: frozenset[str] = frozenset()) -> pytest.MarkDecorator:
    """Parametrises `variant`, a fixture; in the short form, by the first variant of each architecture.

    `without`: architectures that are in the long form only.
    """
    seen: set[str] = set(without)
    cases = []
    for each in variants:
        marks = [pytest.mark.slow] if each.architecture in seen else []
        cases.append(pytest.param(each, marks=marks, id=f"{each.architecture}, {each.name}"))
        seen.add(each.architecture)
    return pytest.mark.parametrize("variant", cases, indirect=True)


def families() -> dict[str, list[Variant]]:
    """Variants by the module that has them."""
    names = sorted(module.name for module in iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").VARIANTS for name in names}


def all_variants() -> list[Variant]:
    """Of every family."""
    return [variant for variants in families().values() for variant in variants]
