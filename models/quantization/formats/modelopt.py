"""Parser of NVIDIA ModelOpt's FP8: in config.json, or in the hf_quant_config.json that is common beside it."""

from models.config_fields import Fields
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig, Storage


def parse(section: Fields, method: str) -> QuantizationConfig:
    """The algorithm is under `quantization` in the file of its own, at the top in config.json."""
    inner = section.section("quantization") or section
    if inner.string("quant_algo", "") != "FP8":
        raise inner.invalid("quant_algo", '"FP8"')
    layer = LayerQuantConfig(Storage.SCALED, "fp8", Granularity.TENSOR, 8)
    exclude = inner.strings("exclude_modules") + inner.strings("ignore")
    return QuantizationConfig(method, layer, exclude_layers=exclude)
