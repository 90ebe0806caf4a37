"""`PoolingConfig`: reads from a checkpoint's files how it pools a prompt into one vector. Imports no torch.

An embedding model is recognised by sentence-transformers' modules.json, a classifier or reranker by the name of its
architecture. Both consist of a body, whose hidden states are pooled, and a head: a few layers on the pooled vector.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from models.architectures.registry import ARCHITECTURES, ENCODERS
from models.config.fields import Fields, is_causal, read_config
from models.errors import CheckpointError

Task: TypeAlias = Literal["generate", "embed", "classify"]
Mode: TypeAlias = Literal["cls", "max", "mean", "last"]
Function: TypeAlias = Literal["none", "normalize", "sigmoid", "softmax"]
"""The last function applied to the vector: none, normalisation to unit length, or a function to probabilities."""

ACTIVATIONS = ("identity", "tanh", "gelu", "relu", "sigmoid")
"""Names of activations of a head's layers."""

_KINDS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForCausalLM")
_MODE_FIELDS: tuple[tuple[str, Mode | None], ...] = (
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", None),
    ("pooling_mode_weightedmean_tokens", None),
    ("pooling_mode_lasttoken", "last"),
)
"""Fields of sentence-transformers' Pooling in the order in which their vectors are concatenated."""
_MODE_NAMES: Mapping[str, Mode] = {"cls": "cls", "max": "max", "mean": "mean", "lasttoken": "last"}
_SIZE_FIELDS = ("hidden_size", "n_embd", "n_embed", "d_model")
"""Fields of config.json with the number of features of hidden states, of which a config has one."""
_MAX_LABELS = 2**16
_RERANKER_TOKENS = ("no", "yes")
"""The answer tokens from whose logits Qwen3-Reranker's score is computed."""


