"""Registries of the implemented architectures, encoders and drafters. Imports no torch.

A model's file registers its class under its Hugging Face name with the decorator `architecture`, together with the
`ConfigFacts` that are needed to read its config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from models.config.fields import body_name, with_parts
from models.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from models.config.fields import Fields

INDEXED_LAYERS = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Names in `layer_types` of layers in which an indexer selects the tokens to attend to; the second is that of
transformers 5.17."""

ALWAYS_WINDOWED: Mapping[str, Any] = MappingProxyType({"layer_types": None, "use_sliding_window": None})
"""`ConfigFacts.fixed` of architectures with a window in every layer if `sliding_window` is set."""

LATENT_HEAD = "qk_rope_head_dim"
"""The field with the rotated dimensions of latent attention's heads."""

Model = TypeVar("Model", bound="type[nn.Module]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """Properties of an architecture that its config.json does not contain."""

    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Defaults of fields that are missing or null."""
    absent: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Defaults of fields that are missing; null has a meaning of its own."""
    complete: "Callable[[Fields], Fields] | None" = None
    """Adds fields that follow from others."""
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Values that transformers' code always has, whatever config.json contains; None: it does not read the field,
    even if `renamed` gives its name to another."""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The architecture's names of fields -> the common names."""
    head_dim_field: str = "head_dim"
    """The field with the number of a head's dimensions that may be rotated; "" if it is always `hidden_size` divided
    by the number of heads."""
    rotates_parts: bool = False
    """Whether `partial_rotary_factor` applies to a rope of the default type."""
    has_rotary_dim: bool = False
    """Whether `rotary_dim` is the number of a head's rotated dimensions; otherwise the field is ignored."""
    has_ntk_alpha: bool = False
    """Whether `alpha` of a `dynamic` rope scales its base, independently of the length."""
    eps_field: str = "rms_norm_eps"
    """The field with the epsilon of the norms."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The field with the activation of feed-forward layers, and the default; "" if it is always that."""
    has_mlp_bias: bool = False
    """Whether the field `mlp_bias` is read."""
    bias_field: str = "attention_bias"
    """The flag for biases of attention."""
    biases_field: str | None = None
    """A single flag for biases of attention and feed-forward layers; None if `bias_field` and `mlp_bias` are read."""
    is_windowed: bool = False
    """Whether `sliding_window` without further fields means a window in every layer."""
    layer_kinds: frozenset[str] = frozenset()
    """Names in `layer_types` other than those of full and sliding-window attention."""
    full_attention_every: int | None = None
    """Default without `layer_types`: one layer of this many has full attention, the others a window."""
    windows: tuple[str, str] = ("sliding_attention", "sliding_window")
    """The name of windowed layers in `layer_types`, and the field with the window's number of tokens."""
    windowed_layers: Callable[["Fields", int], Sequence[bool]] | None = None
    """Default without `layer_types`: whether each layer has a window, given config.json and the number of layers."""
    last_layer_is_full: bool = False
    """Whether the last layer always has full attention."""
    unread: Callable[["Fields"], tuple[str, ...]] = lambda _fields: ()
    """Returns prefixes of tensors that checkpoints of a configuration may contain, but the model does not use."""
    body_prefix: str | None = None
    """Prefix of the body's tensors in published checkpoints; None if it is `model.`."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Parts of tensor names in checkpoints -> the model's."""

    @property
    def rename(self) -> Callable[[str], str] | None:
        """Return the function from a checkpoint's name of a tensor or module to the model's; None if they are
        equal."""
        if self.body_prefix is None and not self.names:
            return None

        def renamed(name: str) -> str:
            own = name if self.body_prefix is None else body_name(self.body_prefix, name)
            return with_parts(self.names, own)

        return renamed


class Architecture(NamedTuple):
    """A model class, and the facts needed to read its checkpoints' config.json."""

    model_class: "type[nn.Module]"
    """Called with `ModelConfig` and `TensorParallel`."""
    facts: ConfigFacts


ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    {
        "GptOssForCausalLM": "models.architectures.gpt_oss",
        "DeepseekV2ForCausalLM": "models.architectures.deepseek_v2",
        "DeepseekV32ForCausalLM": "models.architectures.deepseek_v2",
        "DeepseekV3ForCausalLM": "models.architectures.deepseek_v2",
        "DeepseekV4ForCausalLM": "models.architectures.deepseek_v4",
        "Gemma3ForCausalLM": "models.architectures.gemma3",
        "Gemma3nForCausalLM": "models.architectures.gemma3n",
        "Gemma4ForCausalLM": "models.architectures.gemma4",
        "Phi3ForCausalLM": "models.architectures.phi3",
        "PhimoeForCausalLM": "models.architectures.phimoe",
        "LlamaForCausalLM": "models.architectures.llama",
        "MistralForCausalLM": "models.architectures.llama",
        "Qwen2ForCausalLM": "models.architectures.qwen2",
        "Qwen3ForCausalLM": "models.architectures.qwen3",
        "Qwen3MoeForCausalLM": "models.architectures.qwen3_moe",
        "Qwen3NextForCausalLM": "models.architectures.qwen3_next",
        "Qwen3_5ForCausalLM": "models.architectures.qwen3_5",
        "Qwen3_5MoeForCausalLM": "models.architectures.qwen3_5",
        "MixtralForCausalLM": "models.architectures.mixtral",
        "Glm4MoeForCausalLM": "models.architectures.glm4_moe",
        "GlmMoeDsaForCausalLM": "models.architectures.deepseek_v2",
        "MiniMaxM2ForCausalLM": "models.architectures.minimax_m2",
        "MiniMaxM3VLForCausalLM": "models.architectures.minimax_m3",
        "Ministral3ForCausalLM": "models.architectures.ministral3",
        "Olmo2ForCausalLM": "models.architectures.olmo",
        "Olmo3ForCausalLM": "models.architectures.olmo",
        "Ernie4_5ForCausalLM": "models.architectures.ernie4_5",
        "Ernie4_5_MoeForCausalLM": "models.architectures.ernie4_5",
        "SeedOssForCausalLM": "models.architectures.seed_oss",
        "SmolLM3ForCausalLM": "models.architectures.smollm3",
        "CohereForCausalLM": "models.architectures.cohere",
        "Cohere2ForCausalLM": "models.architectures.cohere",
        "GraniteForCausalLM": "models.architectures.granite",
        "GraniteMoeForCausalLM": "models.architectures.granite",
        "GlmForCausalLM": "models.architectures.glm",
        "Glm4ForCausalLM": "models.architectures.glm",
        "Exaone4ForCausalLM": "models.architectures.exaone4",
        "ArceeForCausalLM": "models.architectures.plain_mlp",
        "NemotronForCausalLM": "models.architectures.plain_mlp",
        "Starcoder2ForCausalLM": "models.architectures.plain_mlp",
        "StableLmForCausalLM": "models.architectures.stablelm",
        "HunYuanDenseV1ForCausalLM": "models.architectures.hunyuan",
        "HunYuanMoEV1ForCausalLM": "models.architectures.hunyuan",
        "Qwen2MoeForCausalLM": "models.architectures.qwen2_moe",
        "Llama4ForCausalLM": "models.architectures.llama4",
        "GemmaForCausalLM": "models.architectures.gemma",
        "Gemma2ForCausalLM": "models.architectures.gemma",
        "Dots1ForCausalLM": "models.architectures.dots1",
        "OlmoeForCausalLM": "models.architectures.olmoe",
        "BambaForCausalLM": "models.architectures.bamba",
        "FalconH1ForCausalLM": "models.architectures.falcon_h1",
        "GraniteMoeHybridForCausalLM": "models.architectures.granite_hybrid",
        "Lfm2ForCausalLM": "models.architectures.lfm2",
        "Lfm2MoeForCausalLM": "models.architectures.lfm2",
        "Lfm3ForCausalLM": "models.architectures.lfm2",
        "NemotronHForCausalLM": "models.architectures.nemotron_h",
        "MambaForCausalLM": "models.architectures.mamba",
        "Mamba2ForCausalLM": "models.architectures.mamba",
        "FalconMambaForCausalLM": "models.architectures.mamba",
        "JambaForCausalLM": "models.architectures.jamba",
        "KimiLinearForCausalLM": "models.architectures.kimi_linear",
        "OlmoHybridForCausalLM": "models.architectures.olmo_hybrid",
        "Glm4MoeLiteForCausalLM": "models.architectures.deepseek_v2",
        "Mistral4ForCausalLM": "models.architectures.deepseek_v2",
        "MiniMaxForCausalLM": "models.architectures.minimax",
        "Zamba2ForCausalLM": "models.architectures.zamba2",
        "MiMoV2FlashForCausalLM": "models.architectures.mimo_v2",
        "MinistralForCausalLM": "models.architectures.llama",
        "CwmForCausalLM": "models.architectures.cwm",
        "SolarOpenForCausalLM": "models.architectures.glm4_moe",
        "ExaoneMoeForCausalLM": "models.architectures.exaone4",
        "HYV3ForCausalLM": "models.architectures.hunyuan",
        "Gemma4UnifiedForCausalLM": "models.architectures.gemma4",
        "BailingHybridForCausalLM": "models.architectures.bailing",
        "BloomForCausalLM": "models.architectures.alibi",
        "MptForCausalLM": "models.architectures.alibi",
        "FalconForCausalLM": "models.architectures.falcon",
        "GPTJForCausalLM": "models.architectures.gptj",
        "Glm5NextForCausalLM": "models.architectures.glm5_next",
        "HyperCLOVAXForCausalLM": "models.architectures.hyperclovax",
    },
)


