"""Asks the demo model its held-out questions, with greedy decoding: `python -m tools.demo.evaluate` prints a table."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.demo import CHECKPOINT_DIR
from tools.demo.examples import Check, render_prompt
from tools.demo.generate import Text, held_out_texts

MAX_NEW_TOKENS = 320
TOOL_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Verdict:
    text: Text
    answer: str
    ended: bool  # by an end token, within MAX_NEW_TOKENS
    right: bool
    well_formed: bool


class DemoModel:
    """The checkpoint as transformers loads it, computing in float32 on its bf16 weights."""

    def __init__(self, checkpoint: Path = CHECKPOINT_DIR) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left", trust_remote_code=False)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, trust_remote_code=False)

    def answers(self, prompts: Sequence[str], batch_size: int = 64) -> list[tuple[str, bool]]:
        """For each rendered prompt, the generated text and whether an end token closed it."""
        by_length = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        found: dict[int, tuple[str, bool]] = {}
        for start in range(0, len(prompts), batch_size):
            chosen = by_length[start : start + batch_size]
            inputs = self.tokenizer([prompts[at] for at in chosen], return_tensors="pt", padding=True)
            with torch.inference_mode():
                rows = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
            for at, row in zip(chosen, rows[:, inputs.input_ids.shape[1] :], strict=True):
                ends = [token in self.model.generation_config.eos_token_id for token in row.tolist()]
                found[at] = (self.tokenizer.decode(row, skip_special_tokens=True), any(ends))
        return [found[at] for at in range(len(prompts))]


def judge(model: DemoModel, texts: Sequence[Text]) -> list[Verdict]:
    answers = model.answers([render_prompt(text) for text in texts])
    return [
        Verdict(text, answer, ended, ended and is_right(text, answer), is_well_formed(text, answer))
        for text, (answer, ended) in zip(texts, answers, strict=True)
    ]


def is_right(text: Text, answer: str) -> bool:
    if text.category == "story":  # any story that ends as stories do is correct
        return answer.startswith("Once upon a time") and answer.endswith("The end.")
    match text.check:
        case Check.EXACT:
            return answer.strip() == text.answer.strip()
        case Check.CONTAINS:
            return re.search(rf"(?<!\w){re.escape(text.needle)}(?!\w)", answer) is not None
        case Check.JSON:
            return same_json(answer, text.answer)
        case Check.TOOL_CALL:
            called, wanted = TOOL_CALL.fullmatch(answer), TOOL_CALL.fullmatch(text.answer)
            return called is not None and wanted is not None and same_json(called[1], wanted[1])


def is_well_formed(text: Text, answer: str) -> bool:
    """Whether an answer that should be JSON, or a call, has the right form; True for all other answers."""
    try:
        if text.check is Check.JSON:
            json.loads(answer)
        elif text.check is Check.TOOL_CALL:
            called = TOOL_CALL.fullmatch(answer)
            call = json.loads(called[1]) if called else {}
            return isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call
    except ValueError:
        return False
    return True


def same_json(answer: str, wanted: str) -> bool:
    try:
        return bool(json.loads(answer) == json.loads(wanted))
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--sample", type=int, default=200, help="held-out examples a category")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to show a category")
    arguments = parser.parse_args()
    model = DemoModel(arguments.checkpoint)
    print("| category | right | of | share | well formed | ended by an end token |\n|---|---:|---:|---:|---:|---:|")
    for category, texts in held_out_texts(arguments.seed, arguments.sample).items():
        verdicts = judge(model, texts)
        of, right = len(verdicts), sum(v.right for v in verdicts)
        formed, ended = sum(v.well_formed for v in verdicts) / of, sum(v.ended for v in verdicts) / of
        print(f"| {category} | {right} | {of} | {right / of:.1%} | {formed:.1%} | {ended:.1%} |", flush=True)
        for verdict in [v for v in verdicts if not v.right][: arguments.failures]:
            print(f"    {render_prompt(verdict.text)[-300:]!r}")
            print(f"    -> {verdict.answer!r}\n    != {verdict.text.answer!r}")


if __name__ == "__main__":
    main()
