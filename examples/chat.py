"""A chat with a tool and with an answer as JSON, in Python: `python examples/chat.py [MODEL]`."""

import json
import sys
from typing import Any

from kaon import LLM

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask a question three ways: as text, with a tool that must be called, and for JSON."""
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    with LLM(*sys.argv[1:]) as llm:
        for chunk in llm.stream_chat(question, temperature=0):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        answer = llm.chat(question, temperature=0, tools=[ADD], tool_choice="required")
        for call in answer.choices[0].message.tool_calls or []:
            if call.type == "function":
                print(call.function.name, json.loads(call.function.arguments))

        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SUM}}
        answer = llm.chat(question, temperature=0, response_format=schema)
        print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    main()
