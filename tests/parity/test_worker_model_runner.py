"""The model runner on a small random checkpoint: transformers' greedy tokens, for any division into steps."""

import dataclasses
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config, SpeculativeConfig
from engine.core.scheduler import Scheduler
from engine.runner.model_runner import ModelRunner
from engine.runner.start import measure_kv_cache, run_worst_case
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.demo import CHECKPOINT_DIR
from models.ops.cpu.runtime import load_library
from tests.parity.runners import load, rebuilt
from tests.sweeps import sweep

VOCAB_SIZE = 160
NUM_NEW = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
NUM_BLOCKS = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        # Wide weights, so that no two tokens have nearly equal logits and rounding decides nothing.
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    path = tmp_path_factory.mktemp("checkpoint")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """32 prompts of 1 to 70 tokens; each third one begins like the previous one."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in rng.integers(1, 70, size=32)]
    prompts[0], prompts[4] = [3], rng.integers(0, VOCAB_SIZE, size=64).tolist()
    for i in range(2, 32, 3):
        prompts[i] = prompts[i - 1][:48] + prompts[i][:20]
    prompts[5] = prompts[4].copy()
    return prompts


@pytest.fixture(scope="module")
def expected(checkpoint: Path, reference: Qwen3ForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens: ours, each of which is the argmax of its pass over the prompt and those before it.

    A pass for each prompt, where `generate` of transformers takes one for each token.
    """
    runner = runner_for(checkpoint)
    found = generate(runner, Scheduler(runner.config), prompts)
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, found, strict=True):
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == tokens
            assert len(tokens) == NUM_NEW
    return found