class HeadLayer(NamedTuple):
    """A layer on the pooled vector."""

    name: str
    """Prefix of the names of its tensors."""
    activation: str = "identity"
    folder: str = ""
    """Folder of the checkpoint whose model.safetensors contains the layer; "" for the checkpoint's main weights."""
    norm_eps: float | None = None
    """Epsilon of a layer norm; None if the layer is linear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How a model pools prompts. Sizes are in elements, lengths in tokens."""

    task: Task
    """`embed` or `classify`."""
    body: str
    """Architecture that computes the hidden states."""
    is_encoder: bool
    """Whether attention is bidirectional, so that a prompt is computed in one step and not cached."""
    modes: tuple[Mode, ...]
    """How a prompt's hidden states are pooled; the vectors of several modes are concatenated."""
    head: tuple[HeadLayer, ...] = ()
    label_tokens: tuple[str | int | None, str | int] | None = None
    """For a language model that reranks: the answer tokens "no" and "yes", or their ids. The raw score is the logit of
    "yes" minus the logit of "no", or the logit of "yes" if there is no "no" token."""
    function: Function = "normalize"
    dimension: int
    """Number of elements of the vector."""
    matryoshka: tuple[int, ...] | None = None
    """Dimensions to which the vector may be truncated; empty if any is allowed, None if it may not be truncated."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's classes."""
    max_length: int | None = None
    """Longest prompt for which the model was trained; None if only its positions limit it."""
    lower_case: bool = False
    """Whether texts are lower-cased before they are tokenised."""
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Prompts (prefixes of texts) by name."""
    default_prompt: str | None = None
    """Name of the prompt for requests without a prompt name."""

    @property
    def reads_all_positions(self) -> bool:
        """Whether the vector depends on hidden states of other tokens than the last one."""
        return self.modes != ("last",)

    @property
    def scores_pairs(self) -> bool:
        """Whether the vector is one number: the relevance of one text to another."""
        return self.task == "classify" and self.dimension == 1

    def allows(self, dimensions: int) -> bool:
        """Whether the vector may be truncated to so many elements."""
        if dimensions == self.dimension:
            return True
        if self.matryoshka is None or not 0 < dimensions < self.dimension:
            return False
        return not self.matryoshka or dimensions in self.matryoshka


def read_pooling(
    path: Path,
    tasks: Collection[str] = (),
    *,
    matryoshka: str = "auto",
) -> PoolingConfig | None:
    """Read how the checkpoint directory `path` pools prompts for `tasks`; None if it only generates.

    Without `tasks` the checkpoint decides. `matryoshka`: whether vectors may be truncated (`on` or `off`); `auto`: by
    the checkpoint. Raises `CheckpointError` naming file, field and value.
    """
    config = read_config(path)
    architectures = config.strings("architectures")
    name = architectures[0] if architectures else ""
    modules = _read_modules(path)
    wanted = [task for task in tasks if task != "generate"]
    if len(wanted) > 1:
        raise CheckpointError(f"task is {','.join(tasks)}, but a model either embeds or classifies; name one of them")
    if wanted:
        task: Task = "embed" if wanted[0] == "embed" else "classify"
    elif tasks:
        return None
    elif (
        name.endswith("ForSequenceClassification")
        or config.has("classifier_from_token")
        or any(kind == "LogitScore" for kind, _ in modules)
    ):
        task = "classify"
    elif modules or (_encoder(name) is not None and not name.endswith("ForCausalLM")):
        task = "embed"
    else:
        return None
    body, is_encoder = _body(config, name)
    if is_encoder and "generate" in tasks:
        raise CheckpointError(
            f"task is {','.join(tasks)}, but tokens of {name} of {path} see those after them, so it generates nothing"
        )
    if task == "classify":
        if any(kind == "LogitScore" for kind, _ in modules):
            return _cross_encoder(path, modules, config, body)
        return _classifier(config, name, body, is_encoder)
    return _embedder(path, config, modules, body, is_encoder, matryoshka)


def _encoder(name: str) -> str | None:
    """Return the encoder that computes an architecture of this name, or None if it is no encoder."""
    bodies = (f"{name.removesuffix(kind)}Model" for kind in _KINDS if name.endswith(kind))
    return next((body for body in bodies if body in ENCODERS), None)


def _body(config: Fields, name: str) -> tuple[str, bool]:
    """Return the architecture of the body, and whether its attention is bidirectional."""
    encoder = _encoder(name)
    if encoder is not None and not name.endswith("ForCausalLM"):
        return encoder, True
    for kind in _KINDS:
        stem = name.removesuffix(kind)
        bodies = (f"{stem}ForCausalLM", f"{stem.removesuffix('Text')}ForCausalLM")
        body = next((each for each in bodies if each in ARCHITECTURES), None)
        if name.endswith(kind) and body is not None:
            return body, config.boolean("use_bidirectional_attention", False) or not is_causal(config)
    if name.endswith("ForCausalLM") and encoder is None:
        # The general route runs the body if transformers implements it.
        if config.boolean("use_bidirectional_attention", False) or not is_causal(config):
            raise CheckpointError(
                f"{config.where} asks for attention in both directions, which {name} does not have in this release"
            )
        return name, False
    raise CheckpointError(
        f"architectures of {config.where} is {name or 'missing'}, whose prompts this release cannot pool; it pools "
        f"those of {', '.join(ENCODERS)} and of language models (ForCausalLM)"
    )


# -- classifiers and rerankers ----------------------------------------------------------------------------------


def _classifier(config: Fields, name: str, body: str, is_encoder: bool) -> PoolingConfig:
    if not name.endswith("ForSequenceClassification"):
        if is_encoder:
            raise CheckpointError(
                f"task is classify, but {name} of {config.where} has no classes; use a checkpoint whose architecture "
                "ends in ForSequenceClassification"
            )
        no_and_yes = config.strings("classifier_from_token") or _RERANKER_TOKENS
        if len(no_and_yes) != 2:
            raise config.invalid("classifier_from_token", "a list of two tokens, those of the answers no and yes")
        return PoolingConfig(
            task="classify",
            body=body,
            is_encoder=False,
            modes=("last",),
            label_tokens=(no_and_yes[0], no_and_yes[1]),
            function="sigmoid",
            dimension=1,
            labels=_labels(config, 1),
        )
    num_labels = _num_labels(config)
    modes: tuple[Mode, ...] = ("cls",)
    head: tuple[HeadLayer, ...]
    if body == "BertModel":
        head = (HeadLayer("pooler.dense", "tanh"), HeadLayer("classifier"))
    elif body == "ModernBertModel":
        if config.string("classifier_pooling", "cls") == "mean":
            modes = ("mean",)
        activation = _activation(config, "classifier_activation", "gelu")
        norm = HeadLayer("head.norm", norm_eps=config.number("norm_eps", 1e-5))
        head = (HeadLayer("head.dense", activation), norm, HeadLayer("classifier"))
    elif body in ENCODERS:
        head = (HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj"))
    else:
        modes, head = ("last",), (HeadLayer("score"),)
    return PoolingConfig(
        task="classify",
        body=body,
        is_encoder=is_encoder,
        modes=modes,
        head=head,
        function=_last_function(config, num_labels),
        dimension=num_labels,
        labels=_labels(config, num_labels),
    )


def _cross_encoder(path: Path, modules: Sequence[tuple[str, str]], config: Fields, body: str) -> PoolingConfig:
    """Read a language model that reranks, with sentence-transformers' module LogitScore."""
    folder = next(folder for kind, folder in modules if kind == "LogitScore")
    score = Fields.from_file(path / folder / "config.json")
    no = score.integer("false_token_id", minimum=0) if score.has("false_token_id") else None
    settings = _optional(path / "config_sentence_transformers.json")
    return PoolingConfig(
        task="classify",
        body=body,
        is_encoder=False,
        modes=("last",),
        label_tokens=(no, score.integer("true_token_id", minimum=0)),
        function=_function_named(settings.string("activation_fn", ""), settings.where),
        dimension=1,
        labels=_labels(config, 1),
    )


