"""The seeded bugs of `make mutate`; see mutate.py for the meaning of the fields and how they are used.

`old` is a piece of product code that occurs once in the product tree, in any file: arithmetic or a condition, which
does not change when code moves or is reworded. Each mutation changes what Kaon computes or answers. `tests` begin with
the cheapest; the first that fails ends the trial.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A seeded bug."""

    name: str
    """Subject, slash, the fault."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Paths below tests/, each optionally with `::name`."""


_SCHEDULER = (
    "unit/core/test_scheduler.py",
    "unit/core/test_scheduler_prompts.py",
    "unit/core/test_engine_core_loop.py",
)
_RANDOM_STEPS = ("property/test_scheduling.py",)
_DEFERRED_STEPS = ("unit/core/test_submitted_steps.py", "property/test_deferred_scheduling.py")
_BLOCKS = ("unit/core/test_block_manager.py", "property/test_block_manager.py")
_SAMPLER = ("parity/test_sampler.py", "parity/test_sampler_masks.py")
_DRAWS = ("parity/test_cpu_sampling.py", "parity/test_sampler.py")
_ATTENTION = (
    "parity/test_cpu_operators.py::test_equals_the_reference_in_any_steps",
    "parity/test_cpu_operators.py::test_a_long_context_equals_the_reference",
)
_JOURNAL = ("unit/client/test_relocation.py", "property/test_journal.py", "property/test_relocation.py")
_CORE_RESTARTS = ("e2e/test_core_restarts.py",)
_GENERATION = ("unit/server/test_generation.py", "unit/server/test_generation_ends.py")
_DETOKENIZER = ("unit/text/test_detokenizer.py", "unit/text/test_request_state.py")
_TOOL_CALLS = ("unit/answers/test_tool_parsers.py", "property/test_answer_parsers.py")
_REQUESTS = ("unit/server/test_protocol_requests.py", "unit/server/test_protocol_parsing.py")

_SCHEDULING = (
    Mutation(
        "scheduler/chunk-exceeds-the-budget",
        "count = min(num_left, step.budget)",
        "count = num_left",
        (*_SCHEDULER, *_RANDOM_STEPS),
    ),
    Mutation(
        "scheduler/shrunk-row-limit-is-ignored",
        "return len(self._free_slots) > num_kept and len(self.running) + num_kept < self._limits.num_rows",
        "return len(self._free_slots) > num_kept",
        ("parity/test_gpu_memory.py",),
    ),
    Mutation(
        "scheduler/preempted-sequence-waits-at-the-end",
        "        self.waiting.appendleft(seq)\n        self.num_preemptions += 1\n",
        "        self.waiting.append(seq)\n        self.num_preemptions += 1\n",
        (*_SCHEDULER, *_RANDOM_STEPS),
    ),
    Mutation(
        "scheduler/oldest-sequence-is-preempted",
        "self.running[-1] if len(self._pool.owners) == 1",
        "self.running[0] if len(self._pool.owners) == 1",
        _SCHEDULER,
    ),
    Mutation(
        "scheduler/blocks-published-before-they-are-computed",
        "self.block_manager.publish(seq, seq.num_computed_tokens + count)",
        "self.block_manager.publish(seq, seq.num_tokens)",
        (*_SCHEDULER, *_RANDOM_STEPS),
    ),
    Mutation(
        "scheduler/last-token-published-without-its-kv",
        "self.block_manager.publish(seq, len(seq.token_ids) - 1)",
        "self.block_manager.publish(seq, len(seq.token_ids))",
        (*_SCHEDULER, *_DEFERRED_STEPS),
    ),
    Mutation(
        "scheduler/decode-needs-a-block-unnoticed",
        "if length % size <= 1]",
        "if length % size < 1]",
        (*_SCHEDULER, *_RANDOM_STEPS),
    ),
    Mutation(
        "scheduler/prompt-without-room-for-an-answer",
        "longest = self.token_limit - 1 if seq.max_tokens else self.longest_prompt",
        "longest = self.token_limit",
        _SCHEDULER,
    ),
    Mutation(
        "scheduler/delay-factor-reversed",
        "return waited > self.delay_factor * self.last_prompt_latency",
        "return waited <= self.delay_factor * self.last_prompt_latency",
        _SCHEDULER,
    ),
    Mutation(
        "scheduler/window-gives-back-a-block-still-read",
        "self.block_manager.release_unseen(seq, len(seq.token_ids) - self.window)\n        while ",
        "self.block_manager.release_unseen(seq, len(seq.token_ids) - self.window + 2)\n        while ",
        ("unit/core/test_scheduler_window.py", *_RANDOM_STEPS),
    ),
    Mutation(
        "scheduler/unfinished-prompt-gets-a-placeholder",
        "partial = frozenset(seq for seq in seqs[num_decodes:] if seq.num_computed_tokens < seq.num_tokens)",
        "partial = frozenset(seq for seq in seqs[num_decodes:] if seq.num_computed_tokens > seq.num_tokens)",
        _DEFERRED_STEPS,
    ),
    Mutation(
        "scheduler/length-limit-one-late",
        'return "max_tokens" if len(seq.token_ids) >= seq.token_limit else None',
        'return "max_tokens" if len(seq.token_ids) > seq.token_limit else None',
        _SCHEDULER,
    ),
    Mutation(
        "scheduler/generation-config-stop-token-ignored",
        "else (self._eos_token_id, *self._stop_token_ids)",
        "else (self._eos_token_id,)",
        _SCHEDULER,
    ),
    Mutation(
        "scheduler/priority-reversed",
        "seq.arrive_time + priority * self._aging_seconds",
        "seq.arrive_time - priority * self._aging_seconds",
        ("unit/core/test_waiting_queue.py", "property/test_waiting_queue.py"),
    ),
    Mutation(
        "scheduler/priority-not-clamped",
        "priority = max(-MAX_PRIORITY, min(seq.priority, MAX_PRIORITY))",
        "priority = seq.priority",
        ("unit/core/test_waiting_queue.py", "property/test_waiting_queue.py"),
    ),
    Mutation(
        "scheduler/failed-step-leaves-its-blocks-shared",
        "            self.block_manager.forget(seq)\n        return self.remove(live",
        "            pass\n        return self.remove(live",
        (*_SCHEDULER, "unit/core/test_isolation.py", *_RANDOM_STEPS),
    ),
    Mutation(
        "scheduler/draft-after-a-wrong-one-accepted",
        "is_end[1:] |= is_followed & (token_ids[:-1] != drafts)",
        "is_end[1:] = is_end[1:]",
        (
            "parity/test_kv_cache_memory.py",
            "parity/test_speculative_decoding.py::test_drafts_change_nothing_that_is_answered",
        ),
    ),
)

