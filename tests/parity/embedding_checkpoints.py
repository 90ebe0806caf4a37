"""Small random checkpoints of embedding models, classifiers and rerankers, in sentence-transformers' layout."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.parity.checkpoints import Family, edit_json, make_checkpoint

_MODULE = "sentence_transformers.models"


def add_modules(
    directory: Path,
    *pooling_modes: str,
    normalize: bool = True,
    dense: tuple[int, int] | None = None,
    prompts: dict[str, str] | None = None,
) -> Path:
    """Write sentence-transformers' modules next to a checkpoint: pooling by `pooling_modes` (`lasttoken`,
    `mean_tokens`, …), optionally a layer of `dense` (in, out) features, and normalisation."""
    kinds = ["Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULE}.Transformer"}]
    for index, kind in enumerate(kinds, 1):
        path = f"{index}_{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"{_MODULE}.{kind}"})
        (directory / path).mkdir(exist_ok=True)
    (directory / "modules.json").write_text(json.dumps(modules))
    size = json.loads((directory / "config.json").read_text())["hidden_size"]
    modes = {f"pooling_mode_{mode}": True for mode in pooling_modes}
    modes.setdefault("pooling_mode_mean_tokens", False)
    (directory / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": size, **modes}))
    if dense:
        _add_dense(directory / "2_Dense", *dense)
    if prompts is not None:
        settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return directory


def _add_dense(folder: Path, in_features: int, out_features: int) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    bias = torch.randn(out_features, generator=generator)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")
    settings = {
        "in_features": in_features,
        "out_features": out_features,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "config.json").write_text(json.dumps(settings))


def qwen3_embedding(directory: Path, **overrides: Any) -> Path:
    """Like Qwen3-Embedding: a language model whose last token is pooled and normalised, with prompts."""
    make_checkpoint(directory, "qwen3", **{"tie_word_embeddings": True, **overrides})
    return add_modules(directory, "lasttoken", prompts={"query": "Find what answers: ", "document": ""})


def qwen3_classifier(directory: Path, num_labels: int = 1, **overrides: Any) -> Path:
    """Like the conversion of Qwen3-Reranker to a classifier, or like any classifier over a language model."""
    family = Family(Qwen3Config, Qwen3ForSequenceClassification)
    return make_checkpoint(directory, family, num_labels=num_labels, **overrides)


def qwen3_reranker(directory: Path, **overrides: Any) -> Path:
    """Like Qwen3-Reranker: a language model whose logits of yes and no, here the letters y and n, give the score."""
    make_checkpoint(directory, "qwen3", **{"tie_word_embeddings": True, **overrides})
    edit_json(directory / "config.json", classifier_from_token=["n", "y"])
    return directory


def embedding_gemma(directory: Path) -> Path:
    """Like EmbeddingGemma: Gemma 3 with attention in both directions, the mean, and two layers without activations."""
    fields = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 15,
        "query_pre_attn_scalar": 24,
        "use_bidirectional_attention": True,
    }
    make_checkpoint(directory, Family(Gemma3TextConfig, Gemma3TextModel, fields, norm_mean=0.0))
    add_modules(directory, "mean_tokens", dense=(64, 96))
    edit_json(directory / "2_Dense/config.json", activation_function="torch.nn.modules.linear.Identity")
    return directory


_NARROW = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 80}
_ROBERTA = {**_NARROW, "pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1, "max_position_embeddings": 130}
_MODERN = {**_NARROW, "num_hidden_layers": 4, "local_attention": 16, "pad_token_id": 0, "cls_token_id": 1}
_ENCODERS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "bert": (BertConfig, BertModel, BertForSequenceClassification, {**_NARROW, "max_position_embeddings": 128}),
    "roberta": (RobertaConfig, RobertaModel, RobertaForSequenceClassification, _ROBERTA),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, XLMRobertaForSequenceClassification, _ROBERTA),
    "modernbert": (ModernBertConfig, ModernBertModel, ModernBertForSequenceClassification, _MODERN),
}
ENCODER_FAMILIES = tuple(_ENCODERS)


def encoder(directory: Path, family: str, num_labels: int | None = None, **overrides: Any) -> Path:
    """An encoder of odd sizes; with `num_labels`, a classifier or, with one label, a cross-encoder."""
    config_class, model_class, classifier_class, fields = _ENCODERS[family]
    fields = {**fields, **overrides, **({} if num_labels is None else {"num_labels": num_labels})}
    chosen = Family(config_class, model_class if num_labels is None else classifier_class, fields)
    make_checkpoint(directory, chosen, num_key_value_heads=None, head_dim=None)
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    # As in RoBERTa: positions begin after the padding's index.
    first, last = "<|endoftext|>", "<|im_end|>"
    second = 1 if family == "bert" else 0
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:{second} {last}:{second}",
        special_tokens=[(first, 0), (last, 2)],
    )
    tokenizer.save(file)
    # With a template, sentence-transformers would render a pair as a chat.
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if second else [])]
    edit_json(directory / "tokenizer_config.json", chat_template=None, model_input_names=names)
    return directory
