"""The syntaxes of tool calls: one module per dialect, listed in `server.parsing.registry`."""