_LANGUAGE_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "cohere2": "Cohere2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "granite": "GraniteForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2_moe": "Lfm2MoeForCausalLM",
        "lfm3": "Lfm3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    }
)
"""By `model_type`: language models that are text parts of multimodal architectures."""
_BUILT_ON: Mapping[str, str] = MappingProxyType(
    {
        "AudioFlamingo3ForConditionalGeneration": "qwen2",
        "AyaVisionForConditionalGeneration": "cohere2",
        "Cohere2VisionForConditionalGeneration": "cohere2",
        "DeepseekVLForConditionalGeneration": "llama",
        "DeepseekVLHybridForConditionalGeneration": "llama",
        "Exaone4_5_ForConditionalGeneration": "exaone4",
        "FastVlmForConditionalGeneration": "qwen2",
        "FunAsrNanoForConditionalGeneration": "qwen3",
        "GlmAsrForConditionalGeneration": "llama",
        "GotOcr2ForConditionalGeneration": "qwen2",
        "GraniteSpeechForConditionalGeneration": "granite",
        "GraniteSpeechPlusForConditionalGeneration": "granite",
        "Idefics2ForConditionalGeneration": "mistral",
        "Idefics3ForConditionalGeneration": "llama",
        "InternVLForConditionalGeneration": "qwen2",
        "JanusForConditionalGeneration": "llama",
        "Lfm2VlForConditionalGeneration": "lfm2",
        "Lfm3VlForConditionalGeneration": "lfm3",
        "LightOnOcrForConditionalGeneration": "qwen3",
        "LlavaForConditionalGeneration": "llama",
        "LlavaNextForConditionalGeneration": "llama",
        "LlavaNextVideoForConditionalGeneration": "llama",
        "LlavaOnevisionForConditionalGeneration": "qwen2",
        "MiniCPMOcrForConditionalGeneration": "qwen3_5_text",
        "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
        "MiniCPMV4_7ForConditionalGeneration": "qwen3_5_text",
        "MossTranscribeDiarizeForConditionalGeneration": "qwen3",
        "MusicFlamingoForConditionalGeneration": "qwen2",
        "NemotronH_Omni_Reasoning_V3": "nemotron_h",
        "Ovis2ForConditionalGeneration": "qwen2",
        "PerceptionLMForConditionalGeneration": "llama",
        "QianfanOCRForConditionalGeneration": "qwen3",
        "Qwen2AudioForConditionalGeneration": "qwen2",
        "Qwen3ASRForConditionalGeneration": "qwen3",
        "SmolVLMForConditionalGeneration": "llama",
        "VibeVoiceAsrForConditionalGeneration": "qwen2",
        "VideoLlama3ForConditionalGeneration": "qwen2",
        "VideoLlavaForConditionalGeneration": "llama",
        "VipLlavaForConditionalGeneration": "llama",
        "VoxtralForConditionalGeneration": "llama",
    }
)
"""Multimodal architectures with any of these text parts: the default `model_type` of `text_config`."""

