"""Dialects of tool calls, a file a dialect; `registry` lists them."""
