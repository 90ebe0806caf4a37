"""`InputOutputProcessor.preprocess`: the engine's input, and the sentence of each refusal."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import ModelInfo, RequestOutput
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.io_processor import DoesNotFit, InputOutputProcessor, InvalidRequest
from engine.text.tokenizer import Tokenizer

ModelInfos = Callable[..., ModelInfo]

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def processor(byte_level: Tokenizer, model_info: ModelInfos) -> InputOutputProcessor:
    return InputOutputProcessor(byte_level, ChatTemplate({"default": CHATML}), model_info())


def refusal(processor: InputOutputProcessor, prompt: Any, **params: Any) -> tuple[str, str]:
    """The sentence and the field of the error that `preprocess` raises."""
    with pytest.raises(InvalidRequest) as caught:
        processor.preprocess(prompt, SamplingParams(**params), request_id=1)
    return str(caught.value), caught.value.param


def test_text_is_tokenised_into_a_message_for_the_core(processor: InputOutputProcessor, byte_level: Tokenizer) -> None:
    params = SamplingParams(max_tokens=4)
    (sequence,) = processor.new_sequences(processor.check(processor.tokenize("the fox"), params), [7], cache_salt=3)
    request = sequence.request
    assert request.request_id == sequence.state.request_id == 7
    assert request.prompt_token_ids == byte_level.encode("the fox")
    assert request.sampling_params == params
    assert request.cache_salt == 3


def test_token_ids_are_taken_as_they_are(processor: InputOutputProcessor) -> None:
    assert processor.preprocess([5, 6], SamplingParams(max_tokens=4), request_id=1).request.prompt_token_ids == [5, 6]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(processor: InputOutputProcessor, prompt: Any) -> None:
    assert refusal(processor, prompt) == ("prompt is empty; it must have at least 1 token", "prompt")


@pytest.mark.parametrize("prompt", [None, 5, b"text", ("a",)])
def test_a_prompt_of_another_type_is_refused(processor: InputOutputProcessor, prompt: Any) -> None:
    assert refusal(processor, prompt)[1] == "prompt"


def test_text_that_no_tokenisation_fits_is_refused_without_one(
    processor: InputOutputProcessor, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(byte_level, "encode", encode)
    text = "x" * 10 * 2**20
    tokens = -(-len(text) // byte_level.longest_token)
    sentence, param = refusal(processor, text)
    assert sentence.startswith(f"prompt has at least {tokens} tokens, but ")
    assert param == "prompt"
    with pytest.raises(InvalidRequest, match="prompt has at least") as caught:
        processor.tokenize(processor.render_chat([{"role": "user", "content": text}]), False)
    assert caught.value.param == "prompt"


def test_a_lone_surrogate_is_refused(processor: InputOutputProcessor) -> None:
    sentence, param = refusal(processor, "a\ud83d")
    assert "lone surrogate U+D83D" in sentence
    assert param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**70, "vocab_size"])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
def test_a_token_id_outside_the_vocabulary_is_refused(
    processor: InputOutputProcessor, byte_level: Tokenizer, field: str, token_id: Any
) -> None:
    size = byte_level.vocab_size
    token_id = size if token_id == "vocab_size" else token_id
    params = {
        "stop_token_ids": {"stop_token_ids": [0, token_id]},
        "logit_bias": {"logit_bias": {0: 1.0, token_id: 1.0}},
    }
    sentence, param = refusal(processor, [0, token_id] if field == "prompt" else [0], **params.get(field, {}))
    assert sentence == (
        f"{field} holds token id {token_id}; this model's token ids are between 0 and {size - 1}, "
        f"its vocabulary's size is {size}"
    )
    assert param == field


@pytest.mark.parametrize("token_id", [True, 1.0, "1", None])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_a_token_id_that_is_no_integer_is_refused(processor: InputOutputProcessor, field: str, token_id: Any) -> None:
    stop = {"stop_token_ids": [token_id]} if field == "stop_token_ids" else {}
    sentence, param = refusal(processor, [5, token_id] if field == "prompt" else [5], **stop)
    assert sentence == f"{field} holds {token_id!r}; token ids must be integers"
    assert param == field


def test_the_last_token_id_of_a_padded_vocabulary_is_accepted(byte_level: Tokenizer, model_info: ModelInfos) -> None:
    processor = InputOutputProcessor(byte_level, None, model_info(vocab_size=byte_level.vocab_size + 8))
    assert processor.preprocess([byte_level.vocab_size + 7], SamplingParams(max_tokens=1), request_id=1)


def test_prompt_and_completion_may_fill_the_context_exactly(processor: InputOutputProcessor) -> None:
    assert processor.preprocess([5] * 63, SamplingParams(max_tokens=1), request_id=1)
    assert processor.preprocess([5] * 10, SamplingParams(max_tokens=54), request_id=1)


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(processor: InputOutputProcessor) -> None:
    sentence, param = refusal(processor, [5] * 64, max_tokens=1)
    assert "prompt has 64 tokens, but this model's maximum context length is 64 tokens" in sentence
    assert "leaves room for at most 63" in sentence
    assert param == "prompt"


def test_a_prompt_that_an_empty_cache_could_not_hold_is_refused(byte_level: Tokenizer, model_info: ModelInfos) -> None:
    processor = InputOutputProcessor(byte_level, None, model_info(num_kvcache_blocks=2))
    sentence, param = refusal(processor, [5] * 32, max_tokens=1)
    assert "the KV cache holds 32 tokens" in sentence
    assert param == "prompt"


def test_more_max_tokens_than_the_context_leaves_are_refused(processor: InputOutputProcessor) -> None:
    sentence, param = refusal(processor, [5] * 10, max_tokens=55)
    assert "max_tokens is 55" in sentence
    assert "leaves room for 54" in sentence
    assert param == "max_tokens"


def test_default_max_tokens_are_cut_to_the_rest_of_the_context(processor: InputOutputProcessor) -> None:
    params = SamplingParams(max_tokens=2**31 - 1, temperature=0.5)
    request = processor.preprocess([5] * 10, params, request_id=1, clip_max_tokens=True).request
    assert request.sampling_params == SamplingParams(max_tokens=54, temperature=0.5)


def test_a_processor_that_clips_cuts_every_max_tokens_to_the_rest(
    byte_level: Tokenizer, model_info: ModelInfos
) -> None:
    clips = InputOutputProcessor(byte_level, None, model_info(), clips_max_tokens=True)
    assert clips.check([5] * 10, SamplingParams(max_tokens=32000)).max_tokens == 54
    assert clips.check([5] * 10, SamplingParams(max_tokens=53)).max_tokens == 53
    with pytest.raises(DoesNotFit) as raised:
        clips.check([5] * 70, SamplingParams(max_tokens=32000))
    error = raised.value
    assert (error.prompt_tokens, error.limit, error.completion_tokens) == (70, 63, 0)


def test_min_tokens_beyond_the_rest_are_refused_also_when_max_tokens_are_cut(processor: InputOutputProcessor) -> None:
    params = SamplingParams(max_tokens=2**31 - 1, min_tokens=60)
    with pytest.raises(InvalidRequest, match="min_tokens is 60") as caught:
        processor.preprocess([5] * 10, params, request_id=1, clip_max_tokens=True)
    assert caught.value.param == "min_tokens"


def test_a_prompt_behind_which_nothing_comes_may_fill_the_context(processor: InputOutputProcessor) -> None:
    assert processor.preprocess([5] * 64, SamplingParams(max_tokens=0), request_id=1)
    sentence, param = refusal(processor, [5] * 65, max_tokens=0)
    assert "prompt has 65 tokens" in sentence
    assert "leaves room for at most 64; shorten" in sentence
    assert param == "prompt"


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
def test_token_ids_that_steer_sampling_must_be_the_models(processor: InputOutputProcessor, field: str) -> None:
    wrong = [[5, 10**6]] if field == "bad_words" else [5, 10**6]
    sentence, param = refusal(processor, [5], max_tokens=1, **{field: wrong})
    assert f"{field} holds token id 1000000" in sentence
    assert param == field


def test_a_text_can_be_cut_to_its_last_tokens_behind_bos(byte_fallback: Tokenizer, model_info: ModelInfos) -> None:
    processor = InputOutputProcessor(byte_fallback, None, model_info(vocab_size=byte_fallback.vocab_size))
    text = "the lazy dog and the fox"
    bos, *bare = processor.tokenize(text)
    assert bos == byte_fallback.bos_token_id
    for keep_last in range(2, len(bare) + 2):
        assert processor.tokenize(text, keep_last=keep_last) == [bos, *bare[len(bare) + 1 - keep_last :]]
        assert processor.tokenize(text, add_special_tokens=False, keep_last=keep_last) == bare[-keep_last:]
    assert processor.tokenize(text, keep_last=1) == bare[-1:]
    assert processor.tokenize(text, keep_last=len(bare) + 2) == [bos, *bare]


def test_a_text_far_beyond_the_context_can_be_cut_and_is_tokenised_only_in_part(
    processor: InputOutputProcessor, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the quick brown fox " * 5000
    expected = byte_level.encode(text)[-10:]
    lengths, encode = [], byte_level.encode
    monkeypatch.setattr(
        byte_level,
        "encode",
        lambda text, *flags, **named: (lengths.append(len(text)), encode(text, *flags, **named))[1],
    )
    with pytest.raises(InvalidRequest, match="at least"):
        processor.tokenize(text)
    assert processor.tokenize(text, keep_last=10) == expected
    assert max(lengths) < 10_000
    with pytest.raises(InvalidRequest, match="at least"):
        processor.tokenize(text, keep_last=65)


def test_words_are_spelled_alone_and_behind_a_space(processor: InputOutputProcessor, byte_level: Tokenizer) -> None:
    alone, behind = processor.tokenize_words(["fox"])
    assert byte_level.decode(alone) == "fox"
    assert byte_level.decode(behind) == " fox"
    assert processor.tokenize_words([" fox"]) == [alone, behind]
    assert [byte_level.decode(word) for word in processor.tokenize_words([" "])] == [" "]
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        processor.tokenize_words(["\ud800"])
    assert caught.value.param == "bad_words"


def test_all_words_are_tokenised_in_one_call_of_the_library(
    processor: InputOutputProcessor, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 1600 calls for 800 words took 25 ms, most of it for passing on the interpreter lock."""
    words, calls, encode_all = [f"w{number}" for number in range(100)], list[int](), byte_level.encode_all
    one_by_one = [tokens for word in words for tokens in processor.tokenize_words([word])]

    def counted(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        calls.append(len(texts))
        return encode_all(texts, add_special_tokens)

    monkeypatch.setattr(byte_level, "encode_all", counted)
    assert processor.tokenize_words(words) == one_by_one
    assert processor.tokenize_words([]) == []
    assert calls == [200]


def test_a_word_that_a_space_does_not_change_is_spelled_once(byte_fallback: Tokenizer, model_info: ModelInfos) -> None:
    processor = InputOutputProcessor(byte_fallback, None, model_info(vocab_size=byte_fallback.vocab_size))
    assert processor.tokenize_words(["the"]) == [byte_fallback.encode("the", add_special_tokens=False)]


def test_a_chat_is_rendered_and_tokenised_with_its_own_special_tokens(
    processor: InputOutputProcessor, byte_level: Tokenizer
) -> None:
    ids = processor.tokenize(processor.render_chat([{"role": "user", "content": "the fox"}]), False)
    assert ids[0] == byte_level.token_id("<|im_start|>")
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nthe fox<|im_end|>\n"


def test_a_chat_with_bos_in_its_template_gets_no_second_one(byte_fallback: Tokenizer, model_info: ModelInfos) -> None:
    template = ChatTemplate({"default": "{{ bos_token }}the"}, byte_fallback.special_tokens)
    processor = InputOutputProcessor(byte_fallback, template, model_info())
    ids = processor.tokenize(processor.render_chat([]), False)
    assert ids.count(byte_fallback.bos_token_id or -1) == 1


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "no chat template"), ("{{ raise_exception('no system role') }}", "no system role")],
)
def test_a_chat_that_cannot_be_rendered_is_refused(
    byte_level: Tokenizer, model_info: ModelInfos, template: str | None, words: str
) -> None:
    chat_template = ChatTemplate({"default": template}) if template else None
    processor = InputOutputProcessor(byte_level, chat_template, model_info())
    with pytest.raises(InvalidRequest, match=words) as caught:
        processor.render_chat([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_results_of_completed_sequences_are_given_by_request_id(
    processor: InputOutputProcessor, byte_level: Tokenizer
) -> None:
    states = []
    for request_id, text in ((3, "fox"), (4, "dog")):
        state = processor.preprocess("the", SamplingParams(max_tokens=9), request_id=request_id).state
        state.push(RequestOutput(request_id, byte_level.encode(text), finished=True, finish_reason="max_tokens"))
        states.append(state)
    results = processor.postprocess(states)
    assert {request_id: result["text"] for request_id, result in results.items()} == {3: "fox", 4: "dog"}
