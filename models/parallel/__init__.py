"""How ranks share a model: the shard of each, their collectives, and process groups by torch.distributed."""
