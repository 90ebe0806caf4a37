"""Texts in the order of their relevance to a query: `python examples/search.py [MODEL]`.

The embedded model was not made for this, but shows how it goes; Qwen/Qwen3-Embedding-0.6B finds what is asked for.
"""

import sys

from kaon import LLM

QUERY = "The capital of France"
TEXTS = ["Bananas are yellow.", "The capital of France is Paris.", "The capital of Italy is Rome."]


def main() -> None:
    """Print each text with its score, the best first."""
    with LLM(*sys.argv[1:], task=("embed",)) as llm:
        scores = llm.score(QUERY, TEXTS)
        for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
            print(f"{score:.3f} {text}")


if __name__ == "__main__":
    main()
