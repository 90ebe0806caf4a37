"""Parser of `gptq`: 4- or 8-bit groups, of neighbours or in activation order, as AutoGPTQ and GPTQModel write them."""

from models.config_fields import Fields
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig, Storage
from models.quantization.formats.common import group_size


def parse(section: Fields, method: str) -> QuantizationConfig:
    """`dynamic` (GPTQModel's) sets modules apart by regular expression: `-:` leaves them dense, else fields differ."""
    checkpoint_format = section.string("checkpoint_format", "gptq")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise section.invalid("checkpoint_format", '"gptq" or "gptq_v2"')
    if section.boolean("is_marlin_format", False):
        raise section.invalid("is_marlin_format", "false")
    # The first format stores each zero point less one.
    zero_offset = 1 if checkpoint_format == "gptq" else 0
    exclude = list(section.strings("modules_to_not_convert"))
    special: list[tuple[str, LayerQuantConfig | None]] = []
    dynamic = section.section("dynamic") or Fields({}, section.where)
    for pattern in dynamic.values:
        expression = f"re:{pattern.removeprefix('-:').removeprefix('+:')}"
        if pattern.startswith("-:"):
            exclude.append(expression)
        else:
            changed = dynamic.section(pattern) or dynamic
            special.append((expression, _layer(changed.with_defaults(section.values), zero_offset)))
    return QuantizationConfig(method, _layer(section, zero_offset), tuple(special), exclude_layers=tuple(exclude))


def _layer(section: Fields, zero_offset: int) -> LayerQuantConfig:
    bits = section.integer("bits")
    if bits not in (4, 8):
        raise section.invalid("bits", "4 or 8")
    return LayerQuantConfig(
        Storage.GPTQ,
        f"int{bits}",
        Granularity.GROUP,
        bits,
        group_size=group_size(section, "group_size"),
        # The zero points are there also where they are all the middle of the range.
        symmetric=False,
        has_group_index=section.boolean("desc_act", False),
        zero_offset=zero_offset,
    )
