"""Steps that raise at random: only the sequences that cause it fail; all others get all of their tokens."""

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledBatch
from tests.unit.core_bench import BLOCK_SIZE, Bench, ends, outputs_of


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, int, int | None, bool]]:
    """Prompt tokens, completion tokens, the length at which steps raise because of it (None: never), whether it is
    suspect."""
    load = []
    for _ in range(draw(st.integers(1, 9))):
        prompt, completion = draw(st.integers(1, 3 * BLOCK_SIZE)), draw(st.integers(1, BLOCK_SIZE + 2))
        raises = draw(st.none() | st.integers(1, prompt + completion - 1))
        load.append((prompt, completion, raises, draw(st.booleans())))
    return load


@given(
    load=loads(),
    blocks=st.integers(6, 14),
    budget=st.sampled_from([8, 20, 64, 1000]),
    policy=st.sampled_from(["prefill_first", "mixed"]),
    caching=st.booleans(),
    ahead=st.sampled_from([None, None, "launch", "sample", "result"]),
)
def test_only_the_failing_sequences_end_with_an_error(
    load: list[tuple[int, int, int | None, bool]],
    blocks: int,
    budget: int,
    policy: str,
    caching: bool,
    ahead: str | None,
) -> None:
    bench = Bench(
        num_kvcache_blocks=blocks,
        max_num_batched_tokens=budget,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        async_scheduling="off" if ahead is None else "on",
    )
    bench.runner.sees_at = ahead or "launch"

    def on_step(step: int, batch: ScheduledBatch) -> None:
        for seq_id, length in zip(batch.req_ids, batch.context_lens, strict=True):
            if 0 <= seq_id < len(load):
                raises = load[seq_id][2]
                if raises is not None and length >= raises:
                    raise RuntimeError(f"cucumber {seq_id}")

    for seq_id, (prompt, completion, _, suspect) in enumerate(load):
        bench.add(seq_id, num_prompt_tokens=prompt, max_tokens=completion, suspect=suspect)
    bench.runner.on_step = on_step
    messages = bench.run_until_done(*range(len(load)))
    expected = {}
    for seq_id, (_, completion, raises, _) in enumerate(load):
        expected[seq_id] = "max_tokens" if raises is None else "error"
        if raises is None:
            tokens = [token for output in outputs_of(messages, seq_id) for token in output.output_tokens]
            assert tokens == [5] * completion
    assert {seq_id: end for seq_id, end in ends(messages).items() if seq_id != 999} == expected
