"""What a model writes, taken apart: text, reasoning and tool calls. A file a dialect under `tools` and `reasoning`."""
