"""Replicas as processes that divide experts, against one that has all: test_expert_parallel.py, and cpu_fuzz.py."""

import os
import random
import signal
from functools import partial

import pytest
import torch

from models.errors import ReplicaLeft
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import runtime
from models.ops.cpu.collectives import SharedMemoryExchange
from models.ops.cpu.packed_weight import PackedWeight
from tests.parity.clones import clone
from tests.parity.test_cpu_operators import bf16

REPLICAS, MOST_TOKENS, EXPERTS, SIZE = 3, 40, 12, 64
SHARE = EXPERTS // REPLICAS


class Step:
    """The work of all replicas in a round, generated equally by each of them."""

    def __init__(self, draw: random.Random, number: int) -> None:
        self.counts = tuple(draw.choice((0, 0, 1, 2, 17, MOST_TOKENS)) for _ in range(REPLICAS))
        top_k = draw.choice((1, 4))
        # Sometimes all tokens go to the experts of one replica, or to some of other ranks.
        experts = draw.choice((range(EXPERTS), range(SHARE), range(EXPERTS + 4)))
        self.hidden = [bf16(max(1, count), SIZE, seed=7 * number + each) for each, count in enumerate(self.counts)]
        self.ids = [
            torch.tensor([draw.sample(experts, top_k) for _ in rows], dtype=torch.int64) for rows in self.hidden
        ]


def stack(experts: range, weight: torch.Tensor) -> PackedWeight:
    """The experts of a replica among `weight` [EXPERTS, SIZE, SIZE]."""
    packed = PackedWeight(len(experts) * SIZE, SIZE)
    packed.put(0, weight[experts.start : experts.stop].reshape(-1, SIZE))
    return packed


def expected(step: Step, replica: int, whole: PackedWeight) -> torch.Tensor:
    """The results of a replica's pairs; 0 for pairs without an expert. # [tokens, top_k, SIZE]"""
    ids = step.ids[replica]
    counts, tokens, places = expert_ops.sort_pairs(ids.clamp(max=EXPERTS - 1), EXPERTS)
    products = ops.grouped_linear(step.hidden[replica], whole, None, counts, tokens=tokens)[places]
    return products.masked_fill((ids >= EXPERTS)[..., None], 0)


def be_replica(replica: int, descriptor: int, rounds: int) -> None:
    """Raises `AssertionError` if a token's bits differ from those of a replica with all experts."""
    draw = random.Random(0)
    own = random.Random(replica)
    loaded = runtime.start(1)
    assert loaded is not None
    exchange = SharedMemoryExchange(loaded, replica, REPLICAS, descriptor, MOST_TOKENS)
    weight = bf16(EXPERTS * SIZE, SIZE, seed=1).view(EXPERTS, SIZE, SIZE)
    local = range(replica * SHARE, (replica + 1) * SHARE)
    whole, mine = stack(range(EXPERTS), weight), stack(local, weight)

    def compute(rows: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return ops.grouped_linear(rows, mine, None, counts, tokens=tokens)

    for number in range(rounds):
        loaded.start(own.choice((1, 2)))
        step = Step(draw, number)
        assert exchange.agree(step.counts[replica]) == step.counts
        answers, places = exchange.across(
            range(EXPERTS), local, step.hidden[replica], step.ids[replica], compute, step.counts
        )
        found = answers[places]
        wanted = expected(step, replica, whole) if step.counts[replica] else torch.zeros_like(found)
        assert torch.equal(found, wanted), f"round {number}, replica {replica}"
    if replica:
        # They wait for one that has left.
        with pytest.raises(ReplicaLeft, match="replica 0 has left"):
            exchange.agree(0)
    else:
        exchange.leave()


def exchange_in_processes(rounds: int) -> bool:
    """Let replicas, each a clone of this process, compute that many rounds; return whether all of them succeeded."""
    descriptor = os.memfd_create("fuzz")
    children: set[int] = set()
    group = 0
    try:
        for replica in range(REPLICAS):
            child = clone(partial(be_replica, replica, descriptor, rounds))
            # In a group of their own, so that waiting for them leaves this process' other children alone.
            group = group or child
            os.setpgid(child, group)
            children.add(child)
        while children:
            child, status = os.waitpid(-group, 0)
            children.discard(child)
            if status:
                return False
        return True
    finally:
        os.close(descriptor)
        # The others would wait for one that failed.
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
