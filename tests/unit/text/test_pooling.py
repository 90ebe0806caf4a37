"""Texts and pairs become prompts to pool: templates, limits, truncation, and the sentences of refusals."""

from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from engine.messages import ModelInfo
from engine.text.chat_template import ChatTemplate
from engine.text.io_processor import DoesNotFit, InputOutputProcessor, InvalidRequest
from engine.text.pooling import PoolingProcessor
from engine.text.tokenizer import Tokenizer
from models.architectures.pooling import PoolingConfig

WORDS = ["[CLS]", "[SEP]", "a", "b", "c", "d", "e", "f", "<", ">", ":", "Q", "D", "q", "x", "[UNK]"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Words of one letter, with BERT's special tokens around a text and between two."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return Tokenizer(backend)


def processor(tokenizer: Tokenizer, template: str | None = None, context: int = 12, **fields: Any) -> PoolingProcessor:
    info = ModelInfo("", "", "", "", 0, len(WORDS), context, [], 16, 64)
    chat = None if template is None else ChatTemplate({"default": template})
    defaults = {"task": "embed", "body": "BertModel", "is_encoder": True, "modes": ("cls",), "dimension": 64}
    config = PoolingConfig(**{**defaults, **fields})  # type: ignore[arg-type]
    return PoolingProcessor(InputOutputProcessor(tokenizer, chat, info), config)


def spelled(ids: list[int]) -> str:
    return " ".join(WORDS[each] for each in ids)


SCORER: dict[str, Any] = {"task": "classify", "dimension": 1}


def test_a_text_gets_its_special_tokens_and_keeps_them_when_it_is_cut(tokenizer: Tokenizer) -> None:
    embedder = processor(tokenizer)
    assert spelled(embedder.prompt("a b c", "input").token_ids) == "[CLS] a b c [SEP]"
    assert spelled(embedder.prompt("a b c", "input", longest=4).token_ids) == "[CLS] a b [SEP]"
    assert spelled(embedder.prompt("a b c", "input", add_special_tokens=False).token_ids) == "a b c"
    assert spelled(embedder.prompt("a " * 40, "input", longest=-1).token_ids) == "[CLS] " + "a " * 10 + "[SEP]"
    assert embedder.prompt([2, 3, 4], "input", longest=2).token_ids == [2, 3]


def test_a_pair_distinguishes_its_texts_and_only_the_second_is_cut(tokenizer: Tokenizer) -> None:
    scorer = processor(tokenizer, **SCORER)
    prompt = scorer.pair("a b", "c d e", "documents[0]")
    assert spelled(prompt.token_ids) == "[CLS] a b [SEP] c d e [SEP]"
    assert prompt.first_text_tokens == 4
    cut = scorer.pair("a b", "c d e", "documents[0]", longest=6)
    assert (spelled(cut.token_ids), cut.first_text_tokens) == ("[CLS] a b [SEP] c [SEP]", 4)
    shorter = scorer.pair("a b", "c d e", "documents[0]", longest_document=1)
    assert spelled(shorter.token_ids) == "[CLS] a b [SEP] c [SEP]"


def test_what_is_too_long_is_named_with_its_tokens_and_the_limit(tokenizer: Tokenizer) -> None:
    with pytest.raises(DoesNotFit) as raised:
        processor(tokenizer).prompts(["a", "b " * 11], "input")
    assert raised.value.param == "input[1]"
    assert "input[1] is not accepted: its prompt has 13 tokens" in str(raised.value)
    assert "12 tokens" in str(raised.value)


def test_prompts_of_the_checkpoint_go_before_texts(tokenizer: Tokenizer) -> None:
    embedder = processor(tokenizer, prompts={"query": "Q : ", "passage": "D : "}, default_prompt="passage")
    assert spelled(embedder.prompts(["a"], "input")[0].token_ids) == "[CLS] D : a [SEP]"
    assert embedder.query_text("a") == "Q : a"
    assert embedder.document_text("a") == "D : a"
    query, document = embedder.search("a", ["b"])
    assert (spelled(query.token_ids), spelled(document.token_ids)) == ("[CLS] Q : a [SEP]", "[CLS] D : b [SEP]")
    with pytest.raises(InvalidRequest, match="prompt_name is 'none'; the prompts of this model are: query, passage"):
        embedder.prompts(["a"], "input", prompt_name="none")


def test_small_letters_where_the_checkpoint_wants_them(tokenizer: Tokenizer) -> None:
    assert spelled(processor(tokenizer, lower_case=True).prompts(["A B"], "input")[0].token_ids) == "[CLS] a b [SEP]"


LANGUAGE_MODEL: dict[str, Any] = {**SCORER, "is_encoder": False, "modes": ("last",)}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'query' %}Q : {{ message.content }} "
    "{% elif message.role == 'document' %}D : {{ message.content }} < >{% else %}{{ message.content }} "
    "{% endif %}{% endfor %}"
)


def test_a_reranker_with_a_template_renders_query_and_document(tokenizer: Tokenizer) -> None:
    reranker = processor(tokenizer, TEMPLATE, body="LlamaForCausalLM", **LANGUAGE_MODEL)
    assert spelled(reranker.pair("a", "b c", "documents[0]").token_ids) == "Q : a D : b c < >"
    assert spelled(reranker.pair("a", "b", "documents[0]", instruction="q").token_ids) == "q Q : a D : b < >"
    # The end of the template, after which the score is read, is not truncated.
    assert spelled(reranker.pair("a", "b c d e f", "documents[0]", longest=9).token_ids) == "Q : a D : b c < >"


def test_a_qwen3_reranker_without_one_gets_the_published_form_once(tokenizer: Tokenizer) -> None:
    reranker = processor(tokenizer, context=10_000, body="Qwen3ForCausalLM", **LANGUAGE_MODEL)
    raw = reranker.pair("a", "b", "documents[0]").token_ids
    written = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "web search query, retrieve relevant passages that answer the query\n<Query>: a\n"
    )
    document = "<Document>: b<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert raw == tokenizer.encode(written + document, add_special_tokens=False)
    # If a client has written the template itself, the pair is joined by the tokenizer.
    assert (
        reranker.pair(written, document, "documents[0]").token_ids
        == tokenizer.encode_for_pooling(written, document)[0]
    )


@pytest.mark.parametrize(
    ("matryoshka", "allowed", "refused"),
    [(None, [64], [32, 65]), ((), [1, 32, 64], [65]), ((16, 32), [16, 32, 64], [8, 65])],
)
def test_dimensions_are_those_that_the_model_was_trained_for(
    tokenizer: Tokenizer, matryoshka: tuple[int, ...] | None, allowed: list[int], refused: list[int]
) -> None:
    embedder = processor(tokenizer, matryoshka=matryoshka)
    for dimensions in allowed:
        embedder.check_dimensions(dimensions)
    for dimensions in refused:
        with pytest.raises(InvalidRequest, match=f"dimensions is {dimensions}; this model's embeddings"):
            embedder.check_dimensions(dimensions)


def test_a_lone_surrogate_is_refused_by_the_field(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="input is not accepted: its text holds the lone surrogate"):
        processor(tokenizer).prompt("a \ud800", "input")
