"""How model families write tool calls: one module a dialect, listed in `server.parsing.registry`."""
