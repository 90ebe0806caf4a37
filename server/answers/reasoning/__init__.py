"""Dialects of reasoning, a file a dialect; `registry` lists them."""
