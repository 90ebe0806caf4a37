"""Speculative decoding: where draft tokens come from, and how many of them are verified in a step."""