_CACHE = (
    Mutation(
        "blocks/hit-without-the-parent",
        "return block if block.parent == parent and block.token_ids == token_ids else None",
        "return block if block.token_ids == token_ids else None",
        (*_BLOCKS, *_RANDOM_STEPS),
    ),
    Mutation(
        "blocks/hit-without-the-tokens",
        "return block if block.parent == parent and block.token_ids == token_ids else None",
        "return block if block.parent == parent else None",
        _BLOCKS,
    ),
    Mutation(
        "blocks/newest-cached-block-evicted",
        "return self._cached.popitem(last=False)[0]",
        "return self._cached.popitem(last=True)[0]",
        _BLOCKS,
    ),
    Mutation(
        "blocks/head-of-a-prefix-freed-first",
        "        for block_id in reversed(block_ids):\n            self.pool.release(block_id)",
        "        for block_id in block_ids:\n            self.pool.release(block_id)",
        _BLOCKS,
    ),
    Mutation(
        "blocks/free-cached-blocks-counted-twice",
        "self.pool.blocks[block_id].ref_count > 0 for block_id in",
        "self.pool.blocks[block_id].ref_count >= 0 for block_id in",
        (*_BLOCKS, *_RANDOM_STEPS),
    ),
    Mutation(
        "blocks/growth-needs-one-token-less",
        "beyond = seq.num_tokens - 1 + num_new_tokens - len(seq.block_table) * self.block_size",
        "beyond = seq.num_tokens - 2 + num_new_tokens - len(seq.block_table) * self.block_size",
        _BLOCKS,
    ),
    Mutation(
        "blocks/partial-block-published",
        "full = min(num_computed, len(seq.token_ids)) // self.block_size",
        "full = -(-min(num_computed, len(seq.token_ids)) // self.block_size)",
        _BLOCKS,
    ),
    Mutation(
        "blocks/released-blocks-of-a-failed-step-stay-shared",
        "enumerate(seq.block_hashes[:released])",
        "enumerate(seq.block_hashes[:0])",
        ("unit/core/test_scheduler_window.py", *_BLOCKS),
    ),
    Mutation(
        "blocks/blocks-of-an-unread-step-freed-at-once",
        "        if self._left:\n            self._left[-1] +=",
        "        if len(self._left) > 1:\n            self._left[-1] +=",
        (*_BLOCKS, *_DEFERRED_STEPS),
    ),
    Mutation(
        "blocks/stale-prefix-match",
        "            block.update(NO_HASH, [])\n            self.version += 1\n",
        "            block.update(NO_HASH, [])\n",
        (*_BLOCKS, *_RANDOM_STEPS),
    ),
    Mutation(
        "blocks/adapters-share-prefixes",
        "return 2 * number * _DIGESTS + ",
        "return 2 * _DIGESTS + ",
        (*_BLOCKS, "unit/client/test_placement.py", "property/test_block_manager.py"),
    ),
)

_SAMPLING = (
    Mutation(
        "sampler/top-p-drops-the-token-at-the-edge",
        "within_top_p = (1 + torch.searchsorted(cdf, needed[:, None])[:, 0]).clamp_(max=width)",
        "within_top_p = torch.searchsorted(cdf, needed[:, None])[:, 0].clamp_(min=1, max=width)",
        _DRAWS,
    ),
    Mutation(
        "sampler/repetition-penalty-rewards-negative-logits",
        "logits[index] = torch.where(seen > 0, seen / values, seen * values)",
        "logits[index] = seen / values",
        ("parity/test_triton_sampling.py", *_SAMPLER),
    ),
    Mutation(
        "sampler/presence-penalty-reversed",
        "logits[index] = logits[index] - values",
        "logits[index] = logits[index] + values",
        _SAMPLER,
    ),
    Mutation(
        "sampler/frequency-counts-once",
        "logits.index_put_(index, -values if kind == FREQUENCY else values, accumulate=True)",
        "added = logits.index_put(index, values, accumulate=True)\n"
        "            logits[index] = logits[index] - values if kind == FREQUENCY else added[index]",
        _SAMPLER,
    ),
    Mutation(
        "sampler/penalties-count-the-prompt",
        "begins = np.zeros_like(ends) if prompt else self._num_prompt_tokens[at]",
        "begins = np.zeros_like(ends)",
        ("parity/test_worker_input_batch.py", "parity/test_sampler.py"),
    ),
    Mutation(
        "sampler/min-tokens-one-late",
        "if num_tokens[row] < self._min_num_tokens[slots[row]]:",
        "if num_tokens[row] <= self._min_num_tokens[slots[row]]:",
        ("parity/test_worker_input_batch.py", "parity/test_sampler.py"),
    ),
    Mutation(
        "sampler/noise-ignores-the-seed",
        "return _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)",
        "return _mix((positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)",
        ("parity/test_worker_input_batch.py", "parity/test_sampler.py"),
    ),
    Mutation(
        "sampler/noise-ignores-the-position",
        "return _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)",
        "return _mix(keys + (0 * positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)",
        ("parity/test_worker_input_batch.py", "parity/test_sampler.py"),
    ),
    Mutation(
        "sampler/noise-bound-too-low",
        "(best->score - BOUND_SLACK - 31 * M_LN2)",
        "(best->score - BOUND_SLACK - 30 * M_LN2)",
        _DRAWS,
    ),
    Mutation(
        "sampler/rejected-draft-replaced-from-the-whole-target",
        "rest = (p - q).clamp_(min=0.0)",
        "rest = p.clone()",
        ("parity/test_draft_acceptance.py",),
    ),
    Mutation(
        "sampler/later-draft-has-the-first-ones-mask",
        "matcher = last.after(unread[-1:])",
        "matcher = last",
        ("parity/test_speculative_grammars.py",),
    ),
    Mutation(
        "sampler/choices-share-a-seed",
        "(params.seed + choice + 2**63) % 2**64 - 2**63",
        "(params.seed + 2**63) % 2**64 - 2**63",
        (*_GENERATION, *_REQUESTS, "unit/server/test_completion_preparation.py"),
    ),
    Mutation(
        "sampler/rank-of-equal-logits",
        "1 + int(np.count_nonzero(row[:token] >= value)) + ",
        "1 + int(np.count_nonzero(row[:token] > value)) + ",
        ("parity/test_prompt_logprobs.py", "parity/test_sampler.py"),
    ),
    Mutation(
        "sampler/bad-word-completed-by-its-last-token",
        "generated[1 - len(word) :].tolist() == list(word[:-1])",
        "len(word) <= 1 + len(generated)",
        ("unit/core/test_bad_words.py", "parity/test_worker_input_batch.py"),
    ),
    Mutation(
        "sampler/allowed-tokens-lift-the-grammar",
        "mask[:num_words] &= row.allowed",
        "mask[:num_words] = row.allowed",
        ("parity/test_sampler_masks.py", "unit/text/test_structured_matchers.py"),
    ),
    Mutation(
        "sampler/draw-top-p-is-a-share-of-the-whole-row",
        "(struct goal){op->top_p[which] * whole, ENOUGH_MASS}",
        "(struct goal){op->top_p[which] * total, ENOUGH_MASS}",
        _DRAWS,
    ),
    Mutation(
        "sampler/draw-min-p-ignored",
        "while (likely < kept && weights[likely] >= op->min_p[which]) likely++;",
        "while (likely < kept && weights[likely] >= 0) likely++;",
        _DRAWS,
    ),
    Mutation(
        "sampler/largest-orders-negative-logits-upside-down",
        "(bits)(b ^ ((b >> 31) & 0x7fffffff) ^ 0x7fffffff)",
        "(bits)(b ^ 0x7fffffff)",
        _DRAWS,
    ),
    Mutation(
        "sampler/greedy-takes-the-last-of-equals",
        "return value > peak || (value != value && peak == peak);",
        "return value >= peak || (value != value && peak == peak);",
        (
            "parity/test_cpu_operators.py::test_the_first_of_equal_logits_wins_and_a_nan_before_any_number",
            "parity/test_cpu_operators.py::test_chooses_what_the_logits_would",
        ),
    ),
)