def runner_for(checkpoint: Path, dtype: torch.dtype = torch.float32, **fields: object) -> ModelRunner:
    config = Config(**{"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 64, **fields})
    assert config.num_kvcache_blocks is not None
    return ModelRunner(load(checkpoint, config, dtype), config.num_kvcache_blocks)


def generate(runner: ModelRunner, scheduler: Scheduler, prompts: list[list[int]], params=GREEDY) -> list[list[int]]:
    """Through the real scheduler, to the end."""
    block_size = runner.config.kv_cache_block_size
    params = params if isinstance(params, list) else [params] * len(prompts)
    seqs = [
        Sequence(prompt, block_size, own, id=i) for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    scheduler.extend(seqs)
    while (scheduled := scheduler.schedule()) is not None:
        batch, in_step = scheduled
        scheduler.postprocess(list(in_step.values()), runner.forward(batch))
        scheduler.check_integrity()
    return [seq.completion_token_ids for seq in seqs]


def step_alone(runner: ModelRunner, seq: Sequence, start: int, end: int, *, new: bool) -> ScheduledBatchOutput:
    """A step that computes the tokens `[start, end)` of one sequence, as a prefill unless it is a decode of the last
    token."""
    decode = not new and end - start == 1
    count = end - start
    return runner.forward(
        ScheduledBatch(
            {seq.id: seq},
            [count],
            count,
            total_tokens_num_prefill=0 if decode else count,
            total_tokens_num_decode=count if decode else 0,
            total_seqs_num=1,
            total_seqs_num_prefill=int(not decode),
            total_seqs_num_decode=int(decode),
            context_lens=[end],
            new_seqs=[seq] if new else [],
        )
    )


@pytest.mark.parametrize("chunk", [5, 16, 100])
def test_prompts_in_chunks_then_decodes_give_transformers_tokens(checkpoint, prompts, expected, chunk: int):
    runner = runner_for(checkpoint)
    for i in (0, 1, 4):
        seq = Sequence(prompts[i], 16, GREEDY)
        seq.slot, seq.block_table = 2, list(range(9, 0, -1))
        starts = list(range(0, len(prompts[i]), chunk))
        for start in starts:
            output = step_alone(runner, seq, start, min(start + chunk, len(prompts[i])), new=start == 0)
            # A chunk that does not reach the prompt's end samples nothing.
            assert bool(output.token_ids) == (start == starts[-1])
        for _ in range(NUM_NEW - 1):
            seq.append_token(output.token_ids[seq.id][0])
            output = step_alone(runner, seq, len(seq) - 1, len(seq), new=False)
        assert [*seq.completion_token_ids, *output.token_ids[seq.id]] == expected[i]


@sweep(tokens_per_step=[4096, 1, 7, 16, 64], policy=["prefill_first", "mixed"])
def test_any_step_size_and_policy_gives_transformers_tokens(checkpoint, prompts, expected, policy, tokens_per_step):
    runner = runner_for(checkpoint, scheduling_policy=policy, max_num_batched_tokens=tokens_per_step)
    # With one token per step there are many steps, so a few prompts suffice.
    count = 4 if tokens_per_step == 1 else 32
    assert generate(runner, Scheduler(runner.config), prompts[:count]) == expected[:count]


@sweep(block_size=[16, 1, 32], caching=[True, False])
def test_the_prefix_cache_changes_nothing(checkpoint, prompts, expected, caching: bool, block_size: int):
    runner = runner_for(
        checkpoint,
        enable_prefix_caching=caching,
        kv_cache_block_size=block_size,
        num_kvcache_blocks=4096 // block_size,
    )
    scheduler = Scheduler(runner.config)
    for _ in range(2):
        assert generate(runner, scheduler, prompts[:12]) == expected[:12]
    assert (scheduler.stats("decode", 0.0).prefix_hit_tokens > 0) == caching


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_preempted_sequences_go_on_where_they_were(checkpoint, prompts, expected, policy: str):
    runner = runner_for(checkpoint, num_kvcache_blocks=13, scheduling_policy=policy)
    scheduler = Scheduler(runner.config)
    assert generate(runner, scheduler, prompts) == expected
    assert scheduler.stats("decode", 0.0).preemptions > 0


def test_alone_is_as_in_a_batch(checkpoint, prompts, expected):
    runner = runner_for(checkpoint)
    scheduler = Scheduler(runner.config)
    assert [generate(runner, scheduler, [prompt])[0] for prompt in prompts[:8]] == expected[:8]


def test_a_seeded_request_is_the_same_alone_in_a_batch_and_after_preemption(checkpoint, prompts):
    kinds = [{}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"top_k": 9, "repetition_penalty": 1.2}]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=NUM_NEW, **kinds[i % 4]) for i in range(32)]
    runner = runner_for(checkpoint)
    together = generate(runner, Scheduler(runner.config), prompts, params)
    alone = [
        generate(runner, Scheduler(runner.config), [prompt], [own])[0]
        for prompt, own in zip(prompts[:8], params[:8], strict=True)
    ]
    assert together[:8] == alone
    cramped = runner_for(checkpoint, num_kvcache_blocks=13)
    assert generate(cramped, Scheduler(cramped.config), prompts, params) == together


def test_log_probabilities_are_transformers(checkpoint, reference, prompts):
    runner = runner_for(checkpoint)
    seq = Sequence(prompts[4], 16, SamplingParams(temperature=0.0, logprobs=3))
    seq.slot, seq.block_table = 0, [0, 1, 2, 3, 4]
    output = step_alone(runner, seq, 0, len(seq), new=True)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompts[4]])).logits[0, -1].log_softmax(-1).topk(3)
    assert output.logprobs is not None
    [found] = output.logprobs[seq.id]
    assert list(found.top_ids) == expected.indices.tolist()
    assert found.top_logprobs == pytest.approx(expected.values.tolist(), abs=1e-4)
    assert (found.token_id, found.logprob) == (found.top_ids[0], found.top_logprobs[0])


