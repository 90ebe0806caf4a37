"""Speculative decoding: drafters, and the accounting of what they propose."""