_KERNELS = (
    Mutation(
        "kernels/c-attention-sink-takes-no-probability",
        "total = total * share + exp2_of(all(sink - base))[0];",
        "total = total * share;",
        _ATTENTION,
    ),
    Mutation(
        "kernels/c-attention-window-one-too-wide",
        "max64(0, position - op->window + 1)",
        "max64(0, position - op->window)",
        _ATTENTION,
    ),
    Mutation(
        "kernels/c-attention-split-not-rescaled",
        "store(into->total, load(into->total) * old + load(from->total) * new);",
        "store(into->total, load(into->total) + load(from->total) * new);",
        _ATTENTION,
    ),
    Mutation(
        "kernels/c-attention-shares-unequal-blocks",
        "while (blocks < most && a[blocks] == b[blocks]) blocks++;",
        "while (blocks < most && a[0] == b[0]) blocks++;",
        (
            "parity/test_cpu_operators.py::test_rows_that_share_their_first_blocks_attend_as_each_does_alone",
            "parity/test_cpu_threads.py",
        ),
    ),
    Mutation(
        "kernels/c-rope-turns-the-wrong-way",
        "struct both low = minus(times(a, cos), times(b, sin)),",
        "struct both low = plus(times(a, cos), times(b, sin)),",
        ("parity/test_cpu_operators.py::test_equals_the_reference",),
    ),
    Mutation(
        "kernels/c-store-leaves-old-values-behind",
        "memset(values + from * op->value_size, 0, (op->block_size - from) * op->value_size * sizeof(bf16));",
        "memset(values + from * op->value_size, 0, 0);",
        ("parity/test_cpu_operators.py::test_equals_the_reference", *_ATTENTION),
    ),
    Mutation(
        "kernels/c-norm-offset-ignored",
        "v = times(v, shifted(load_both(weights + i, width), offset));",
        "v = times(v, shifted(load_both(weights + i, width), 0 * offset));",
        ("parity/test_cpu_operators.py::test_norm_equals_the_reference",),
    ),
    Mutation(
        "kernels/c-linear-bias-of-the-first-panel",
        "widen(op->bias[output + i]);\n    if (!op->is_float",
        "widen(op->bias[i]);\n    if (!op->is_float",
        ("parity/test_cpu_operators.py::test_equals_the_reference",),
    ),
    Mutation(
        "kernels/c-delta-net-convolution-shifted",
        "int64_t row = (position + 1 + tap) % kernel;",
        "int64_t row = (position + tap) % kernel;",
        ("parity/test_cpu_delta.py",),
    ),
    Mutation(
        "kernels/c-router-weights-not-renormalised",
        "float divisor = op->renormalize ? total + 1e-20f : 1;",
        "float divisor = 1;",
        ("parity/test_cpu_experts.py",),
    ),
    Mutation(
        "kernels/c-router-group-judged-by-its-best-alone",
        "return best.count == 2 ? values[0] + values[1] : values[0];",
        "return values[0];",
        ("parity/test_cpu_experts.py", "parity/test_cpu_models.py::test_errs_no_more_than_transformers_own"),
    ),
    Mutation(
        "kernels/c-experts-of-another-rank",
        "return expert - op->first + (expert < op->first ? op->experts : 0);",
        "return expert;",
        ("parity/test_cpu_experts.py", "parity/test_expert_parallel.py::test_ranks_of_one_replica_add_up"),
    ),
    Mutation(
        "kernels/c-all-reduce-keeps-the-last-rank",
        "sums[i] += widen(part[i]);",
        "sums[i] = widen(part[i]);",
        ("parity/test_cpu_group.py",),
    ),
    Mutation(
        "kernels/c-latent-rope-turns-the-wrong-way",
        "out[i + pairs] = narrow(b * cos[i + pairs] + a * sin[i + pairs]);",
        "out[i + pairs] = narrow(b * cos[i + pairs] - a * sin[i + pairs]);",
        ("parity/test_cpu_latents.py",),
    ),
    Mutation(
        "kernels/triton-attention-window-one-too-wide",
        "firsts = positions - window + 1\n",
        "firsts = positions - window\n",
        ("parity/test_triton_attention.py",),
    ),
    Mutation(
        "kernels/triton-attention-sink-takes-no-probability",
        ".to(tl.float32) * LOG2_E\n        total = 1.0",
        ".to(tl.float32) * LOG2_E\n        total = 0.0",
        ("parity/test_triton_attention.py",),
    ),
    Mutation(
        "kernels/triton-rope-turns-the-wrong-way",
        "second = (second * cos - unrotated * sin).to(DTYPE).to(tl.float32)",
        "second = (second * cos + unrotated * sin).to(DTYPE).to(tl.float32)",
        ("parity/test_triton_attention.py",),
    ),
    Mutation(
        "kernels/triton-gate-lacks-its-one",
        "return (up + 1.0) * gate * tl.sigmoid(alpha * gate)",
        "return up * gate * tl.sigmoid(alpha * gate)",
        ("parity/test_triton_dense.py::test_gated",),
    ),
    Mutation(
        "kernels/triton-mxfp4-sign-lost",
        "return (bits & -0x7E400000)",
        "return (bits & 0x01C00000)",
        ("parity/test_triton_quantized.py",),
    ),
    Mutation(
        "kernels/triton-noise-off-by-one-position",
        "at = (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN_GAMMA",
        "at = position.to(tl.uint64, bitcast=True) * _GOLDEN_GAMMA",
        ("parity/test_triton_sampling.py",),
    ),
    Mutation(
        "kernels/reference-attention-hides-the-own-key",
        "hidden = keys > positions\n",
        "hidden = (keys >= positions) & (keys > 0)\n",
        ("parity/test_triton_attention.py",),
    ),
    Mutation(
        "kernels/torch-router-weights-with-the-correction",
        "_, ids = top_k_lower_first(choice, top_k)\n    weights = scores.gather(-1, ids)",
        "_, ids = top_k_lower_first(choice, top_k)\n    weights = choice.gather(-1, ids)",
        ("parity/test_moe_routing.py", "parity/test_triton_dense.py"),
    ),
    Mutation(
        "kernels/torch-rope-llama3-stretches-short-waves",
        "torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)",
        "torch.where(wavelengths < shortest, frequencies / rope.factor, frequencies)",
        ("parity/test_model_rope.py",),
    ),
    Mutation(
        "kernels/torch-rope-yarn-ramp-reversed",
        "keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)",
        "keep = ((pairs - low) / (high - low)).clamp(0, 1)",
        ("parity/test_model_rope.py",),
    ),
)