def test_broken_logits_fail_their_request_and_no_other(checkpoint, prompts, expected):
    runner = runner_for(checkpoint)
    scheduler = Scheduler(runner.config)
    seqs = [Sequence(prompt, 16, GREEDY) for prompt in prompts[:3]]
    scheduler.extend(seqs)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    intact = runner.model.compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = intact(hidden)
        logits[1, 7] = torch.nan
        return logits

    runner.model.compute_logits = broken  # type: ignore[method-assign]
    output = runner.forward(scheduled[0])
    assert list(output.errors or {}) == [seqs[1].id]
    assert f"not finite after {len(prompts[1])} tokens" in (output.errors or {})[seqs[1].id]
    assert output.req_ids == list(output.token_ids) == [seqs[0].id, seqs[2].id]
    assert [output.token_ids[seq.id][0] for seq in (seqs[0], seqs[2])] == [expected[0][0], expected[2][0]]


def test_warming_up_and_measuring_leave_no_trace(checkpoint, prompts, expected):
    runner = runner_for(checkpoint, max_num_batched_tokens=300)
    run_worst_case(runner.loaded, runner.config.max_num_seqs)
    runner = rebuilt(runner, num_blocks=NUM_BLOCKS)
    runner.warm_up()
    assert generate(runner, Scheduler(runner.config), prompts[:6]) == expected[:6]


