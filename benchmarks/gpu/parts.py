"""`PARTS`: what is measured, the most telling first, so that a run that is cut short has told most."""

from benchmarks.gpu.case import Part

PARTS = (
    Part(
        "ceilings",
        "What the device can do",
        "Large copies, counting bytes read and written, and products of square bfloat16 matrices of random numbers. "
        "The figures below are held against the copy of 4 GiB and the product of 8192.",
        "none; they are the measure.",
        20,
        15,
    ),
    Part(
        "decode",
        "Decode steps",
        "Steps of the model runner, each launched before the one ahead of it is read, from one end of a step on the "
        "device to the next; greedy, 1k contexts, random weights and caches. The bound is the time to read the "
        "weights and each sequence's keys and values once at the copy's bandwidth.",
        "with graphs at least 80 % of the bound up to 64 sequences of 1k contexts, 70 % at 256.",
        110,
        50,
    ),
    Part(
        "prefill",
        "Prefill",
        "One prompt at the 8B shape, against its floating-point operations at the matrix product's rate.",
        "8k tokens: at least 60 % of the matrix rate.",
        40,
        20,
    ),
    Part(
        "gap",
        "Between two decode steps",
        "The engine's loop with deferred output, at the 0.6B shape with graphs and 1k contexts: how long the device "
        "does nothing between the end of one replayed pass and the start of the next, by the profiler's record of "
        "its activity; median and 99th percentile.",
        "at most 30 us at 64 sequences, 60 us at 256.",
        45,
        20,
    ),
    Part(
        "attention",
        "Attention kernels",
        "32 query heads, 8 of keys and values, of 128; blocks of 16 tokens in shuffled order. Kernels are replayed "
        "from a graph with caches flushed in between; medians. SDPA is torch's, on keys and values that lie together.",
        "decode at least 85 % of the bound from 4k contexts on.",
        60,
        20,
    ),
    Part(
        "launch",
        "Launching kernels",
        "Host time to call an operator outside graphs, less the time of Triton's own launches in it with the same "
        "arguments. `an empty kernel` is what Triton takes for one without arguments.",
        "at most 5 us each kernel beyond Triton's own.",
        60,
        25,
    ),
    Part(
        "engine",
        "Throughput",
        "`LLMEngine` on random weights of Qwen3-0.6B's shape, greedy: generated tokens a second from the first "
        "request to the last token. Beside it transformers' continuous batching on the same device, in turn in the "
        "same run; where all prompts are of 1024 tokens, both are compared at 128 generated ones.",
        "more than transformers' continuous batching.",
        190,
        60,
    ),
    Part(
        "experts",
        "Mixtures of experts",
        "128 experts of which a token takes 8, hidden size 2048, of 768 features (Qwen3-30B-A3B), and MXFP4 ones of "
        "2880 by 2880, 4 of 32 (gpt-oss-20b). The bound reads each chosen expert's weight once.",
        "none is set.",
        50,
        12,
    ),
    Part(
        "quantized",
        "Quantised products",
        "A weight of 12288 by 4096, read as stored. Beside it torch's bfloat16 product of the same shape.",
        "none is set; FP8's bound counts twice the bfloat16 matrix rate.",
        60,
        12,
    ),
    Part(
        "dense",
        "Norms, activations and products",
        "At 4096 features, and gated at 12288. `F.linear` is what the linear layers call: torch's library.",
        "none is set; the bound is the bytes read and written once, or the matrix rate.",
        40,
        12,
    ),
    Part(
        "sampling",
        "Sampling",
        "A vocabulary of 151936. The bound reads the logits once.",
        "none is set.",
        40,
        12,
    ),
    Part(
        "latents",
        "Latent attention and recurrent layers",
        "128 heads over latents of 512 + 64 (DeepSeek-V3); gated delta net of 16 key and 32 value heads of 128.",
        "none is set.",
        40,
        12,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