_QUANTISATION = (
    Mutation(
        "quantisation/c-int4-nibbles-swapped",
        "(char)((rounded[i + j] + MIDDLE) | (rounded[i + FOUR + j] + MIDDLE) << 4)",
        "(char)((rounded[i + FOUR + j] + MIDDLE) | (rounded[i + j] + MIDDLE) << 4)",
        ("parity/test_cpu_quantized.py",),
    ),
    Mutation(
        "quantisation/c-int4-zero-not-subtracted",
        "_mm512_shuffle_epi8(_mm512_cvtepu8_epi32(stored), first)",
        "_mm512_shuffle_epi8(_mm512_setzero_si512(), first)",
        ("parity/test_cpu_codes.py",),
    ),
    Mutation(
        "quantisation/c-int8-scale-of-half-the-largest",
        'return is_finite ? most.value / LARGEST : __builtin_nanf("");',
        'return is_finite ? most.value / LARGEST / 2 : __builtin_nanf("");',
        ("parity/test_cpu_quantized.py",),
    ),
    Mutation(
        "quantisation/gptq-zero-points-one-low",
        'zero_offset = 1 if checkpoint_format == "gptq" else 0',
        "zero_offset = 0",
        ("parity/test_quantization.py",),
    ),
    Mutation(
        "quantisation/gptq-zero-point-does-not-wrap",
        "self.layer.zero_offset) & (\n            (1 << self.layer.bits) - 1\n        )",
        "self.layer.zero_offset)",
        ("parity/test_quantization.py", "parity/test_quantization_refusals.py", "parity/test_model_loader.py"),
    ),
    Mutation(
        "quantisation/gptq-activation-order-ignored",
        "return lambda of_groups: of_groups[:, group]",
        "return lambda of_groups: _widened(of_groups, group_size or columns, columns)",
        ("parity/test_quantization.py",),
    ),
    Mutation(
        "quantisation/awq-nibbles-in-plain-order",
        "AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)",
        "AWQ_NIBBLES = (0, 1, 2, 3, 4, 5, 6, 7)",
        ("parity/test_quantization.py",),
    ),
    Mutation(
        "quantisation/mxfp4-nibbles-swapped",
        "(_E2M1[code % 16], _E2M1[code // 16])",
        "(_E2M1[code // 16], _E2M1[code % 16])",
        ("parity/test_quantization.py",),
    ),
    Mutation(
        "quantisation/packed-zero-points-added",
        "            if zeros is not None:\n                values -= spread(zeros[some].float())",
        "            if zeros is not None:\n                values += spread(zeros[some].float())",
        ("parity/test_quantization.py",),
    ),
    Mutation(
        "quantisation/fp8-blocks-restart-every-chunk",
        "block = torch.arange(some.start, some.stop) // block_rows",
        "block = torch.arange(some.stop - some.start) // block_rows",
        ("parity/test_quantization.py", "parity/test_model_loader.py", "parity/test_triton_quantized_models.py"),
    ),
    Mutation(
        "quantisation/uncalibrated-kv-scale-taken-at-its-word",
        "value = float(tensor) if tensor > 0 else 1.0",
        "value = float(tensor)",
        ("parity/test_kv_cache_dtype.py", "parity/test_quantization.py", "parity/test_quantization_refusals.py"),
    ),
)

