"""The public face: HTTP, SSE, errors, metrics and the command line. Imports no torch."""
