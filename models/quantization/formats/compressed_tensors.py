"""Parser of `compressed-tensors` (llm-compressor): groups of targets, each with its number type and granularity."""

from models.config_fields import Fields
from models.quantization.config import Granularity, LayerQuantConfig, QuantizationConfig, Storage
from models.quantization.formats.common import group_size, pair, scheme_error
from models.quantization.formats.mxfp4 import GROUP_SIZE

_STORAGES = {
    "float-quantized": (Storage.SCALED, "float"),
    "int-quantized": (Storage.SCALED, "int"),
    "naive-quantized": (Storage.SCALED, None),
    "pack-quantized": (Storage.PACKED, "int"),
    "mxfp4-pack-quantized": (Storage.MXFP4, "float"),
}
"""By format; the number type that it must hold, None: either."""
_GRANULARITIES = {
    "tensor": Granularity.TENSOR,
    "channel": Granularity.CHANNEL,
    "block": Granularity.BLOCK,
    "group": Granularity.GROUP,
}
_EVERY_LINEAR = ("Linear", "FusedMoELinear")
"""Class names among the targets; whatever else begins with a capital is a class whose modules are not told apart."""


def parse(section: Fields, method: str) -> QuantizationConfig:
    """Targets are module names and regular expressions, or `Linear` for all that no other group names."""
    sparsity, transform = section.section("sparsity_config"), section.section("transform_config")
    if sparsity is not None and sparsity.string("format", "dense") != "dense":
        raise sparsity.invalid("format", '"dense"')
    if transform is not None and transform.values:
        raise section.invalid("transform_config", "left out: transformed weights do not run here")
    groups = section.section("config_groups")
    if not section.has("kv_cache_scheme") and (groups is None or not groups.values):
        raise section.invalid("config_groups", "an object of quantisation groups")
    everywhere: LayerQuantConfig | None = None
    special: list[tuple[str, LayerQuantConfig | None]] = []
    groups = groups or Fields({}, section.where)
    for name in groups.values:
        group = groups.section(name) or Fields({}, groups.where)
        weights = group.section("weights")
        if weights is None:
            continue
        layer = _layer(group.string("format", section.string("format", "unnamed")), group, weights)
        for target in group.strings("targets"):
            if target in _EVERY_LINEAR:
                everywhere = layer
            elif target[:1].isupper():
                raise group.invalid("targets", f"module names, regular expressions, or {_EVERY_LINEAR[0]}")
            else:
                special.append((target, layer))
    # A name goes before an expression.
    special.sort(key=lambda entry: entry[0].startswith("re:"))
    return QuantizationConfig(method, everywhere, tuple(special), exclude_layers=section.strings("ignore"))


def _layer(storage_format: str, group: Fields, weights: Fields) -> LayerQuantConfig:
    if storage_format not in _STORAGES:
        raise scheme_error(group, f"has the format {storage_format!r}; it must be one of {', '.join(_STORAGES)}")
    storage, wanted = _STORAGES[storage_format]
    kind, bits = weights.string("type", "int"), weights.integer("num_bits", 8)
    allowed = {Storage.SCALED: (8,), Storage.PACKED: (4, 8), Storage.MXFP4: (4,)}[storage]
    if kind not in ("int", "float") or (wanted is not None and kind != wanted):
        raise weights.invalid("type", f'"{wanted or "int"}" in the format {storage_format}')
    if bits not in allowed:
        raise weights.invalid("num_bits", f"{' or '.join(map(str, allowed))} in the format {storage_format}")
    grouped = {None: "tensor", -1: "channel"}.get(weights.values.get("group_size"), "group")
    strategy = weights.string("strategy", grouped)
    if strategy not in _GRANULARITIES:
        raise weights.invalid("strategy", f"one of {', '.join(_GRANULARITIES)}")
    granularity = _GRANULARITIES[strategy]
    if storage is Storage.MXFP4 and (granularity, weights.values.get("group_size")) != (Granularity.GROUP, GROUP_SIZE):
        raise weights.invalid("group_size", f"{GROUP_SIZE}, with the strategy group, in the format {storage_format}")
    return LayerQuantConfig(
        storage,
        "mxfp4" if storage is Storage.MXFP4 else "fp8" if kind == "float" else f"int{bits}",
        granularity,
        bits,
        group_size=group_size(weights, "group_size") if granularity is Granularity.GROUP else None,
        block_shape=_block_shape(weights) if granularity is Granularity.BLOCK else None,
        symmetric=weights.boolean("symmetric", True),
        # "weight" and "static" order the quantiser's work and leave groups of neighbours.
        has_group_index=weights.values.get("actorder") in ("group", "dynamic", True),
    )


def _block_shape(weights: Fields) -> tuple[int, int]:
    """A list, or text such as `128x128` in older checkpoints."""
    written = weights.values.get("block_structure")
    if isinstance(written, str):
        rows, _, columns = written.partition("x")
        if rows.isdigit() and columns.isdigit() and int(rows) and int(columns):
            return int(rows), int(columns)
    return pair(weights, "block_structure")
