"""`write_gguf.py CHECKPOINT OUT TYPE`: converts a Qwen3 checkpoint to a GGUF file, with matrices in bf16 or q8_0.

llama.cpp's own converter identifies tokenizers by name; this one has none.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# A byte-level BPE that splits at spaces; prompts consist of letters and spaces.
_PRE_TOKENIZER = "gpt-2"


def main(checkpoint: Path, out: Path, kind: str) -> None:
    """Write `out` completely, or not at all."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    unfinished = out.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8")))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, halves in _tensors(checkpoint):
        _add_tensor(writer, names.get_name(name, try_suffixes=(".weight",)), halves, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZER)
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    writer.add_token_types([control if number in special else normal for number in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(False)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Names and values of a safetensors file, bf16 as uint16."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, "r", 8 + size)
        for name, entry in header.items():
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} is {entry['dtype']}, not BF16")
            start, end = entry["data_offsets"]
            yield name, data[start:end].view(np.uint16).reshape(entry["shape"])


def _add_tensor(writer: Any, name: str, halves: Any, kind: str) -> None:
    """Whether it is a vector: vectors are float32 in any GGUF file."""
    if halves.ndim > 1 and kind == "bf16":
        writer.add_tensor(name, halves.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        return
    values = (halves.astype(np.uint32) << 16).view(np.float32)
    if halves.ndim > 1:
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
    else:
        writer.add_tensor(name, values)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
