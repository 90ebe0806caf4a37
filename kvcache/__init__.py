"""Paged KV-cache bookkeeping: blocks, the free pool, prefix hashing. No tensors live here."""