def _num_labels(config: Fields) -> int:
    names = config.section("id2label")
    default = 2 if names is None else len(names.values)
    return config.integer("num_labels", default, maximum=_MAX_LABELS)


def _labels(config: Fields, count: int) -> tuple[str, ...]:
    names = config.section("id2label")
    given = {} if names is None else names.values
    return tuple(str(given.get(str(index), f"LABEL_{index}")) for index in range(count))


def _last_function(config: Fields, num_labels: int) -> Function:
    """Return the function from logits to scores; for one class, that of sentence-transformers' CrossEncoder."""
    kind = config.string("problem_type", "")
    if kind == "regression":
        return "none"
    if num_labels > 1:
        return "sigmoid" if kind == "multi_label_classification" else "softmax"
    own = config.section("sentence_transformers")
    named = "" if own is None else own.string("activation_fn", "")
    return _function_named(named or config.string("sbert_ce_default_activation_function", ""), config.where)


def _function_named(name: str, where: str) -> Function:
    """Return the function of torch's class with this name; the default is a sigmoid."""
    known: dict[str, Function] = {"": "sigmoid", "Sigmoid": "sigmoid", "Identity": "none"}
    last = name.rpartition(".")[2]
    if last not in known:
        raise CheckpointError(
            f"{where} names {name} as the function of its score; this release has Sigmoid and Identity"
        )
    return known[last]


# -- embedding models -------------------------------------------------------------------------------------------


