"""`instead_of`: what to write in place of flags that other servers have and `kaon serve` has not.

Called by `server.settings` for a flag that is not there: what is nearest to it in spelling may mean something else.
"""

_OTHER_NAMES = {
    "--tp": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--dp": "--data-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "--block-size": "--kv-cache-block-size",
    "--num-gpu-blocks-override": "--num-kvcache-blocks",
    "--lora-modules": "--lora",
    "--max-running-requests": "--max-num-seqs",
    "--speculative-num-draft-tokens": "--num-speculative-tokens",
    "--uvicorn-log-level": "--log-level",
}

_INSTEAD = {
    "--model": "MODEL stands by itself: kaon serve MODEL",
    "--model-path": "MODEL stands by itself: kaon serve MODEL",
    "--enable-auto-tool-choice": "tool calls need no flag (docs/tool-calling.md)",
    "--enable-lora": "adapters need no flag but --lora NAME=DIRECTORY",
    "--trust-remote-code": "code that checkpoints bring is never run (docs/models.md)",
    "--disable-log-requests": "--access-log none logs no requests",
    "--no-enable-log-requests": "--access-log none logs no requests",
    "--pipeline-parallel-size": "layers are not shared out; --tensor-parallel-size shares out each of them",
    "-pp": "layers are not shared out; --tensor-parallel-size shares out each of them",
    "--compilation-config": "--compilation-level and --cudagraph-capture-sizes take its place",
    "--enable-reasoning": "reasoning is told apart without a flag (docs/tool-calling.md)",
    "--speculative-model": "drafts are looked up, by no second model (docs/speculative.md)",
    "--speculative-config": "--num-speculative-tokens and its like take its place",
}


def instead_of(flag: str) -> str:
    """The end of a sentence that says that there is no `flag`; nothing where it is not one of other servers'."""
    name = _OTHER_NAMES.get(flag)
    words = _INSTEAD.get(flag) if name is None else f"it is {name} here"
    return f"; {words}" if words else ""
