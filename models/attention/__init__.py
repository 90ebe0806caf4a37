"""Attention backends over the paged KV cache, one file each, their registry, and the context of a forward step."""
