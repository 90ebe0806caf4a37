"""`parse_quantization`: the one way from a checkpoint's fields to a `QuantizationConfig`; a parser a method."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from models.config_fields import Fields
from models.quantization.config import QuantizationConfig
from models.quantization.formats import awq, compressed_tensors, fp8, gptq, modelopt, mxfp4, quark
from models.quantization.formats.common import scheme_error

_SECTIONS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"

_PARSERS: Mapping[str, Callable[[Fields, str], QuantizationConfig]] = MappingProxyType(
    {
        "fp8": fp8.parse,
        "fbgemm_fp8": fp8.parse_fbgemm,
        "compressed-tensors": compressed_tensors.parse,
        "mxfp4": mxfp4.parse,
        "quark": quark.parse,
        "awq": awq.parse,
        "gptq": gptq.parse,
        "modelopt": modelopt.parse,
    }
)
QUANTIZATION_METHODS = tuple(_PARSERS)


def parse_quantization(config: Fields, directory: Path | None = None) -> QuantizationConfig | None:
    """What config.json, or ModelOpt's file beside it in `directory`, says of quantisation; None: all is dense.

    Raises `CheckpointError`, a sentence naming the field and its value, for a scheme that cannot be read here.
    """
    for name in _SECTIONS:
        section = config.section(name)
        if section is not None:
            return _parse(section, "compressed-tensors" if name == "compression_config" else "")
    if directory is not None and (directory / MODELOPT_FILE).is_file():
        return _parse(Fields.from_file(directory / MODELOPT_FILE), "modelopt")
    return None


def _parse(section: Fields, default: str) -> QuantizationConfig:
    method = section.string("quant_method", default).replace("_", "-").lower()
    for name, parse in _PARSERS.items():
        if method == name.replace("_", "-"):
            try:
                return parse(section, name)
            except re.error as error:
                raise scheme_error(
                    section, f"names modules by {error.pattern!r}, which is no regular expression: {error}"
                ) from error
    raise section.invalid("quant_method", f"one of {', '.join(QUANTIZATION_METHODS)}")
