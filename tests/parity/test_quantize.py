"""`kaon quantize`: a written checkpoint serves the same model as rounding at load, and is complete or absent."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config.config import Config, PrecisionConfig
from engine.core.startup import PhaseClock, start_model
from models.config.fields import read_config
from models.errors import CheckpointError
from models.layers.parameter import packed_of
from models.loading.quantize import write_quantized
from models.ops.cpu import runtime
from models.ops.cpu.packed_weight import QuantizedWeight, group_of
from models.ops.weight_formats import Codes, mxfp4_of
from models.quantization.config import Rounding
from models.quantization.layouts import layout_of
from models.quantization.methods import parse_quantization
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.test_quantization import first_family

pytestmark = pytest.mark.skipif(
    runtime.load_library() is None, reason="the operators were not built: install again where there is a C compiler"
)
ROUNDED: tuple[Rounding, ...] = ("int8", "int4", "mxfp4")


@pytest.fixture(autouse=True)
def operators() -> None:
    runtime.start(2)


def served(path: Path, quantization: str = "auto") -> Any:
    """The model that a server of the checkpoint computes."""
    precision = PrecisionConfig.model_validate({"quantization": quantization})
    config = Config(model=str(path), quantization_config=precision, max_model_len=64, num_kvcache_blocks=16)
    return start_model(config, PhaseClock(0.0)).runner.model


def contents(model: Any) -> dict[str, torch.Tensor]:
    """Each parameter's memory, packed or not."""
    return {
        name: parameter.data if (packed := packed_of(parameter)) is None else packed.memory.view(torch.uint8)
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("rounding", ROUNDED)
@pytest.mark.parametrize("form", ["dense", "experts", "stacked", "stacked as linear layers", "pairs rotated"])
def test_a_written_checkpoint_serves_what_rounding_at_load_does(form: str, rounding: Rounding, tmp_path: Path) -> None:
    """Also in several files, with inputs that no group divides, with the experts of a layer as one stack, and with
    rows that the model reorders."""
    families = {"dense": None, "stacked as linear layers": "GraniteMoeForCausalLM", "pairs rotated": "GlmForCausalLM"}
    architecture = families.get(form, "Qwen3MoeForCausalLM")
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 224, "num_attention_heads": 8}
    if architecture == "Qwen3MoeForCausalLM":
        sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    family = first_family(architecture) if architecture else None
    source = make_checkpoint(tmp_path / "dense", family or "llama", dtype=torch.bfloat16, **sizes)
    if form == "stacked":
        q.stack_experts(source, ("gate_proj", "up_proj"), "gate_up_proj", leaves={"weight": ""})
        q.stack_experts(source, ("down_proj",), "down_proj", leaves={"weight": ""})
    else:
        q.scatter(source, shards=2)
    (source / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    out = tmp_path / "new" / "out"
    write_quantized(source, out, rounding)
    assert (out / "chat_template.jinja").read_text(encoding="utf-8") == "{{ messages }}"
    found, expected = contents(served(out)), contents(served(source, rounding))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    written, read = (sum(each.stat().st_size for each in path.glob("*.safetensors")) for path in (out, source))
    assert written < read


@pytest.mark.parametrize("rounding", ROUNDED)
def test_the_written_tensors_mean_the_rounded_weight(rounding: Rounding, tmp_path: Path) -> None:
    """Read by the layout of compressed-tensors, as other engines do."""
    source = make_checkpoint(tmp_path / "dense", hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    out = tmp_path / "out"
    write_quantized(source, out, rounding)
    name = "model.layers.0.mlp.down_proj"
    dense = load_file(source / "model.safetensors")[f"{name}.weight"]
    parts = {
        leaf.removeprefix(f"{name}."): tensor
        for leaf, tensor in load_file(out / "model.safetensors").items()
        if leaf.startswith(f"{name}.")
    }
    quantization = parse_quantization(read_config(out))
    assert quantization is not None
    layer = quantization.for_layer(name)
    assert layer is not None
    if rounding == "mxfp4":
        codes, exponents = mxfp4_of(dense)
        numbers = torch.cat((q.E2M1, -q.E2M1))[codes.long()]
        scales = torch.exp2(exponents.float() - 127)
        parts["weight"] = parts.pop("weight_packed")
    else:
        packed = QuantizedWeight(*dense.shape, bits=8 if rounding == "int8" else 4)
        packed.put(0, dense)
        values, in_bfloat16 = packed.codes()
        numbers, scales = values.float(), in_bfloat16.float()
    expected = numbers * scales.repeat_interleave(dense.shape[1] // scales.shape[1], 1)
    assert torch.equal(layout_of(layer).dequantize(name, parts, torch.float32), expected)
    assert (expected - dense.float()).norm() < (0.01 if rounding == "int8" else 0.12) * dense.float().norm()
    assert quantization.for_layer("lm_head") is None


@pytest.mark.parametrize(("size", "bits"), [((100, 256), 8), ((100, 256), 4), ((20, 128), 8), ((20, 64), 4)])
def test_codes_fill_any_rows_of_a_weight(size: tuple[int, int], bits: Any) -> None:
    """Rows that begin and end within a panel do not change other rows."""
    whole = QuantizedWeight(*size, bits)
    whole.put(0, torch.randn(size).bfloat16())
    values, scales = whole.codes()
    zeros = None if bits == 8 else torch.full_like(scales, 8, dtype=torch.uint8)
    codes = values if bits == 8 else (values + 8).view(torch.uint8)
    rows = Codes(f"int{bits}", codes, scales, zeros, group_of(bits), lambda: values.float())
    again = QuantizedWeight(*size, bits)
    for first, last in ((size[0] // 2, size[0]), (0, size[0] // 3), (size[0] // 3, size[0] // 2)):
        part = rows.part(0, first, last)
        assert part is not None
        assert again.accepts(part)
        again.put_codes(first, part)
    assert torch.equal(again.memory.view(torch.uint8), whole.memory.view(torch.uint8))


def test_mxfp4_rounds_to_the_nearest_of_its_numbers() -> None:
    """For each group, the better of its two scales gives the least error of all scales and codes."""
    dense = torch.randn(64, 64).mul(torch.logspace(-6, 6, 64)[:, None]).bfloat16().float()
    dense[0], dense[1, :32] = 0, torch.inf
    codes, exponents = mxfp4_of(dense)
    numbers = torch.cat((q.E2M1, -q.E2M1))[codes.long()].view(64, 2, 32)
    groups, scales = dense.view(64, 2, 32), torch.exp2(exponents.float() - 127)[..., None]
    assert exponents[1, 0] == 255
    errors = (numbers * scales - groups).square().sum(-1)
    table = torch.cat((q.E2M1, -q.E2M1))
    for factor in (0.5, 2.0):
        nearest = table[(groups[..., None] / (scales * factor)[..., None] - table).abs().argmin(-1)]
        other = (nearest * scales * factor - groups).square().sum(-1)
        assert (errors[2:] <= other[2:] * (1 + 1e-5)).all()
    assert not errors[0].any()


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="exists; name a directory that does not"):
        write_quantized(dense, dense, "int8")
    quantised = q.write_pair(tmp_path / "pair", q.awq, q.AWQ_CONFIG).quantised
    with pytest.raises(CheckpointError, match="is quantised already, by awq; serve it as it is"):
        write_quantized(quantised, tmp_path / "out", "int8")
    stacks = make_checkpoint(tmp_path / "gpt-oss", first_family("GptOssForCausalLM"))
    with pytest.raises(CheckpointError, match="whose inputs come before their outputs"):
        write_quantized(stacks, tmp_path / "out", "mxfp4")
    edit_json(dense / "config.json", quantization_config=q.AWQ_CONFIG, kaon_rounding="int2")
    with pytest.raises(CheckpointError, match=r"kaon_rounding .* must be one of int8, int4, mxfp4"):
        parse_quantization(read_config(dense))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = make_checkpoint(tmp_path / "dense", dtype=torch.bfloat16)
    writes = 0

    def write(file: int, data: Any, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(CheckpointError, match="out cannot be written \\(No space left on device\\)"):
        write_quantized(dense, tmp_path / "new" / "out", "int4")
    assert list((tmp_path / "new").iterdir()) == []


def test_other_engines_find_no_field_of_ours_in_the_quantisation(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", dtype=torch.bfloat16)
    write_quantized(source, tmp_path / "out", "int4")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["kaon_rounding"] == "int4"
    assert "kaon" not in json.dumps(config["quantization_config"])
    assert "model.embed_tokens" in config["quantization_config"]["ignore"]
