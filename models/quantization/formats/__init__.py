"""Parsers of `quantization_config`, a module a format: each names what it reads and refuses the rest."""
