"""Layers that architectures are built of; each holds one rank's shard and knows how its weights are loaded."""
