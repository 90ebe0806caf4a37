"""Model text to content, reasoning and tool calls, and the grammars that enforce them."""
