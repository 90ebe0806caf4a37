"""`HOSTILE`: requests that are meaningless or expensive, by endpoint. Sent by `test_hostile_requests`."""

import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from tests.e2e.kaon_server import MODEL

VOCAB_SIZE = 1536
MEBIBYTE = 2**20


class Hostile(NamedTuple):
    """A request that must be refused."""

    name: str
    path: str
    body: bytes


def nested(depth: int, inner: Any, key: str = "x") -> Any:
    """An object schema nested in object schemas."""
    schema = inner
    for _ in range(depth):
        schema = {"type": "object", "properties": {key: schema}, "required": [key], "additionalProperties": False}
    return schema


def nested_text(depth: int) -> str:
    """Such a schema as JSON text, deeper than Python's encoder allows."""
    return '{"type":"object","properties":{"x":' * depth + "{}" + "}}" * depth


TOKEN_IDS: dict[str, Any] = {
    "-1": -1,
    "the vocabulary's size": VOCAB_SIZE,
    "2^31": 2**31,
    "2^32": 2**32,
    "2^63": 2**63,
    "2^64": 2**64,
    "10^40": 10**40,
    "a half": 0.5,
    "true": True,
    "null": None,
    "text": "5",
    "NaN": float("nan"),
    "infinity": float("inf"),
}

NUMBERS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    "text": "1",
    "a list": [1],
    "10^400": 10**400,
}

SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "all of itself": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "a reference to nowhere": {"$ref": "#/$defs/nowhere"},
    "a reference to a file": {"$ref": "file:///etc/hostname"},
    "a type that is none": {"type": "robot"},
    "a number for a schema": {"type": "object", "properties": {"x": 5}},
    "text for properties": {"type": "object", "properties": "x"},
    "nothing fits": {"type": "integer", "minimum": 5, "maximum": 4},
    "no choice": {"enum": []},
    "false": {"type": "object", "properties": {"x": False}, "required": ["x"]},
    "nested 70 deep": nested(70, {"type": "integer"}),
    "ten thousand fields": {
        "type": "object",
        "properties": {f"field{i}": {"type": "string"} for i in range(10_000)},
        "additionalProperties": False,
    },
    "a broken pattern": {"type": "string", "pattern": "("},
    "a lone surrogate for a key": {"type": "object", "properties": {"\ud800": {"type": "integer"}}},
}

REGEXES: dict[str, str] = {
    "open group": "(",
    "open class": "[a-",
    "nothing to repeat": "*",
    "back reference": r"(a)\1",
    "look-behind": "(?<=a)b",
    "a lone surrogate": "\ud800",
    "a megabyte": "a" * MEBIBYTE,
    "a million parentheses": "(" * 400_000 + ")" * 400_000,
}

GRAMMARS: dict[str, str] = {
    "empty": "",
    "no start": "other: /a/",
    "left recursion only": "start: start",
    "a rule that is not there": "start: nowhere",
    "not a grammar": "}{",
    "a lone surrogate": 'start: "\ud800"',
    "a megabyte of rules": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(60_000)),
}

