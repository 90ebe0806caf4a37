"""Quantised checkpoints: what config.json says of them, and how their tensors become dense weights.

`parse_quantization` is called by `ModelConfig`, `dequantize.Dequantizer` by the loader.
"""

from models.quantization.config import LayerQuantConfig, QuantizationConfig
from models.quantization.registry import QUANTIZATION_METHODS, parse_quantization

__all__ = ["QUANTIZATION_METHODS", "LayerQuantConfig", "QuantizationConfig", "parse_quantization"]