def test_the_cache_size_is_counted_in_blocks_of_all_layers(checkpoint):
    runner = runner_for(checkpoint)
    assert measure_kv_cache(runner.loaded).num_blocks == NUM_BLOCKS
    one_block = 2 * 2 * (16 * 2 * 16) * 4  # layers, K and V, block * heads * head_dim, float32
    assert measure_kv_cache(runner.loaded).num_bytes == NUM_BLOCKS * one_block
    config = Config(cpu_kvcache_gib=100.5 * one_block / 2**30)
    assert measure_kv_cache(dataclasses.replace(runner.loaded, config=config)).num_blocks == 100


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
@pytest.mark.parametrize("drafts", [None, SpeculativeConfig(speculative_method="eagle")])
def test_a_step_paused_for_another_gives_what_both_give_alone(drafts):
    """In bfloat16, with a recorded pass of the compiled operators, seeded sampling and log probabilities.

    It is paused after each operator, and the other step is computed in each pause.
    """
    random = SamplingParams(temperature=1.0, seed=3, logprobs=3, max_tokens=NUM_NEW)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(300, 1000, size=length).tolist() for length in (70, 33, 21, 150)]

    def run(*, interposed: bool) -> list[ScheduledBatchOutput]:
        config = Config(num_kvcache_blocks=64, speculative_config=drafts)
        runner = ModelRunner(load(CHECKPOINT_DIR, config, torch.bfloat16), 64)
        seqs = [Sequence(prompt, 16, random, id=number) for number, prompt in enumerate(prompts)]
        for number, seq in enumerate(seqs):
            seq.slot, seq.block_table = number, list(range(10 * number, 10 * number + 10))
        first = batch_of(seqs[:2], new=True)
        outputs = [runner.forward(first)]
        for seq in seqs[:2]:
            seq.append_token(outputs[0].token_ids[seq.id][0])
        later: list[ScheduledBatchOutput] = []
        pauses = 0

        def pause() -> None:
            nonlocal pauses
            pauses += 1
            later.append(runner.forward_interposed(batch_of(seqs[2:], new=True)))
            runner.interrupt()

        decode = batch_of(seqs[:2], new=False)
        if interposed:
            runner.interrupt()
        outputs.append(runner.forward_with_pauses(decode, pause) if interposed else runner.forward(decode))
        if interposed:
            assert runner.program is not None
            assert pauses == len(runner.program.arguments) - 1
        outputs += later[-1:] or [runner.forward(batch_of(seqs[2:], new=True))]
        for seq in seqs:
            seq.append_token(outputs[2 if seq.id > 1 else 1].token_ids[seq.id][0])
        outputs.append(runner.forward(batch_of(seqs, new=False)))
        return outputs

    assert run(interposed=True) == run(interposed=False)


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
def test_log_probabilities_of_a_prompt_pause_for_another_step():
    """800 tokens take 20 ms after the pass; a light owner's prompt waited for them."""
    reads = SamplingParams(temperature=0.0, prompt_logprobs=3, max_tokens=1)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(300, 1000, size=length).tolist() for length in (300, 40)]

    def run(*, interposed: bool) -> tuple[list[ScheduledBatchOutput], int]:
        runner = ModelRunner(load(CHECKPOINT_DIR, Config(num_kvcache_blocks=64), torch.bfloat16), 64)
        seqs = [Sequence(prompts[0], 16, reads, id=0), Sequence(prompts[1], 16, GREEDY, id=1)]
        for seq in seqs:
            seq.slot, seq.block_table = seq.id, list(range(30 * seq.id, 30 * seq.id + 30))
        other: list[ScheduledBatchOutput] = []
        compute_logits = runner.model.compute_logits

        def arrive(hidden: torch.Tensor) -> torch.Tensor:
            if interposed and not other:
                runner.interrupt()
            return compute_logits(hidden)

        runner.model.compute_logits = arrive
        first = runner.forward_with_pauses(
            batch_of(seqs[:1], new=True), lambda: other.append(runner.forward_interposed(batch_of(seqs[1:], new=True)))
        )
        num_pauses = len(other)
        return [first, *(other or [runner.forward(batch_of(seqs[1:], new=True))])], num_pauses

    expected, no_pauses = run(interposed=False)
    outputs, num_pauses = run(interposed=True)
    assert (no_pauses, num_pauses) == (0, 1)
    assert outputs == expected
    assert expected[0].prompt_logprobs is not None
    assert len(expected[0].prompt_logprobs[0]) == 299


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
def test_a_step_does_not_pause_for_an_interruption_that_was_withdrawn():
    runner = ModelRunner(load(CHECKPOINT_DIR, Config(num_kvcache_blocks=64), torch.bfloat16), 64)
    seq = Sequence([300] * 20, 16, id=0)
    seq.slot, seq.block_table = 0, list(range(10))
    pauses: list[None] = []
    runner.interrupt()
    runner.withdraw_interruption()
    runner.forward_with_pauses(batch_of([seq], new=True), lambda: pauses.append(None))
    assert not pauses


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
def test_a_step_pauses_for_an_interruption_that_comes_while_another_is_withdrawn(monkeypatch: pytest.MonkeyPatch):
    runner = ModelRunner(load(CHECKPOINT_DIR, Config(num_kvcache_blocks=64), torch.bfloat16), 64)
    seq = Sequence([300] * 20, 16, id=0)
    seq.slot, seq.block_table = 0, list(range(10))
    operators = runner.loaded.operators
    assert operators is not None
    withdraw, arriving = operators.withdraw_interruption, Thread(target=runner.interrupt)

    def withdraw_late() -> None:
        arriving.start()
        arriving.join(0.1)
        withdraw()

    monkeypatch.setattr(operators, "withdraw_interruption", withdraw_late)
    runner.withdraw_interruption()
    arriving.join()
    pauses: list[None] = []
    runner.forward_with_pauses(batch_of([seq], new=True), lambda: pauses.append(None))
    assert len(pauses) == 1


def batch_of(seqs: list[Sequence], *, new: bool) -> ScheduledBatch:
    """A step of whole prompts, or of the last token of each sequence."""
    counts = [len(seq) if new else 1 for seq in seqs]
    total, rows = sum(counts), len(seqs)
    return ScheduledBatch(
        {seq.id: seq for seq in seqs},
        counts,
        total,
        total_tokens_num_prefill=total if new else 0,
        total_tokens_num_decode=0 if new else total,
        total_seqs_num=rows,
        total_seqs_num_prefill=rows if new else 0,
        total_seqs_num_decode=0 if new else rows,
        new_seqs=seqs if new else [],
    )