STRUCTURES: dict[str, dict[str, Any]] = {
    **{f"schema: {name}": {"json": schema} for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": {"regex": regex} for name, regex in REGEXES.items()},
    **{f"grammar: {name}": {"grammar": grammar} for name, grammar in GRAMMARS.items()},
    "choice: none": {"choice": []},
    "choice: a number": {"choice": [5]},
    "choice: a million": {"choice": [str(i) for i in range(700_000)]},
    "choice: a lone surrogate": {"choice": ["\ud800"]},
    "two at once": {"regex": "a", "choice": ["a"]},
    "unknown": {"xml": "a"},
    "schema as broken text": {"json": "{"},
    "schema as text, 5000 deep": {"json": nested_text(5_000)},
}

HARMLESS: dict[str, dict[str, Any]] = {
    "an object that never ends": {
        "json": {
            "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}},
            "$ref": "#/$defs/a",
        }
    },
    "alternatives to the power of eight": {
        "json": {
            "$defs": {
                f"d{i}": {"anyOf": [{"type": "array", "items": [{"$ref": f"#/$defs/d{i + 1}"}] * 8}] * 8}
                for i in range(8)
            }
            | {"d8": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        }
    },
    "a string of a billion": {"json": {"type": "string", "minLength": 10**9}},
    "an array of a billion": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "a pattern of repeats of repeats": {"json": {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"}},
    "repeats of repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a long look back": {"regex": "(.*a.{2000}){20}"},
    "alternatives of everything": {"regex": "(?:" + "|".join(f".*{i}.*" for i in range(3_000)) + ")"},
    "a terminal of repeats": {"grammar": "start: /((a{1,1000}){1,1000}){1,1000}/"},
    **{
        f"what hurts engines that backtrack: {regex}": {"regex": regex}
        for regex in ("(a+)+b", "(a|aa)+b", "(.*)*b", "([a-z]+)*[0-9]", "(x+x+)+y", "^(([a-z])+.)+[A-Z]([a-z])+$")
    },
}
"""Values of `structured_outputs` that look expensive and are not, if they are compiled step by step."""

SAMPLING: dict[str, dict[str, Any]] = {
    **{
        f"{field} is {name}": {field: value}
        for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for name, value in NUMBERS.items()
    },
    **{f"n is {n}": {"n": n} for n in (1_000_000, 0, -1, 2**31, 2**63, 1.5, True)},
    **{f"seed is {name}": {"seed": value} for name, value in NUMBERS.items()},
    **{f"top_k is {k}": {"top_k": k} for k in (-2, 2**31, 1.5)},
    **{f"max_tokens is {k}": {"max_tokens": k} for k in (-1, 2**31, 2**63, 1e308)},
    **{f"min_tokens is {k}": {"min_tokens": k} for k in (-1, 2**31)},
    **{f"priority is {k}": {"priority": k} for k in (2**63, -(2**64), 1.5)},
    **{f"truncate_prompt_tokens is {k}": {"truncate_prompt_tokens": k} for k in (-7, 0, 2**31, 1.5)},
    **{f"prompt_logprobs is {k}": {"prompt_logprobs": k} for k in (-2, 10**9)},
    **{f"stop_token_ids has {name}": {"stop_token_ids": [value]} for name, value in TOKEN_IDS.items()},
    **{f"allowed_token_ids has {name}": {"allowed_token_ids": [value]} for name, value in TOKEN_IDS.items()},
    "allowed_token_ids is empty": {"allowed_token_ids": []},
    "allowed_token_ids repeats a million times": {"allowed_token_ids": [5] * 1_000_000},
    **{
        f"logit_bias has the key {key[:20]!r}": {"logit_bias": {key: 1}}
        for key in (
            "-1",
            str(VOCAB_SIZE),
            str(2**31),
            str(2**63),
            "1.5",
            "",
            " 5",
            "1e3",
            "\u0663",
            "\ud800",
            "9" * 5000,
        )
    },
    **{
        f"logit_bias has the value {name}": {"logit_bias": {"5": value}}
        for name, value in {**NUMBERS, "101": 101, "null": None}.items()
    },
    "logit_bias for a million tokens": {"logit_bias": {str(i): 1 for i in range(500_000)}},
    "stop of 9 MB": {"stop": "x" * 9 * MEBIBYTE},
    "stop of 10 MB": {"stop": "x" * 10 * MEBIBYTE},
    "stop is empty": {"stop": [""]},
    "stop a million times": {"stop": ["x"] * 1_000_000},
    "stop has a lone surrogate": {"stop": "\udc00"},
    "bad_words is empty text": {"bad_words": [""]},
    "bad_words a million times": {"bad_words": ["x"] * 1_000_000},
    "bad_words of 9 MB": {"bad_words": ["x" * 9 * MEBIBYTE]},
    "bad_words has a lone surrogate": {"bad_words": ["\ud800"]},
    "cache_salt has a lone surrogate": {"cache_salt": "\ud800"},
    "user has a lone surrogate": {"user": "\ud800"},
    "model has a lone surrogate": {"model": "\ud800"},
    "an unknown field": {"temprature": 1},
    "a field with a lone surrogate": {"\ud800": 1},
    **{f"structured_outputs, {name}": {"structured_outputs": value} for name, value in STRUCTURES.items()},
}

COMPLETIONS: dict[str, dict[str, Any]] = {
    **SAMPLING,
    **{f"prompt has the token {name}": {"prompt": [5, value]} for name, value in TOKEN_IDS.items()},
    **{f"a prompt of several has the token {name}": {"prompt": [[5], [value]]} for name, value in TOKEN_IDS.items()},
    "prompt nested thrice": {"prompt": [[[5]]]},
    "prompt of texts and ids": {"prompt": ["a", 5]},
    "prompt of a million tokens": {"prompt": [5] * 1_000_000},
    "a million prompts": {"prompt": ["a"] * 1_000_000},
    "a prompt of 9 MB": {"prompt": "x" * 9 * MEBIBYTE},
    "prompt has a lone surrogate": {"prompt": "\ud83d"},
    "prompt has surrogates the wrong way round": {"prompt": "\ude00\ud83d"},
    "best_of is a million": {"best_of": 1_000_000},
    "best_of below n": {"best_of": 1, "n": 2},
    "logprobs is a million": {"logprobs": 1_000_000},
    "logprobs is -1": {"logprobs": -1},
    "suffix has a lone surrogate": {"suffix": "\ud800"},
}


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}], "tool_choice": "required"}


CHAT: dict[str, dict[str, Any]] = {
    **SAMPLING,
    **{
        f"response_format, {name}": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        }
        for name, schema in SCHEMAS.items()
    },
    **{f"a tool's parameters, {name}": _tool(parameters=schema) for name, schema in SCHEMAS.items()},
    "top_logprobs is a million": {"logprobs": True, "top_logprobs": 1_000_000},
    "a tool's name has a lone surrogate": _tool(name="\ud800"),
    "a tool's name is long": _tool(name="f" * 100_000),
    "a tool's description has a lone surrogate": _tool(description="\ud800"),
    "a hundred thousand tools": {"tools": _tool()["tools"] * 100_000},
    "a named tool that is not there": {
        **_tool(),
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "required without tools": {"tool_choice": "required"},
    "content has a lone surrogate": {"messages": [{"role": "user", "content": "\ud800"}]},
    "a part has a lone surrogate": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}],
    },
    "a hundred thousand messages": {"messages": [{"role": "user", "content": "a"}] * 100_000},
    "content of 9 MB": {"messages": [{"role": "user", "content": "x" * 9 * MEBIBYTE}]},
    "a role that is none": {"messages": [{"role": "\ud800", "content": "a"}]},
    "arguments that are not JSON": {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": 5}}],
            },
        ],
    },
    "template variables that are reserved": {"chat_template_kwargs": {"messages": []}},
    "a template of the request's own": {"chat_template": "{% for i in range(10**9) %}{{ i }}{% endfor %}"},
    "an image by URL": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]},
        ],
    },
}


