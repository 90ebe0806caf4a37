"""Complete prompts in Python, all at once and as they come: `python examples/generate.py [MODEL]`."""

import sys

from kaon import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The capital of Italy is"]


def main() -> None:
    """Print what the model writes after each prompt."""
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM(*sys.argv[1:]) as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            print(f"{prompt}{result['text']}   ({result['num_tokens_output']} tokens, {result['latency']:.2f} s)")
        for _, delta in llm.stream(PROMPTS[0], params):
            print(delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
