"""The layers of the architectures; each holds one rank's shard and defines how its weights are loaded."""