_RECOVERY = (
    Mutation(
        "recovery/progress-does-not-clear-crashes",
        "1 if tokens > self.tokens else self.times + 1, tokens)",
        "self.times + 1, tokens)",
        _JOURNAL,
    ),
    Mutation(
        "recovery/poison-tried-once-more",
        "entry.crashes >= (_MAX_KILLS if killed else _MAX_CRASHES)",
        "entry.crashes > (_MAX_KILLS if killed else _MAX_CRASHES)",
        _JOURNAL,
    ),
    Mutation(
        "recovery/journal-keeps-the-last-step-only",
        "entry.token_ids += output.output_tokens",
        "entry.token_ids = output.output_tokens",
        _JOURNAL,
    ),
    Mutation(
        "recovery/resumed-request-forgets-its-tokens",
        "resumed_token_ids=tuple(self.token_ids),",
        "resumed_token_ids=tuple(self.token_ids[:-1]),",
        _JOURNAL,
    ),
    Mutation(
        "recovery/prompt-logprobs-asked-again",
        "params = msgspec.structs.replace(params, prompt_logprobs=None)\n        return msgspec",
        "params = msgspec.structs.replace(params)\n        return msgspec",
        (*_JOURNAL, *_CORE_RESTARTS),
    ),
    Mutation(
        "recovery/request-aborted-while-it-is-paused-never-ends",
        'output.finish_reason == "abort" and not entry.aborted:',
        'output.finish_reason == "abort":',
        (*_JOURNAL, "e2e/test_http_slow_readers.py"),
    ),
    Mutation(
        "recovery/one-restart-too-many",
        "if len(self._restarts) >= self._max_restarts or self._futile",
        "if len(self._restarts) > self._max_restarts or self._futile",
        ("unit/client/test_restarts.py",),
    ),
    Mutation(
        "recovery/restart-window-never-passes",
        "while self._restarts and self._restarts[0] <= now - self._window:",
        "while self._restarts and self._restarts[0] <= now - 2 * self._window:",
        ("unit/client/test_restarts.py",),
    ),
    Mutation(
        "recovery/requests-move-at-once",
        "if unavailable < UNAVAILABLE_SECONDS:",
        "if unavailable < 0:",
        _JOURNAL,
    ),
    Mutation(
        "recovery/other-choices-of-a-suspect-move",
        "if id(each.request.prompt_token_ids) not in held]",
        "if each not in held]",
        _JOURNAL,
    ),
    Mutation(
        "recovery/two-suspects-are-tried-at-a-time",
        "if unavailable > replica.supervisor.longest_start and not self._is_trying():",
        "if unavailable > replica.supervisor.longest_start:",
        _JOURNAL,
    ),
    Mutation(
        "recovery/moved-request-weighs-its-prompt-alone",
        "            moved.queued += len(placed.token_ids)\n",
        "",
        ("unit/client/test_relocation.py", "unit/client/test_placement.py", "property/test_placement.py"),
    ),
    Mutation(
        "recovery/collateral-death-blames-the-step",
        "in_step = None if failure.collateral else link.running_step()",
        "in_step = link.running_step()",
        (
            "unit/client/test_supervisor_stalls.py",
            "e2e/test_expert_parallel.py::test_a_request_that_no_step_can_compute_ends_alone",
        ),
    ),
    Mutation(
        "recovery/stall-is-not-noticed",
        "if silent > self._timeout + grace:",
        "if silent > 100 * self._timeout + grace:",
        ("unit/client/test_supervisor_stalls.py", *_CORE_RESTARTS),
    ),
    Mutation(
        "recovery/watchdog-blames-the-core-for-its-own-pause",
        "is_late, self._last_check = now - self._last_check > 2 * self.interval, now",
        "is_late, self._last_check = False, now",
        (
            "unit/client/test_supervisor_stalls.py",
            "unit/client/test_restarts.py",
            "unit/distributed/test_remote_core.py",
        ),
    ),
    Mutation(
        "recovery/grammar-not-followed-along-resumed-tokens",
        "for token_id in seq.completion_token_ids:\n        if not seq.matcher.accept(token_id):",
        "for token_id in seq.completion_token_ids[:0]:\n        if not seq.matcher.accept(token_id):",
        ("e2e/test_resumed_requests.py::test_a_resumed_request_goes_on_as_if_it_had_not_stopped",),
    ),
)

_HTTP = (
    Mutation(
        "http/streamed-body-without-a-limit",
        "if len(body) > max_bytes:",
        "if max_bytes < 0:",
        ("unit/server/test_face.py", *_REQUESTS, "e2e/test_http_bad_input.py"),
    ),
    Mutation(
        "http/only-keys-of-the-file-open",
        "return self._given.get(digest) or self._filed.get(digest)",
        "return self._filed.get(digest)",
        ("unit/config/test_secrets.py", "unit/server/test_face.py"),
    ),
    Mutation(
        "http/two-authorization-headers-open",
        'values[0].strip() if len(values) == 1 else b""',
        "values[0].strip()",
        ("unit/server/test_face.py", "unit/config/test_secrets.py"),
    ),
    Mutation(
        "http/retry-after-rounded-down",
        '"Retry-After": str(math.ceil(seconds)), "retry-after-ms"',
        '"Retry-After": str(math.floor(seconds)), "retry-after-ms"',
        ("unit/server/test_errors.py", "unit/limits/test_admission.py", "e2e/test_http_overload.py"),
    ),
    Mutation(
        "http/one-request-too-many-a-key",
        "live >= limits.requests_per_key",
        "live > limits.requests_per_key",
        ("unit/limits/test_admission.py",),
    ),
    Mutation(
        "http/queued-tokens-never-leave",
        'accounts.change(party, "queued_tokens", -tokens)',
        'accounts.change(party, "queued_tokens", 0)',
        ("unit/limits/test_admission.py",),
    ),
    Mutation(
        "http/choices-of-all-prompts-unlimited",
        "if num_prompts * num_choices > MAX_SEQUENCES:",
        "if num_prompts > MAX_SEQUENCES:",
        ("e2e/test_http_bad_input.py::test_bad_input_is_refused_in_words_and_a_neighbours_stream_stays_the_same",),
    ),
    Mutation(
        "http/usage-counts-the-prompt-a-choice",
        "firsts = states[::num_choices]",
        "firsts = states[:]",
        _GENERATION,
    ),
    Mutation(
        "http/best-of-returns-the-worst",
        "sorted(choices, key=_mean_logprob, reverse=True)",
        "sorted(choices, key=_mean_logprob)",
        (*_GENERATION, "e2e/test_http_completion_fields.py"),
    ),
    Mutation(
        "http/top-p-zero-is-not-greedy",
        "top_k=top_k if top_p else 1,",
        "top_k=top_k,",
        _REQUESTS,
    ),
    Mutation(
        "http/sse-error-event-not-ended",
        'return b"data: " + body + b"\\n\\n"',
        'return b"data: " + body + b"\\n"',
        ("unit/server/test_sse.py", *_GENERATION),
    ),
    Mutation(
        "http/sse-stream-with-usage-lacks-done",
        "encode(usage), _END, DONE))",
        "encode(usage), _END))",
        ("unit/server/test_sse.py", "unit/server/test_chat_rendering.py", "unit/server/test_completion_rendering.py"),
    ),
    Mutation(
        "http/slow-reader-loses-a-delta",
        "taken[index] = _merged([taken[index], *backlog])",
        "taken[index] = _merged(backlog)",
        ("unit/server/test_streams.py", *_GENERATION),
    ),
    Mutation(
        "http/error-overtakes-the-text-before-it",
        "if self._error is not None and not taken:",
        "if self._error is not None:",
        ("unit/server/test_streams.py", *_GENERATION),
    ),
    Mutation(
        "http/engine-error-told-as-an-answer",
        'if delta.finish_reason in ("abort", "error"):',
        'if delta.finish_reason == "abort":',
        ("unit/server/test_streams.py", *_GENERATION),
    ),
    Mutation(
        "http/open-lower-bound-accepted",
        "not (self.low_open and value == self.low)",
        "not (self.low_open and value < self.low)",
        ("e2e/test_http_overload.py::test_a_timeout_that_cannot_be_is_a_400",),
    ),
    Mutation(
        "http/unknown-fields-ignored",
        'extra="ignore" if allow_unknown else None',
        'extra="ignore"',
        _REQUESTS,
    ),
    Mutation(
        "http/token-id-of-the-vocabulary-size",
        "0 <= min(token_ids) <= max(token_ids) < self._vocab_size:",
        "0 <= min(token_ids) <= max(token_ids) <= self._vocab_size:",
        ("unit/text/test_io_processor.py",),
    ),
    Mutation(
        "http/cache-smaller-than-the-context",
        "room = min(self._context, self._cache) - prompt_tokens",
        "room = self._context - prompt_tokens",
        ("unit/text/test_io_processor.py",),
    ),
    Mutation(
        "http/nan-sampling-parameter",
        "if math.isnan(value) or value > high or value < low",
        "if value > high or value < low",
        ("unit/text/test_generation_config.py", "property/test_requests.py", "unit/text/test_io_processor.py"),
    ),
)

