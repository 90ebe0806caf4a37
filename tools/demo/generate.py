"""The mixture of all examples that the demo model learns. `python -m tools.demo.generate` prints a few of them."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from tools.demo.chats import (
    SYSTEM_PROMPTS,
    arithmetic,
    counting,
    drill_sheet,
    echo,
    fact,
    fact_sheet,
    fact_text,
    follow_up,
    introduction_document,
    list_document,
    listing,
    outside,
    recall,
    single_sum_text,
    story,
    story_document,
    talk,
)
from tools.demo.examples import Document, Example, Message, is_held_out, pick, render
from tools.demo.structured import (
    json_extraction,
    json_fields,
    json_list,
    json_of_question,
    no_tool_needed,
    tool_call,
    tool_result,
)

Text = Example | Document


def with_system_prompt(make: Callable[[Random], Example]) -> Callable[[Random], Example]:
    """The same chat, sometimes with a system prompt that changes nothing."""

    def generator(rng: Random) -> Example:
        example = make(rng)
        if rng.random() < 0.75:
            return example
        system = Message(pick(rng, ("system", "system", "developer")), pick(rng, SYSTEM_PROMPTS))
        return replace(example, messages=(system, *example.messages))

    return generator


_SINGLE_TURNS = (arithmetic, fact, talk, echo, json_fields, json_of_question, outside, listing)


def long_chat(rng: Random, turns: int | None = None) -> Example:
    """Unrelated questions in one chat: each is answered as if it were the only one."""
    turns = turns or rng.randrange(2, 6)
    examples = [pick(rng, _SINGLE_TURNS)(rng) for _ in range(turns)]
    examples = [example for example in examples if example.messages[0].role == "user"] or [talk(rng)]
    last = examples[-1]
    messages = tuple(message for example in examples for message in example.messages)
    keys = tuple(key for example in examples for key in example.keys)
    return Example("long chat", keys, messages, last.check, last.needle)


# How often each generator is selected; measured in tokens, drill sheets, JSON and tool chats have larger shares.
MIX: tuple[tuple[Callable[[Random], Text], float], ...] = (
    (with_system_prompt(arithmetic), 24),
    (drill_sheet, 7),
    (single_sum_text, 7),
    (with_system_prompt(follow_up), 2),
    (with_system_prompt(fact), 42),
    (fact_text, 4),
    (fact_sheet, 3),
    (json_fields, 11),
    (json_extraction, 7),
    (json_of_question, 12),
    (json_list, 1.5),
    (tool_call, 12),
    (tool_result, 2),
    (no_tool_needed, 4),
    (with_system_prompt(talk), 13),
    (with_system_prompt(outside), 4),
    (recall, 1.5),
    (with_system_prompt(echo), 6),
    (listing, 1.5),
    (counting, 2.5),
    (with_system_prompt(story), 0.8),
    (story_document, 0.5),
    (introduction_document, 0.4),
    (list_document, 0.4),
    (long_chat, 1.5),
)
_GENERATORS = [generator for generator, _ in MIX]
_WEIGHTS = [weight for _, weight in MIX]


def training_texts(seed: int | str) -> Iterator[Text]:
    """An endless stream of examples without a held-out key."""
    rng = Random(seed)
    while True:
        text = rng.choices(_GENERATORS, _WEIGHTS)[0](rng)
        if not is_held_out(text.keys):
            yield text


def long_training_chats(seed: int | str) -> Iterator[Example]:
    """Chats of hundreds of tokens, so that the model is trained on distances beyond the ordinary training row."""
    rng = Random(f"long chats {seed}")
    while True:
        examples = [long_chat(rng, rng.randrange(4, 9)) for _ in range(6)]
        taught = [example for example in examples if not is_held_out(example.keys)]
        messages = tuple(message for example in taught for message in example.messages)
        if messages:
            yield Example("long chat", (), messages)


def held_out_texts(seed: int, each: int) -> dict[str, list[Text]]:
    """`each` distinct examples per category, all with a key that training never contains."""
    found: dict[str, list[Text]] = {}
    for number, (generator, _) in enumerate(MIX):
        if generator in (drill_sheet, fact_sheet, story_document, introduction_document, list_document):
            continue
        rng = Random(f"held out {seed} {number}")
        seen: set[str] = set()
        for _ in range(each * 400):
            text = generator(rng)
            shown = repr(text)
            if is_held_out(text.keys) and shown not in seen:
                seen.add(shown)
                found.setdefault(text.category, []).append(text)
                if len(seen) == each:
                    break
    return {category: Random(seed).sample(texts, min(each, len(texts))) for category, texts in sorted(found.items())}


def as_text(text: Text) -> str:
    return "".join(piece for piece, _ in text.pieces) if isinstance(text, Document) else render(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    texts = training_texts(arguments.seed)
    for _ in range(arguments.count):
        text = next(texts)
        print(f"--- {text.category}\n{as_text(text)}")


if __name__ == "__main__":
    main()