_GLM_V: Mapping[str, str] = MappingProxyType({"glm4v_text": "Glm4ForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM"})

TEXT_PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Cosmos3EdgeForConditionalGeneration": {"cosmos3_edge_text": "ArceeForCausalLM"},
        "Cosmos3OmniForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
        "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
        "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
        "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
        "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
        "Glm46VForConditionalGeneration": _GLM_V,
        "Glm4vForConditionalGeneration": {"glm4v_text": "Glm4ForCausalLM"},
        "Glm4vMoeForConditionalGeneration": {"glm4v_moe_text": "Glm4MoeForCausalLM"},
        "Glm5NextForConditionalGeneration": {"glm5_next_text": "Glm5NextForCausalLM"},
        "GlmOcrForConditionalGeneration": {"glm_ocr_text": "Glm4ForCausalLM"},
        "Granite4VisionForConditionalGeneration": {"granite4_vision_text": "GraniteForCausalLM"},
        "GraniteDoclingForConditionalGeneration": {"granite_docling_text": "GraniteForCausalLM"},
        "HCXVisionV2ForCausalLM": {"hyperclovax": "HyperCLOVAXForCausalLM"},
        "HyperCLOVAXVisionV2ForConditionalGeneration": {"hyperclovax": "HyperCLOVAXForCausalLM"},
        "KimiK25ForConditionalGeneration": {
            "kimi_k2": "DeepseekV3ForCausalLM",
            "deepseek_v3": "DeepseekV3ForCausalLM",
        },
        "Kimi_K25ForConditionalGeneration": {
            "deepseek_v3": "DeepseekV3ForCausalLM",
            "kimi_k2": "DeepseekV3ForCausalLM",
        },
        "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
        "MiniMaxM3SparseForConditionalGeneration": {"minimax_m3_vl_text": "MiniMaxM3VLForCausalLM"},
        "Mistral3ForConditionalGeneration": {
            "ministral3": "Ministral3ForCausalLM",
            "mistral": "MistralForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        "PaddleOCRVLForConditionalGeneration": {"paddleocr_vl_text": "LlamaForCausalLM"},
        "Qwen2_5OmniForConditionalGeneration": {"qwen2_5_omni_text": "Qwen2ForCausalLM"},
        "Qwen2_5OmniThinkerForConditionalGeneration": {"qwen2_5_omni_text": "Qwen2ForCausalLM"},
        "Qwen3OmniMoeForConditionalGeneration": {"qwen3_omni_moe_text": "Qwen3MoeForCausalLM"},
        "Qwen3OmniMoeThinkerForConditionalGeneration": {"qwen3_omni_moe_text": "Qwen3MoeForCausalLM"},
        "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2ForCausalLM"},
        "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
        "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
        "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        **{whole: {kind: _LANGUAGE_MODELS[kind], **_LANGUAGE_MODELS} for whole, kind in _BUILT_ON.items()},
    }
)
"""For each multimodal architecture: the text part's architecture by `model_type` of `text_config`."""

ENCODERS: "Registry[type[nn.Module]]" = Registry(
    "encoder",
    {
        "BertModel": "models.architectures.bert",
        "RobertaModel": "models.architectures.bert",
        "XLMRobertaModel": "models.architectures.bert",
        "ModernBertModel": "models.architectures.modernbert",
    },
)
"""Models with bidirectional attention; called with `EncoderConfig` and `TensorParallel`."""

DRAFTERS: "Registry[Callable[..., nn.Module]]" = Registry(
    "drafter",
    {
        "mtp": "models.loading.draft_heads",
        "eagle": "models.loading.draft_heads",
        "eagle3": "models.loading.draft_heads",
        "draft": "models.loading.drafters",
    },
)
"""By method of speculative decoding: the function that loads the drafter, a `DraftLM`; see
`models.loading.drafters`."""


def architecture(name: str, facts: ConfigFacts = ConfigFacts()) -> Callable[[Model], Model]:
    """Class decorator that registers a model class for an architecture; a class may be registered for several."""

    def register(model_class: Model) -> Model:
        ARCHITECTURES.register(name)(Architecture(model_class, facts))
        return model_class

    return register