_PARSERS = (
    Mutation(
        "parsers/marker-cut-before-its-last-character",
        "self._longest = max(map(len, markers)) - 1",
        "self._longest = max(map(len, markers)) - 2",
        _TOOL_CALLS,
    ),
    Mutation(
        "parsers/trailing-comma-not-mended",
        'return self._held[:1] == [","] and not "".join(self._held[1:]).strip()',
        "return False",
        _TOOL_CALLS,
    ),
    Mutation(
        "parsers/hex-escape-of-four-digits",
        '{"u": 4, "x": 2, "U": 8}',
        '{"u": 4, "x": 4, "U": 8}',
        ("property/test_answer_parsers.py::test_python_literals_become_the_json_of_their_value", *_TOOL_CALLS),
    ),
    Mutation(
        "parsers/raw-control-character-in-arguments",
        "self._put(json.dumps(character)[1:-1])",
        "self._put(character)",
        _TOOL_CALLS,
    ),
    Mutation(
        "parsers/parameters-key-unknown",
        '("arguments", "parameters")',
        '("arguments",)',
        _TOOL_CALLS,
    ),
    Mutation(
        "parsers/schema-type-string-ignored",
        'return value if kind in types or (kind == "integer" and "number" in types) else None',
        "return value",
        (*_TOOL_CALLS, "unit/answers/test_tool_use.py", "unit/answers/test_tool_grammars.py"),
    ),
    Mutation(
        "parsers/arguments-of-the-next-call",
        "ArgumentsPart(self._calls - 1, fragment)",
        "ArgumentsPart(self._calls, fragment)",
        _TOOL_CALLS,
    ),
    Mutation(
        "parsers/reasoning-closed-by-the-prompt",
        "return dialect.always and not is_closed(dialect, prompt_tail)",
        "return dialect.always",
        ("unit/answers/test_reasoning_parsers.py", "unit/answers/test_answer_format.py"),
    ),
    Mutation(
        "parsers/harmony-keeps-the-namespace",
        'recipient[1].removeprefix("functions.")',
        "recipient[1]",
        _TOOL_CALLS,
    ),
    Mutation(
        "parsers/mistral-id-too-short",
        "secrets.choice(_ID_CHARACTERS) for _ in range(9)",
        "secrets.choice(_ID_CHARACTERS) for _ in range(8)",
        ("unit/answers/test_tool_parsers.py", "unit/answers/test_tool_use.py"),
    ),
    Mutation(
        "parsers/later-stop-string-wins",
        "(end, begin) < (found[1], found[0])",
        "(end, begin) > (found[1], found[0])",
        _DETOKENIZER,
    ),
    Mutation(
        "parsers/stop-string-before-min-tokens",
        "if self.num_tokens <= self._min_tokens:",
        "if self.num_tokens < self._min_tokens:",
        _DETOKENIZER,
    ),
    Mutation(
        "parsers/stop-string-kept-the-wrong-way-round",
        "return text[: end if self._include_stop else begin]",
        "return text[: begin if self._include_stop else end]",
        _DETOKENIZER,
    ),
    Mutation(
        "parsers/beginning-of-a-stop-string-shown",
        "begin = text.find(stop[0], max(0, len(text) + 1 - len(stop)), shown)",
        "begin = text.find(stop[0], max(0, len(text) + 2 - len(stop)), shown)",
        _DETOKENIZER,
    ),
    Mutation(
        "parsers/stop-token-shown",
        "return output.output_tokens[-1] not in self._tokenizer.special_ids",
        "return output.output_tokens[-1] in self._tokenizer.special_ids",
        ("unit/text/test_request_state.py",),
    ),
)

_TEMPLATES = (
    Mutation(
        "template/tool-template-without-tools",
        '"tool_use" if tools is not None and "tool_use" in self._templates else "default"',
        '"tool_use" if "tool_use" in self._templates else "default"',
        ("unit/text/test_chat_template.py",),
    ),
    Mutation(
        "template/blocks-leave-blank-lines",
        "trim_blocks=True, lstrip_blocks=True, extensions",
        "trim_blocks=False, lstrip_blocks=True, extensions",
        ("unit/text/test_chat_template.py", "parity/test_chat_template.py"),
    ),
    Mutation(
        "template/json-escapes-beyond-ascii",
        "return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent",
        "return json.dumps(value, ensure_ascii=not ensure_ascii, indent=indent",
        ("unit/text/test_chat_template.py", "parity/test_chat_template.py"),
    ),
    Mutation(
        "template/endless-output",
        "if length > most:",
        "if length > 1000 * most:",
        ("unit/text/test_chat_template.py", "unit/text/test_template_sandbox.py"),
    ),
    Mutation(
        "template/no-time-limit",
        "deadline = time.monotonic() + MAX_RENDER_SECONDS",
        "deadline = time.monotonic() + 1000 * MAX_RENDER_SECONDS",
        ("unit/text/test_chat_template.py", "unit/text/test_template_sandbox.py"),
    ),
)

