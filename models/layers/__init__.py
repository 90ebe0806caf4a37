"""Layers that model files are built of, each able to hold one rank's shard of its weights."""