def _custom(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


CUSTOM: dict[str, dict[str, str]] = {
    "lark": {
        "nothing": "",
        "no start": 'a: "b"',
        "itself": "start: start",
        "a name that is not there": "start: nowhere",
        "a NUL": "start: \0",
        "a lone surrogate": 'start: "\ud800"',
        "a megabyte": 'start: "' + "x" * MEBIBYTE + '"',
        "nested brackets": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    },
    "regex": {
        "nothing": "",
        "an open bracket": "a(",
        "a backreference": r"(a)\1",
        "a look-ahead": "(?=a)b",
        "a lone surrogate": "\ud800",
        "a megabyte": "x" * MEBIBYTE,
    },
}

RESPONSES: dict[str, dict[str, Any]] = {
    **{
        f"{field} is {name}": {field: value}
        for field in ("temperature", "top_p", "max_output_tokens")
        for name, value in NUMBERS.items()
    },
    **{
        f"text.format, {name}": {
            "text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
        }
        for name, schema in SCHEMAS.items()
    },
    **{
        f"a tool's parameters, {name}": {
            "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}],
            "tool_choice": "required",
        }
        for name, schema in SCHEMAS.items()
    },
    "input has a lone surrogate": {"input": "\ud800"},
    "instructions have a lone surrogate": {"instructions": "\ud800"},
    "input is a number": {"input": 5},
    "input is empty": {"input": []},
    "a hundred thousand items": {"input": [{"role": "user", "content": "a"}] * 100_000},
    "an item that is none": {"input": [{"type": "robot"}]},
    "input of 9 MB": {"input": "x" * 9 * MEBIBYTE},
    "a response that never was": {"previous_response_id": "resp_\ud800"},
    "metadata is long": {"metadata": {"a": "x" * MEBIBYTE}},
    "metadata a hundred thousand times": {"metadata": {str(i): "x" for i in range(100_000)}},
    "a tool that is none": {"tools": [{"type": "robot"}]},
    **{
        f"a custom tool's {syntax}, {name}": {
            "tools": [_custom(syntax, definition)],
            "tool_choice": {"type": "custom", "name": "c"},
        }
        for syntax, definitions in CUSTOM.items()
        for name, definition in definitions.items()
    },
    "a namespace in a namespace": {
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": []}]}]
    },
    "a hundred thousand members": {
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}] * 100_000}]
    },
    "two members of one name": {
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}] * 2}]
    },
    "a member that is not there": {
        "tools": [_custom("regex", "a")],
        "tool_choice": {"type": "custom", "name": "c", "namespace": "n"},
    },
    "a compaction of nobody's": {"input": [{"type": "compaction", "encrypted_content": "\ud800"}]},
    "a sealed text of 9 MB": {"input": [{"type": "compaction", "encrypted_content": "x" * 9 * MEBIBYTE}]},
    "an output of no call": {"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]},
    "a custom call with a lone surrogate": {
        "input": [{"type": "custom_tool_call", "call_id": "c", "name": "c", "input": "\ud800"}]
    },
    "top_logprobs is a million": {"top_logprobs": 1_000_000},
    "max_output_tokens is -1": {"max_output_tokens": -1},
}