_SECURITY = (
    Mutation(
        "security/keyless-port-for-others",
        "if is_keyless and not config.insecure_no_auth and not is_loopback(str(address[0])):",
        "if is_keyless and not config.insecure_no_auth and not is_loopback(str(address[0])) and host != '0.0.0.0':",
        ("unit/limits/test_keyless_listening.py",),
    ),
    Mutation(
        "security/name-of-the-host-is-believed",
        "not is_loopback(str(address[0]))",
        "host != 'localhost' and not is_loopback(str(address[0]))",
        ("unit/limits/test_keyless_listening.py",),
    ),
    Mutation(
        "security/checkpoint-code-if-stdin-says-yes",
        "AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(path)",
        ("e2e/test_checkpoint_code.py",),
    ),
    Mutation(
        "security/child-without-landlock",
        "if _landlock_version() > 0:",
        "if _landlock_version() > 99:",
        ("unit/text/test_sandbox.py",),
    ),
    Mutation(
        "security/child-without-filter",
        "    if _has_seccomp():\n        _forbid",
        "    if not _has_seccomp():\n        _forbid",
        ("unit/text/test_sandbox.py",),
    ),
    Mutation(
        "security/child-may-fork",
        '"clone": _instruction(_JUMP_IF_ANY_BIT, _CLONE_THREAD, 0, 1)',
        '"clone": _instruction(_JUMP_IF_ANY_BIT, _CLONE_THREAD, 0, 0)',
        ("unit/text/test_sandbox.py",),
    ),
    Mutation(
        "security/child-keeps-the-environment",
        "{name: os.environ[name] for name in _INHERITED if name in os.environ}",
        "dict(os.environ)",
        ("unit/text/test_sandbox.py",),
    ),
    Mutation(
        "security/child-may-withdraw-its-timer",
        "resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))",
        "pass",
        ("unit/text/test_sandbox.py",),
    ),
    Mutation(
        "security/key-stays-in-the-environment",
        '_mask(_ENVIRONMENT, [f"{_KEY_VARIABLE}={variable}"])',
        "pass",
        ("unit/config/test_secrets.py",),
    ),
    Mutation(
        "security/server-with-keys-can-be-inspected",
        "        if keys:\n            forbid_inspection()\n",
        "",
        ("unit/config/test_secrets.py",),
    ),
    Mutation(
        "security/interface-of-the-cluster-is-ignored",
        "os.environ[variable] = self.interface()",
        "os.environ.setdefault(variable, self.interface())",
        ("parity/test_rendezvous.py",),
    ),
)

_STRUCTURED = (
    Mutation(
        "structured/nesting-one-level-too-few",
        "return depth > most\n",
        "return depth >= most\n",
        ("unit/text/test_structured_spec.py", "property/test_structured_output.py"),
    ),
    Mutation(
        "structured/slash-ends-the-regex",
        r'{"/": "\\/", "\n": "\\n", ',
        r'{"\n": "\\n", ',
        ("unit/text/test_structured_spec.py", "unit/text/test_structured_matchers.py"),
    ),
    Mutation(
        "structured/backslash-in-a-choice",
        "for each in '\"\\\\'}",
        "for each in '\"'}",
        ("unit/text/test_structured_spec.py", "unit/text/test_structured_matchers.py"),
    ),
    Mutation(
        "structured/end-allowed-inside-the-grammar",
        "if (ends or withheld) and self._matcher.is_accepting():",
        "if ends or withheld:",
        ("unit/text/test_structured_matchers.py", "parity/test_sampler_masks.py"),
    ),
    Mutation(
        "structured/no-token-left-where-only-the-end-may-follow",
        "            if rest.any():\n                mask[:] = rest",
        "            if mask.any():\n                mask[:] = rest",
        ("unit/text/test_structured_matchers.py", "parity/test_sampler_masks.py"),
    ),
    Mutation(
        "structured/complete-grammar-goes-on",
        "if seq.matcher is not None and seq.matcher.is_complete:",
        "if seq.matcher is None and seq.matcher.is_complete:",
        ("unit/core/test_scheduler_grammar.py",),
    ),
    Mutation(
        "structured/surrogate-escape-in-gbnf",
        "if number > 0x10FFFF or 0xD800 <= number < 0xE000:",
        "if number > 0x10FFFF:",
        ("unit/text/test_structured_gbnf.py",),
    ),
    Mutation(
        "structured/refused-token-is-appended",
        "token_id not in seq.end_tokens and not matcher.accept(token_id):",
        "token_id in seq.end_tokens and not matcher.accept(token_id):",
        ("unit/core/test_scheduler_grammar.py",),
    ),
)

_CONFIG = (
    Mutation(
        "config/block-size-of-any-size",
        "if value != 1 and (value < 16 or value % 16):",
        "if value != 1 and value < 16:",
        ("unit/config/test_settings.py",),
    ),
    Mutation(
        "config/environment-wins-over-flags",
        "given = ChainMap(flags, environment, yaml)",
        "given = ChainMap(environment, flags, yaml)",
        ("unit/config/test_settings.py",),
    ),
    Mutation(
        "config/host-number-beyond-the-last",
        "if self.node_rank >= self.nnodes:",
        "if self.node_rank > self.nnodes:",
        ("unit/config/test_settings.py", "unit/distributed/test_cluster.py", "unit/distributed/test_hosts.py"),
    ),
    Mutation(
        "config/list-items-keep-their-spaces",
        'return [item.strip() for item in text.split(",")]',
        'return text.split(",")',
        ("unit/config/test_settings.py",),
    ),
    Mutation(
        "config/secret-shown-in-an-error",
        '"a secret" if _BY_NAME[name].secret else _shown(given[name])',
        "_shown(given[name])",
        ("unit/config/test_secrets.py", "unit/config/test_settings.py"),
    ),
    Mutation(
        "config/two-adapters-of-one-name",
        'if sum(other.partition("=")[0] == name for other in value) > 1:',
        'if sum(other.partition("=")[0] == name for other in value) > 2:',
        ("unit/server/test_lora_names.py", "unit/config/test_settings.py"),
    ),
    Mutation(
        "config/unknown-variable-ignored",
        "if name.startswith(ENV_PREFIX) and name not in known:",
        "if name.startswith(ENV_PREFIX) and name in ():",
        ("unit/config/test_settings.py",),
    ),
)

_RESPONSES = (
    "unit/responses/test_responses_conversion.py",
    "unit/responses/test_responses_rendering.py",
    "unit/responses/test_responses_tools.py",
)

