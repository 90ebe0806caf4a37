"""`RopeConfig`: a checkpoint's rotary embedding with all defaults resolved. Imports no torch.

Field names, defaults and precedence follow transformers' `modeling_rope_utils`, under the names of its
version 4 (`rope_theta`, `rope_scaling`) and its version 5 (`rope_parameters`).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from models.config.fields import Fields
from models.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_OLD_NAMES = {"su": "longrope", "mrope": "default"}
"""Qwen-VL's positions of text are the same in all three parts of a head, as with the default."""
_DEFAULT_THETA = 10000.0
_NOT_SCALING = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
"""The fields of a rope's parameters that do not belong to its type."""
_LENGTH_BITS = 32
_Positions = TypeVar("_Positions", bound=Any)
"""A tensor or an array."""


class RopeContext(NamedTuple):
    """How a sequence's rotary frequencies depend on its length, where the served context exceeds the original one."""

    original: int
    """Tokens of the original context. Shorter sequences have the same frequencies."""
    grows: bool
    """`dynamic`: a token's frequencies are those of `max(prompt, position + 1)` tokens. Otherwise (`longrope`) a
    sequence that exceeds the original context has other frequencies from its first token on."""

    def length_of(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """The length that a sequence's positions carry, which chooses its frequencies; 0: the original context's.

        Sequences of equal lengths can share keys. `num_tokens` includes generated ones.
        """
        if self.grows:
            return num_prompt_tokens if num_prompt_tokens > self.original else 0
        return self.original + 1 if num_tokens > self.original else 0


def with_lengths(positions: _Positions, lengths: _Positions) -> _Positions:
    """Positions that carry `RopeContext.length_of` in their upper 32 bits. # 2 x [tokens] int64 -> [tokens]"""
    carried: _Positions = positions + (lengths << _LENGTH_BITS)
    return carried


def without_lengths(positions: _Positions) -> _Positions:
    """The positions of `with_lengths`. # [tokens] int64 -> [tokens]"""
    plain: _Positions = positions & ((1 << _LENGTH_BITS) - 1)
    return plain


def lengths_of(positions: _Positions) -> _Positions:
    """The lengths of `with_lengths`. # [tokens] int64 -> [tokens]"""
    lengths: _Positions = positions >> _LENGTH_BITS
    return lengths


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model. Fields that a type does not use keep their defaults."""

    rope_type: str
    theta: float
    rotary_dim: int
    """The number of leading dimensions of a head that are rotated."""
    original_max_len: int
    """Context length before scaling."""
    factor: float = 1.0
    attention_factor: float = 1.0
    """Factor of cosines and sines, which sharpens attention over a stretched context."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    turning_pairs: int | None = None
    """The number of pairs of `rotary_dim` that turn, the first; None: all."""

    @property
    def scaled_max_len(self) -> int:
        """The longest context that the scaling is meant for; only `dynamic` and `yarn` extend the configured one."""
        scaled = self.rope_type in ("dynamic", "yarn")
        return int(self.original_max_len * self.factor) if scaled else self.original_max_len

    def context(self, served: int) -> RopeContext | None:
        """How frequencies depend on a sequence's length; None: they do not, for sequences of up to `served` tokens."""
        if self.rope_type not in ("dynamic", "longrope") or served <= self.original_max_len:
            return None
        return RopeContext(self.original_max_len, self.rope_type == "dynamic")


def parse_rope(
    config: Fields,
    *,
    head_dim: int,
    max_position_embeddings: int,
    parameters: Fields | None = None,
    has_ntk_alpha: bool = False,
) -> RopeConfig:
    """The rotary embedding of config.json. Raises `CheckpointError` naming the field.

    `parameters` replaces config.json's own rope parameters, for layers that differ from the rest. `has_ntk_alpha`:
    whether `alpha` of a `dynamic` rope stretches its base, whatever the length (HunYuan).
    """
    fields = _rope_fields(config) if parameters is None else parameters
    rope_type = _rope_type(fields)
    # MiniMax-M2 names the dimensions, others their share.
    named = config.integer("rotary_dim", head_dim) / head_dim
    share = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", named))
    # A proportional rope has frequencies as if all were rotated, and leaves the rest of them 0.
    turning_pairs = int(share * head_dim // 2) if rope_type == "proportional" else None
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * share)
    # The exponent of dynamic scaling divides by rotary_dim - 2.
    minimum = 4 if rope_type == "dynamic" else 2
    if rotary_dim < minimum or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"{config.where} rotates {rotary_dim} dimensions of a head (head_dim {head_dim}, partial_rotary_factor "
            f"{share:g}); it must be an even number from {minimum} to {head_dim}"
        )
    theta = fields.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    if theta <= 1:
        raise (fields if fields.has("rope_theta") else config).invalid("rope_theta", "a number above 1")
    original = max_position_embeddings
    if rope_type == "dynamic" and has_ntk_alpha and fields.values.get("alpha"):
        stretched_theta = theta * fields.number("alpha") ** (head_dim / (head_dim - 2))
        return RopeConfig("default", stretched_theta, rotary_dim, original)
    if rope_type in ("yarn", "longrope", "llama3"):
        field = "original_max_position_embeddings"
        original = config.integer(field, fields.integer(field, max_position_embeddings))
    implied_factor = max_position_embeddings / original
    if rope_type == "default":
        return RopeConfig(rope_type, theta, rotary_dim, original)
    if rope_type == "proportional":
        factor = fields.number("factor", 1.0)
        return RopeConfig(rope_type, theta, rotary_dim, original, factor, turning_pairs=turning_pairs)
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(rope_type, theta, rotary_dim, original, fields.number("factor"))
    if rope_type == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high < low:
            raise fields.invalid("high_freq_factor", f"at least low_freq_factor, {low:g}")
        return RopeConfig(
            rope_type,
            theta,
            rotary_dim,
            original,
            fields.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = fields.number("factor", implied_factor)
    if rope_type == "yarn":
        return RopeConfig(
            rope_type,
            theta,
            rotary_dim,
            original,
            factor,
            attention_factor=fields.number("attention_factor", _yarn_attention_factor(fields, factor)),
            beta_fast=fields.number("beta_fast", 32.0),
            beta_slow=fields.number("beta_slow", 1.0),
            truncate=fields.boolean("truncate", True),
        )
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeConfig(
        rope_type,
        theta,
        rotary_dim,
        original,
        factor,
        attention_factor=fields.number("attention_factor", stretched),
        short_factor=fields.numbers("short_factor", rotary_dim // 2),
        long_factor=fields.numbers("long_factor", rotary_dim // 2),
    )


def with_one_rope(config: Fields) -> Fields:
    """`config` with `rope_scaling` in `rope_parameters`, where it has both; it replaces the scaling that they have.

    Instructions for long contexts name the older field, and transformers 5 saves the newer one. Raises
    `CheckpointError` where each kind of layer has a rope, since `rope_scaling` does not say which of them it scales.
    """
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if not parameters or not parameters.values or not scaling or not scaling.values:
        return config
    if scaling.values == parameters.values:
        return config
    if any(isinstance(value, dict) for value in parameters.values.values()):
        raise config.invalid("rope_scaling", "left out, since rope_parameters has an entry for each kind of layer")
    kept = {name: value for name, value in parameters.values.items() if name in _NOT_SCALING}
    return Fields({**config.values, "rope_parameters": {**kept, **scaling.values}}, config.where)


def rotated_whole(config: Fields) -> Fields:
    """config.json of an architecture of which a rope without a type rotates whole heads, whatever
    `partial_rotary_factor` says: transformers reads that field for some architectures and ignores it for the others.
    """
    values = dict(config.values)
    by_kind = values.get("rope_parameters")
    if isinstance(by_kind, dict) and any(isinstance(each, dict) for each in by_kind.values()):
        # The field belongs to each kind of layer whose rope has none.
        share = {"partial_rotary_factor": values.pop("partial_rotary_factor", None)}
        values["rope_parameters"] = {
            kind: {**share, **each} if isinstance(each, dict) else each for kind, each in by_kind.items()
        }
    elif _rope_type(_rope_fields(config)) == "default":
        values.pop("partial_rotary_factor", None)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            values[name] = _without_share(values[name])
    return Fields(values, config.where)


def _without_share(parameters: dict[str, Any]) -> dict[str, Any]:
    """A rope's parameters, or those of each kind of layer, where the default type has no share of a head."""
    if parameters.get("rope_type", parameters.get("type", "default")) == "default":
        parameters = {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}
    return {name: _without_share(value) if isinstance(value, dict) else value for name, value in parameters.items()}


def _rope_fields(config: Fields) -> Fields:
    """The object that holds the rope parameters, under its newer or older name; empty where there is none."""
    fields = config.section("rope_parameters") or config.section("rope_scaling")
    if fields is None:
        return Fields({}, config.where)
    # One entry per kind of layer: a model whose kinds differ reads the other entries itself.
    return fields.section("full_attention") or fields


def _rope_type(fields: Fields) -> str:
    name = "rope_type" if fields.has("rope_type") else "type"
    found = fields.string(name, "default")
    rope_type = _OLD_NAMES.get(found, found)
    if rope_type not in ROPE_TYPES:
        raise fields.invalid(name, f"one of {', '.join(ROPE_TYPES)}")
    return rope_type


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """YaRN (Peng et al., 2023), section 3.4, with DeepSeek's two scales where the config gives both."""

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    names = ("mscale", "mscale_all_dim")
    if not all(fields.values.get(name) for name in names):
        return mscale(1.0)
    scale, scale_all_dim = (mscale(fields.number(name)) for name in names)
    return scale / scale_all_dim