MESSAGES: dict[str, dict[str, Any]] = {
    **{
        f"{field} is {name}": {field: value}
        for field in ("temperature", "top_p", "max_tokens")
        for name, value in NUMBERS.items()
    },
    **{
        f"output_config.format, {name}": {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        for name, schema in SCHEMAS.items()
    },
    **{
        f"a tool's input_schema, {name}": {
            "tools": [{"name": "f", "input_schema": schema, "strict": True}],
            "tool_choice": {"type": "any"},
        }
        for name, schema in SCHEMAS.items()
    },
    "content has a lone surrogate": {"messages": [{"role": "user", "content": "\ud800"}]},
    "system has a lone surrogate": {"system": [{"type": "text", "text": "\udfff"}]},
    "messages are a number": {"messages": 5},
    "messages are empty": {"messages": []},
    "a hundred thousand messages": {"messages": [{"role": "user", "content": "a"}] * 100_000},
    "a hundred thousand blocks": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]
    },
    "content of 9 MB": {"messages": [{"role": "user", "content": "x" * 9 * MEBIBYTE}]},
    "results in results": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{}]}]}]
    },
    "a result of no call": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}]
    },
    "thinking with a signature of 9 MB": {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "", "signature": "a2Fvbj" + "A" * 9 * MEBIBYTE}],
            },
            {"role": "user", "content": 5},
        ]
    },
    "a document by URL": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "document", "source": {"type": "url", "url": "file:///etc/hostname"}}],
            }
        ]
    },
    "an image by URL": {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/"}}]}]
    },
    "an MCP server": {"mcp_servers": [{"type": "url", "url": "http://x/", "name": "x"}]},
    "a hundred thousand tools": {"tools": [{"name": "f", "input_schema": {}}] * 100_000},
    "a tool that is none": {"tools": [{"type": "robot", "name": "f"}]},
    "a named tool that is not there": {"tool_choice": {"type": "tool", "name": "g"}},
    "a call is required without tools": {"tool_choice": {"type": "any"}},
    "a budget above max_tokens": {"thinking": {"type": "enabled", "budget_tokens": 2**31 - 1}},
    "stop sequences that are empty": {"stop_sequences": [""]},
    "template variables that are reserved": {"chat_template_kwargs": {"messages": []}},
}

