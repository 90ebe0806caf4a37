"""Models: config, checkpoint loading, architectures, layers, attention, quantization, parallel groups and
operators.
"""
