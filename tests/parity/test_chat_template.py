"""`ChatTemplate` renders the same as transformers' `apply_chat_template`, for templates of the usual styles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import models

from engine.text.chat_template import ChatTemplate
from tests.sweeps import sweep

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "Tools, one a line:" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.content is string %}
            {%- if '</think>' in message.content and loop.index0 < ns.last_user %}
                {{- message.content.split('</think>')[-1].lstrip('\\n') }}
            {%- else %}{{- message.content }}{%- endif %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if strftime_now is defined %}{% set date = strftime_now("%d %b %Y") %}{%- endif %}
{%- set system = "" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
<|start|>system<|end|>

Today: {{ date | default("unknown") }}
{% if tools is not none %}
    {% for t in tools %}
{{ t | tojson(indent=4) }}
    {% endfor %}
{% endif %}
{{ system }}<|eot|>
{% for message in messages %}
<|start|>{{ message['role'] }}<|end|>
{% if message['content'] is string %}
{{ message['content'] | trim }}
{%- elif message['content'] is iterable %}
    {%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{%- endfor %}
{%- endif %}
<|eot|>
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant<|end|>
{% endif %}
"""

INSTRUCTIONS = """\
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set loop_messages = messages %}
    {% set system = '' %}
{% endif %}
{% for message in loop_messages %}
    {% if message['role'] not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {% set content = system + message['content'] if loop.first else message['content'] %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% else %}
        {% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""

SYSTEM = {"role": "system", "content": " Be brief & <kind>. "}
USER = {"role": "user", "content": "Wie heißt du? 日本 <b>'\"&</b>\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nKaon.\n"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None, True, "é<"]}}}],
}
RESULT = {"role": "tool", "content": '{"sum": 3}'}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds < & > 'é'.", "parameters": {"type": "object", "properties": {}}},
}
CHATS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "tool results": [USER, CALL, RESULT, RESULT, USER],
    "ends with the assistant": [USER, ANSWER],
}


@sweep(
    2,
    source={"chatml": CHATML, "headers": HEADERS, "instructions": INSTRUCTIONS},
    chat=CHATS,
    tools={"no tools": None, "tools": [TOOL, TOOL]},
    options={
        "prompted": {"add_generation_prompt": True},
        "unprompted": {"add_generation_prompt": False},
        "not thinking": {"enable_thinking": False},
    },
)
def test_the_prompt_equals_transformers(
    tmp_path: Path,
    source: str,
    chat: list[dict[str, Any]],
    tools: list[Mapping[str, Any]] | None,
    options: dict[str, Any],
) -> None:
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1})),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=source,
    )
    reference.save_pretrained(tmp_path)
    template = ChatTemplate.from_checkpoint(tmp_path)
    assert template is not None
    options = {"add_generation_prompt": True, **options}
    before = reference.apply_chat_template(chat, tools=tools, tokenize=False, **options)
    found = template.render(chat, tools=tools, **options)
    # A template may render the date, which may change meanwhile.
    assert found in (before, reference.apply_chat_template(chat, tools=tools, tokenize=False, **options))
