"""Parses model text into content, reasoning and tool calls, and writes the grammars that enforce this form."""
