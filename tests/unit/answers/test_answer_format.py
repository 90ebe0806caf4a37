"""Which dialects are detected for a model."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.config.paths import resolve_checkpoint
from engine.sampling_params import ReasoningBudget
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.parsing import registry
from server.parsing.answer_format import AnswerFormat
from server.schemas.chat_tools import ToolUse
from tests.unit.answers.dialect_texts import USE

TOOLS = "{% if tools %}{{ tools }}{% endif %}"


class Vocabulary:
    """The part of a tokenizer that `AnswerFormat` uses, over given tokens; tokens like `<|…|>` are special."""

    def __init__(self, *tokens: str) -> None:
        self._ids: Mapping[str, int] = {token: 100 + place for place, token in enumerate(tokens)}
        self.special_ids = frozenset(self._ids[token] for token in tokens if token.startswith("<|"))

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)


def made(
    template: str | None, *tokens: str, architecture: str = "", tool: str = "auto", reasoning: str = "auto"
) -> AnswerFormat:
    chat_template = None if template is None else ChatTemplate({"default": template})
    return AnswerFormat.of_model(Vocabulary(*tokens), chat_template, architecture, tool, reasoning)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "tokens", "tool", "reasoning"),
    [
        (TOOLS + "<tool_call> <think> </think>", ("<tool_call>", "<think>"), "hermes", "think"),
        (TOOLS + "<tool_call>", ("<think>", "</think>"), "hermes", "think"),
        (TOOLS + "<tool_call>", (), "hermes", "none"),
        (TOOLS + "<tool_call>\n<function=f>\n<parameter=", (), "qwen3_coder", "none"),
        (TOOLS + "<tool_call>{name}\n<arg_key> <think></think>", (), "glm45", "think"),
        (TOOLS + "<|start_header_id|>", ("<|python_tag|>",), "llama3_json", "none"),
        (TOOLS + "<|header_start|>", ("<|python_start|>",), "pythonic", "none"),
        (TOOLS + """'{"name": "' + name + '", "parameters": '""", ("<|python_start|>",), "llama4_json", "none"),
        (TOOLS + "[func_name1(params_name1=1)]", ("<|python_tag|>",), "pythonic", "none"),
        (TOOLS + "[TOOL_CALLS]", (), "mistral", "none"),
        (TOOLS + "[TOOL_CALLS] [ARGS] [THINK]", (), "mistral_args", "mistral"),
        (TOOLS + "<｜tool▁calls▁begin｜> ```json </think>", (), "deepseek_v3", "deepseek_r1"),  # noqa: RUF001
        (TOOLS + "<｜tool▁calls▁begin｜> <think> </think>", (), "deepseek_v31", "think"),  # noqa: RUF001
        (TOOLS + "<|channel|> <|message|>", (), "harmony", "harmony"),
        (
            TOOLS
            + "{%- set begin = '<seed:tool_call>' -%}{{ begin + '\\n<function=f>\\n<parameter=k>v</parameter>' }}"
            "{%- set think = '<seed:think>' -%}",
            (),
            "seed_oss",
            "seed_oss",
        ),
        (TOOLS + "<tool_call>\n<function=f>\n<parameter=k>value_1</parameter> <think>", (), "mimo", "think"),
        (TOOLS + "'<function=f>\\n<parameter=k>\\nvalue_1\\n</parameter>' <think>", (), "qwen3_coder", "think"),
        (TOOLS + "<function=f>\n<parameter=k>\nvalue_1\n</parameter> <think>", (), "qwen3_coder", "think"),
        (TOOLS + "<tool_call>{f}<arg_key>{k}</arg_key><arg_value>{v}</arg_value> <think>", (), "glm47", "think"),
        (
            TOOLS + "<role>ASSISTANT</role><think>\n <tool_call>{f}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>",
            (),
            "glm47",
            "think",
        ),
        (TOOLS + "<tool_call>{f}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>", (), "glm45", "none"),
        (TOOLS + "<tool_calls>\n<tool_call>{f}<tool_sep>\n<arg_key>", (), "hy_v3", "none"),
        (TOOLS + "<tool_call:opensource>{f}<tool_sep:opensource> <think:opensource>", (), *("hy_v3_opensource",) * 2),
        (TOOLS + "{{ suffix }}", ("<tool_sep:opensource>", "<think:opensource>"), *("hy_v3_opensource",) * 2),
        (TOOLS + "<longcat_tool_call>{f}\n<longcat_arg_key> <longcat_think>", (), "longcat_keys", "longcat"),
        (TOOLS + '<function name="f"><param name="k">v</param></function> <think>', (), "minicpm5", "think"),
        # MiniCPM5's template searches contents for Hunyuan 3's separator.
        (TOOLS + 'content.split(\'<tool_sep>\') <function name="f"><param name="k">', (), "minicpm5", "none"),
        # Functionary writes arguments as JSON after the tag that Qwen3-Coder writes.
        (TOOLS + '<function=f>{"k": "v"}</function> <|python_tag|>', (), "llama3_json", "none"),
        (TOOLS + '<tool_calls>\\n{"name": <tool-name>, "arguments": <args-json-object>}', (), "minimax_m1", "none"),
        (TOOLS + "'<|tool_calls|>' '<|tool_call:begin|>' <|think|><|end|>", (), "solar_open", "solar_open"),
        (TOOLS + "'<start_function_call>call:' + f", (), "functiongemma", "none"),
        (TOOLS + "<|function_call_library|> '<function_call> ' + f", (), "granite_20b_fc", "none"),
        (
            TOOLS + '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...]',
            ("<|python_tag|>",),
            "xlam",
            "none",
        ),
        (
            TOOLS + "{%- set begin = '<minimax:tool_call>' -%}<invoke name=\"f\"> <response> <think>\n</think>",
            (),
            "minimax_m2",
            "think",
        ),
        (
            TOOLS + "{%- set ns = ']<]minimax[>[' -%}{{ ns ~ '<tool_call>' }} <mm:think>",
            (),
            "minimax_m3",
            "minimax_m3",
        ),
        (TOOLS + "{%- set d = '｜DSML｜' -%}<{{ d }}function_calls> <think>", (), "deepseek_v32", "think"),  # noqa: RUF001
        (TOOLS + "<｜DSML｜tool_calls> <think>", (), "deepseek_v4", "think"),  # noqa: RUF001
        (TOOLS + "<｜DSML｜ calls>\n<｜DSML｜ invoke <think>", (), "deepseek_v41", "think"),  # noqa: RUF001
        (TOOLS + "<|tool_calls_section_begin|> <think></think>", (), "kimi_k2", "think"),
        (TOOLS + "'<|tool_call>call:' <|channel>thought\n<channel|>", (), "gemma4", "gemma4"),
        (TOOLS + "<|START_THINKING|> <|START_ACTION|>[ <|START_RESPONSE|>", (), "cohere_command", "cohere_command"),
        (TOOLS + "'<|tools_prefix|>' + '[' '<|inner_prefix|>'", (), "apertus", "apertus"),
        (TOOLS + 'role_sep="<|role_sep|>", message_sep="<|message_sep|>"', (), "gigachat3", "none"),
        (TOOLS + 'role_sep="<|role_sep|>" <|function_call|>', (), "gigachat31", "none"),
        (TOOLS + "<|role_sep|> '<｜GCML｜' <think>", (), "gigachat35", "think"),  # noqa: RUF001
        (TOOLS + "<longcat_tool_call> <longcat_think>", (), "longcat", "longcat"),
        (TOOLS + "<dots_function_call>\n<invoke <think>", (), "dots", "think"),
        (TOOLS + "after the marker [BEGIN FINAL RESPONSE]. <tool_calls>[", (), "hunyuan_a13b", "apriel"),
        (TOOLS + "after 'Here is my thought process:' <|tool_call|>", (), "granite", "granite"),
        (TOOLS + "<TOOLCALL>[ <think></think>", (), "nemotron_json", "think"),
        (TOOLS + "<|tool|> <|/tool|>", ("<|/tool_call|>",), "phi4_mini_json", "none"),
        (TOOLS + "<|tool_call|><|start_of_role|>", (), "granite", "none"),
        (TOOLS + "<tool_calls>[ <think>\n\n</think>\n<answer>\n", (), "hunyuan_a13b", "hunyuan_a13b"),
        (TOOLS + "<|tool_list_start|>", ("<|tool_call_start|>",), "lfm2", "none"),
        (TOOLS + "<|tool_call_start|>[ <think>", (), "lfm2", "think"),
        (TOOLS + "<function_calls> <think>", (), "olmo3", "think"),
        (TOOLS + "<tool_call>\n <think>", ("<response>",), "hermes", "ernie45"),
        # Granite 3.3 names the tags in its prompt only, and LFM2.5's template just removes earlier reasoning.
        (TOOLS + "<|tool_call|> <think></think> <response></response>", (), "granite", "ernie45"),
        (TOOLS + "{{ content.split('</think>')[-1] }}", ("<|tool_call_start|>",), "lfm2", "think"),
        ("{{ messages }} <tool_call>", (), "none", "none"),
        (TOOLS, (), "none", "none"),
        (None, ("<think>", "</think>", "<tool_call>"), "none", "none"),
    ],
)
def test_auto_reads_the_template_and_the_vocabulary(
    template: str | None, tokens: tuple[str, ...], tool: str, reasoning: str
) -> None:
    answer_format = made(template, *tokens)
    assert (answer_format.tool_parser, answer_format.reasoning_parser) == (tool, reasoning)


def test_the_embedded_model_writes_hermes_calls_and_no_reasoning() -> None:
    checkpoint = resolve_checkpoint(None)
    tokenizer, template = Tokenizer.from_checkpoint(checkpoint), ChatTemplate.from_checkpoint(checkpoint)
    answer_format = AnswerFormat.of_model(tokenizer, template, "Qwen3ForCausalLM")
    assert (answer_format.tool_parser, answer_format.reasoning_parser) == ("hermes", "none")
    assert answer_format.visible_token_ids(USE) == frozenset()


def test_gpt_oss_speaks_harmony_whatever_its_template() -> None:
    answer_format = made(TOOLS, architecture="GptOssForCausalLM")
    assert (answer_format.tool_parser, answer_format.reasoning_parser) == ("harmony", "harmony")


def test_a_named_dialect_wins_and_what_does_not_go_with_it_is_left_out() -> None:
    answer_format = made(TOOLS + "<|channel|> <|message|>", tool="hermes")
    assert (answer_format.tool_parser, answer_format.reasoning_parser) == ("hermes", "none")
    assert made(TOOLS + "<tool_call>", tool="none").tool_parser == "none"
    assert made(TOOLS, tool="openai").tool_parser == "harmony"


def test_markers_that_are_special_tokens_stay_visible_to_parsers_that_look_for_them() -> None:
    answer_format = made(TOOLS, "<|python_tag|>", "<|eot_id|>", "<tool_call>")
    assert answer_format.visible_token_ids(USE) == {100}
    assert answer_format.visible_token_ids(ToolUse(())) == frozenset()
    harmony = made(TOOLS + "<|channel|> <|message|>", "<|channel|>", "<|message|>")
    assert harmony.visible_token_ids(USE) == harmony.visible_token_ids(ToolUse(())) == {100, 101}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"tool": "hermse"}, r"^tool_call_parser is hermse; it must be auto, none or one of .*hermes.*pythonic"),
        ({"reasoning": "deep"}, r"^reasoning_parser is deep; it must be auto, none or one of .*deepseek_r1.*think"),
        ({"tool": "harmony", "reasoning": "think"}, "harmony goes with harmony or none only"),
    ],
)
def test_a_dialect_that_is_not_known_is_refused_with_those_that_are(flags: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        made(TOOLS, **flags)
    with pytest.raises(ValueError, match=sentence):
        AnswerFormat.check_names(flags.get("tool", "auto"), flags.get("reasoning", "auto"))


def test_every_dialect_and_auto_and_none_pass_the_check_of_names() -> None:
    for name in ("auto", "none", *registry.tool_names()):
        AnswerFormat.check_names(name, "auto")
    for name in ("auto", "none", *registry.reasoning_names()):
        AnswerFormat.check_names("auto", name)


def test_the_documentation_lists_every_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tool-calling.md").read_text()
    for name in (*registry.tool_names(), *registry.reasoning_names()):
        assert f"`{name}`" in page


HARMONY_TOKENS = ("<|end|>", "<|start|>", "<|channel|>", "<|message|>", "assistant", "analysis", "final", "comment")


def test_a_budget_counts_from_the_first_token_of_a_tag_that_is_several() -> None:
    gemma = made(TOOLS + "<|channel>thought <channel|>", "<|channel>", "<channel|>")
    assert gemma.reasoning_budget(7, prompt_tail="<|turn>model\n") == ReasoningBudget(7, [[101]], 100)
    assert gemma.reasoning_budget(7, prompt_tail="<|channel>thought\n<channel|>") is None


def test_a_budget_closes_the_reasoning_of_each_dialect_by_its_own_tokens() -> None:
    think = made(TOOLS + "<think> </think>", "<think>", "</think>")
    assert think.reasoning_budget(7, prompt_tail="user") == ReasoningBudget(7, [[101]], 100)
    assert think.reasoning_budget(7, prompt_tail="<think>\n") == ReasoningBudget(7, [[101]])
    assert think.reasoning_budget(7, prompt_tail="<think>\n</think>\n") is None
    assert made(TOOLS).reasoning_budget(7, prompt_tail="user") is None
    harmony = made(TOOLS + "<|channel|> <|message|>", *HARMONY_TOKENS)
    closing = [[100], [101], [104], [102], [106, 107]]
    # One more, since the marker after the channel's name is not reasoning.
    assert harmony.reasoning_budget(7, prompt_tail="<|start|>assistant") == ReasoningBudget(8, closing, 105)
    opened = "<|start|>assistant<|channel|>final<|message|>"
    assert harmony.reasoning_budget(7, prompt_tail=opened) is None


@pytest.mark.parametrize(("tokens", "tail"), [(("<think>",), "<think>"), (("</think>",), "user"), ((), "")])
def test_a_budget_needs_markers_that_are_tokens(tokens: tuple[str, ...], tail: str) -> None:
    with pytest.raises(LookupError, match="not single tokens"):
        made(TOOLS, *tokens, reasoning="think").reasoning_budget(7, prompt_tail=tail)
