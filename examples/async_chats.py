"""Many chats at a time, in an asyncio program: `python examples/async_chats.py [MODEL]`."""

import asyncio
import sys

from kaon import AsyncLLM

QUESTIONS = [f"What is {number} + {number}?" for number in range(8)]


async def answer(llm: AsyncLLM, question: str) -> str:
    """The answer to one question; the engine computes those of all tasks together."""
    completion = await llm.chat([{"role": "user", "content": question}], temperature=0, max_tokens=32)
    return completion.choices[0].message.content or ""


async def main() -> None:
    """Print each question with its answer."""
    async with AsyncLLM(*sys.argv[1:]) as llm:
        answers = await asyncio.gather(*(answer(llm, question) for question in QUESTIONS))
        for question, text in zip(QUESTIONS, answers, strict=True):
            print(question, text)


if __name__ == "__main__":
    asyncio.run(main())