TOKENIZE: dict[str, dict[str, Any]] = {
    "a lone surrogate": {"prompt": "\ud800"},
    "a number": {"prompt": 5},
    "neither form": {},
    "both forms": {"messages": [{"role": "user", "content": "a"}]},
    "a message with a lone surrogate": {"prompt": None, "messages": [{"role": "user", "content": "\ud800"}]},
}
TOKENIZE["neither form"]["prompt"] = None

DETOKENIZE: dict[str, dict[str, Any]] = {
    **{f"the token {name}": {"tokens": [value]} for name, value in TOKEN_IDS.items()},
    "tokens nested": {"tokens": [[5]]},
    "text": {"tokens": "a"},
}

RAW: dict[str, bytes] = {
    "nothing": b"",
    "a NUL": b"\x00",
    "half an object": b'{"model": ',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": '{"model": "a"}'.encode("utf-16"),
    "a hundred thousand brackets": b"[" * 100_000,
    "a hundred thousand braces": b'{"a":' * 100_000,
    "a number of a million digits": b'{"seed": ' + b"9" * MEBIBYTE + b"}",
    "an exponent without end": b'{"temperature": 1e' + b"9" * 1000 + b"}",
    "a long key": b'{"' + b"k" * MEBIBYTE + b'": 1}',
    "a million keys": b"{" + b",".join(b'"%d":1' % i for i in range(500_000)) + b"}",
}

_ENDPOINTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "/v1/completions": ({"model": MODEL, "prompt": "Hi", "max_tokens": 4}, COMPLETIONS),
    "/v1/chat/completions": (
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        CHAT,
    ),
    "/v1/responses": ({"model": MODEL, "input": "Hi", "max_output_tokens": 16}, RESPONSES),
    "/v1/messages": (
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        MESSAGES,
    ),
    "/v1/responses/compact": (
        {"model": MODEL, "input": "Hi", "max_output_tokens": 16},
        # A summary has no form: the format of the conversation's answers does not affect it.
        {name: fields for name, fields in RESPONSES.items() if not name.startswith("text.format")},
    ),
    "/tokenize": ({"model": MODEL, "prompt": "Hi"}, TOKENIZE),
    "/detokenize": ({"model": MODEL, "tokens": [5]}, DETOKENIZE),
}
PATHS = tuple(_ENDPOINTS)


def hostile(path: str, but: Collection[str] = ()) -> Iterator[Hostile]:
    """The requests to one endpoint, apart from those of some names."""
    right, wrongs = _ENDPOINTS[path]
    for name, wrong in wrongs.items():
        if name not in but:
            yield Hostile(name, path, json.dumps({**right, **wrong}).encode())
    for name, body in RAW.items():
        if name not in but:
            yield Hostile(name, path, body)


def hostile_at_first(path: str) -> Iterator[Hostile]:
    """Those that no earlier endpoint has under the same name; Anthropic's form of errors is its own."""
    ours = [each for each in PATHS if each.startswith("/v1/messages") == path.startswith("/v1/messages")]
    earlier = ours[: ours.index(path)]
    return hostile(path, {name for other in earlier for name in (*_ENDPOINTS[other][1], *RAW)})