def _embedder(
    path: Path,
    config: Fields,
    modules: Sequence[tuple[str, str]],
    body: str,
    is_encoder: bool,
    matryoshka: str,
) -> PoolingConfig:
    modes: tuple[Mode, ...] = ("mean",) if is_encoder else ("last",)
    dimension = config.integer(next(filter(config.has, _SIZE_FIELDS), _SIZE_FIELDS[0]))
    function: Function = "none" if modules else "normalize"
    head: list[HeadLayer] = []
    for kind, folder in modules:
        if kind == "Pooling":
            modes = _modes(Fields.from_file(path / folder / "config.json"))
            dimension *= len(modes)
        elif kind == "Dense":
            dense = Fields.from_file(path / folder / "config.json")
            if dense.boolean("use_residual", False):
                raise dense.invalid("use_residual", "false, or left out")
            if dense.string("module_input_name", "sentence_embedding") != "sentence_embedding":
                raise dense.invalid("module_input_name", '"sentence_embedding"')
            head.append(HeadLayer("linear", _activation(dense, "activation_function", "tanh"), folder))
            dimension = dense.integer("out_features")
        elif kind == "Normalize":
            function = "normalize"
        elif kind != "Transformer":
            raise CheckpointError(
                f"{path / 'modules.json'} has a module {kind}, which this release does not have; it has Transformer, "
                "Pooling, Dense and Normalize"
            )
    transformer = _optional(path / "sentence_bert_config.json")
    prompts, default_prompt = _prompts(_optional(path / "config_sentence_transformers.json"))
    return PoolingConfig(
        task="embed",
        body=body,
        is_encoder=is_encoder,
        modes=modes,
        head=tuple(head),
        function=function,
        dimension=dimension,
        matryoshka=_matryoshka(config, body, modes, function, bool(modules), matryoshka),
        max_length=transformer.integer("max_seq_length") if transformer.has("max_seq_length") else None,
        lower_case=transformer.boolean("do_lower_case", False),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """Read kind and folder of each module in modules.json; empty if there is no such file."""
    file = path / "modules.json"
    if not file.is_file():
        return []
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        modules = [(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in listed]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a list of modules ({error}); download the checkpoint again") from error
    for kind, folder in modules:
        if folder and Path(folder).name != folder:
            raise CheckpointError(f"{file} has {kind} in {folder[:80]!r}; it must be a folder of the checkpoint")
        if kind == "Transformer" and folder:
            raise CheckpointError(f"{file} has the model in {folder[:80]!r}; only one at the top can be served")
    return modules


def _modes(pooling: Fields) -> tuple[Mode, ...]:
    if not pooling.boolean("include_prompt", True):
        raise pooling.invalid("include_prompt", "true: the tokens of a prompt cannot be left out of the pooling")
    if pooling.has("pooling_mode"):
        given: Any = pooling.values["pooling_mode"]
        names = given if isinstance(given, list) else str(given).split("+")
        if not names or any(name not in _MODE_NAMES for name in names):
            raise pooling.invalid("pooling_mode", "cls, max, mean or lasttoken")
        return tuple(_MODE_NAMES[name] for name in names)
    modes: list[Mode] = []
    for name, mode in _MODE_FIELDS:
        if pooling.boolean(name, False):
            if mode is None:
                raise pooling.invalid(name, "false: this release pools by cls, max, mean and last token")
            modes.append(mode)
    if not modes:
        raise CheckpointError(f"{pooling.where} sets no mode of pooling; download the checkpoint again")
    return tuple(modes)


def _activation(fields: Fields, name: str, default: str) -> str:
    given = fields.string(name, default).rpartition(".")[2].lower()
    if given not in ACTIVATIONS:
        raise fields.invalid(name, f"one of {', '.join(ACTIVATIONS)}")
    return given


def _matryoshka(
    config: Fields,
    body: str,
    modes: tuple[Mode, ...],
    function: Function,
    has_modules: bool,
    wanted: str,
) -> tuple[int, ...] | None:
    """See `PoolingConfig.matryoshka`."""
    sizes = config.integers("matryoshka_dimensions", minimum=1)
    if wanted != "auto":
        return sizes if wanted == "on" else None
    if sizes or config.boolean("is_matryoshka", False):
        return sizes
    # Qwen3-Embedding and EmbeddingGemma were trained for truncation, which their files do not declare. They are
    # recognised by their pooling mode, which no other model of their families has.
    known = {"Qwen3ForCausalLM": ("last",), "Gemma3ForCausalLM": ("mean",)}
    return () if has_modules and function == "normalize" and known.get(body) == modes else None


def _prompts(settings: Fields) -> tuple[Mapping[str, str], str | None]:
    section = settings.section("prompts")
    prompts = {} if section is None else section.values
    if not all(isinstance(text, str) for text in prompts.values()):
        raise settings.invalid("prompts", "an object of texts")
    default = settings.string("default_prompt_name", "")
    if default and default not in prompts:
        raise settings.invalid("default_prompt_name", f"one of {', '.join(prompts)}")
    return MappingProxyType(dict(prompts)), default or None


def _optional(path: Path) -> Fields:
    """Read a JSON object; empty if there is no such file."""
    return Fields.from_file(path) if path.is_file() else Fields({}, str(path))