_AGENTS = (
    Mutation(
        "agents/sealed-reasoning-is-read-for-any-key",
        "f\"{kind}\\0{'' if owner is None else owner}\"",
        'f"{kind}"',
        ("unit/server/test_sealing.py",),
    ),
    Mutation(
        "agents/members-of-two-namespaces-share-a-name",
        "while flat in taken:",
        "while False:",
        ("unit/responses/test_responses_tools.py",),
    ),
    Mutation(
        "agents/member-is-answered-by-its-flat-name",
        "return Called(kind, offered.namespace, offered.tool.name)",
        "return Called(kind, None, offered.flat)",
        _RESPONSES,
    ),
    Mutation(
        "agents/half-a-surrogate-pair-is-decoded",
        "elif len(text) - at < _LONGEST_ESCAPE and _may_go_on(text[at:]):",
        "elif False:",
        ("unit/answers/test_freeform.py",),
    ),
    Mutation(
        "agents/grammar-may-run-over-the-marker",
        "return not crosses and not self.imports & _LINE_BREAKS",
        "return not self.imports & _LINE_BREAKS",
        ("unit/answers/test_free_texts.py",),
    ),
    Mutation(
        "agents/summary-cut-off-ends-as-incomplete",
        "None if isinstance(self._output, CompactionOutput) else reason",
        "reason",
        _RESPONSES,
    ),
    Mutation(
        "agents/instructions-lost-on-a-template",
        "if not (shown and not self._shows(role, late=True) and",
        "if not (False and",
        ("unit/text/test_chat_template.py",),
    ),
    Mutation(
        "agents/unreadable-compaction-is-left-out",
        "raise InvalidEncryptedContent(item.id, why) from None",
        'return ""',
        _RESPONSES,
    ),
)

_POOLING_TESTS = ("parity/test_pooling.py",)
_POOLING = (
    Mutation(
        "pooling/mean-forgets-earlier-chunks",
        "part = part if begun is None else begun + part",
        "part = part",
        _POOLING_TESTS,
    ),
    Mutation(
        "pooling/pooled-row-is-sampled-too",
        "sampled = np.setdiff1d(sampled, [span.row for span in pooled], assume_unique=True)",
        "sampled = sampled",
        _POOLING_TESTS,
    ),
    Mutation(
        "pooling/prompt-of-an-encoder-is-split",
        "        if not self.splits_prompts:\n            return False\n",
        "",
        ("unit/core/test_scheduler_pooling.py", *_POOLING_TESTS),
    ),
    Mutation(
        "pooling/second-text-has-the-first-ones-type",
        "is_second[span.first + span.params.first_text_tokens : span.end] = 1",
        "is_second[span.first + span.params.first_text_tokens : span.end] = 0",
        _POOLING_TESTS,
    ),
    Mutation(
        "pooling/cut-vector-is-not-normalised-again",
        'if wanted.activate else "none"](row[: wanted.dimensions])',
        'if wanted.activate else "none"](row)[: wanted.dimensions]',
        _POOLING_TESTS,
    ),
    Mutation(
        "pooling/score-without-the-answer-no",
        "weight, bias = yes if no is None else tuple(each - other for each, other in zip(yes, no, strict=True))",
        "weight, bias = yes",
        _POOLING_TESTS,
    ),
    Mutation(
        "pooling/vector-of-an-aborted-sequence-is-told",
        "if vector is None or seq.status is not SequenceStatus.RUNNING or seq in self._pool.prefilling:",
        "if vector is None or seq in self._pool.prefilling:",
        ("unit/core/test_scheduler_pooling.py",),
    ),
    Mutation(
        "pooling/cut-text-loses-its-last-special-token",
        "cut = set(own[max(0, len(own) - (len(ids) - longest)) :])",
        "cut = set(range(longest, len(ids)))",
        ("unit/text/test_pooling.py",),
    ),
)

# What is checked and compared where a GPU computes.
_DEVICE = (
    Mutation(
        "device/launch-form-ignores-sizes-over-2-gib",
        "({sizes}) >> 31 and ({large},),",
        "({sizes}) < 0 and ({large},),",
        ("parity/test_triton_launcher.py", "parity/test_triton_launches.py"),
    ),
    Mutation(
        "device/unchecked-kernel-is-launched",
        "            if self._is_refusing:\n",
        "            if False:\n",
        ("parity/test_triton_launches.py", "parity/test_sentinel.py"),
    ),
    Mutation(
        "device/keys-before-the-window-are-loaded",
        "loaded = tl.maximum(keys, first_seen) if HAS_WINDOW else keys",
        "loaded = keys",
        ("parity/test_triton_attention.py",),
    ),
    Mutation(
        "device/keys-past-the-end-are-loaded",
        "loaded = tl.minimum(loaded, end - 1) if IS_MASKED else loaded",
        "loaded = loaded + 0",
        ("parity/test_triton_attention.py",),
    ),
    Mutation(
        "device/pairs-of-experts-are-checked-last",
        "return sorted(cases, key=lambda case: not case.gives_addresses)",
        "return sorted(cases, key=lambda case: case.gives_addresses)",
        ("parity/test_triton_checks.py",),
    ),
    Mutation(
        "device/sentinel-finds-only-what-is-not-finite",
        "if not error <= FAILURE_FACTOR:\n            self._report(",
        "if error != error:\n            self._report(",
        ("parity/test_sentinel.py",),
    ),
    Mutation(
        "device/sentinel-delays-a-step",
        "_BUDGET = 0.01\n",
        "_BUDGET = 1.0\n",
        ("parity/test_sentinel.py",),
    ),
    Mutation(
        "device/sums-of-ranks-are-not-compared",
        "flags[0, parallel.rank] = (own != first).float()[0]",
        "flags[0, parallel.rank] = 0.0",
        ("parity/test_sentinel.py",),
    ),
    Mutation(
        "device/padding-rows-keep-their-slots",
        "            self._slot_mapping[rows * self._query_len : batch_size * self._query_len] = NO_SLOT\n",
        "",
        ("parity/test_triton_models.py", "parity/test_triton_aiter.py"),
    ),
    Mutation(
        "device/ranks-keep-their-own-last-token",
        "last_tokens.index_copy_(0, slots, self.parallel.broadcast(token_ids))",
        "last_tokens.index_copy_(0, slots, token_ids)",
        ("parity/test_deferred_ranks.py",),
    ),
    Mutation(
        "device/core-in-lockstep-waits-for-a-lost-host",
        "            self._note_serving(False)\n            self._links[0].kill()\n",
        "            self._note_serving(False)\n",
        ("unit/client/test_supervisor_stalls.py",),
    ),
)

MUTATIONS: tuple[Mutation, ...] = (
    *_SCHEDULING,
    *_CACHE,
    *_SAMPLING,
    *_KERNELS,
    *_QUANTISATION,
    *_RECOVERY,
    *_HTTP,
    *_PARSERS,
    *_TEMPLATES,
    *_SECURITY,
    *_STRUCTURED,
    *_CONFIG,
    *_AGENTS,
    *_POOLING,
    *_DEVICE,
)
