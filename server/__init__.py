"""The HTTP process: command line, endpoints, streaming, metrics. Imports no torch."""
