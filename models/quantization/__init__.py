"""Quantized checkpoints: methods as config.json names them, tensor layouts, dequantization, and weights kept
quantized.
"""
