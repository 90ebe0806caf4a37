"""Tensor and expert parallelism: each rank's shard, collectives, and process groups by torch.distributed.

Ranks of one host on CPUs use `models.ops.cpu.collectives` in place of process groups; `engine.runner.build` chooses.
"""
