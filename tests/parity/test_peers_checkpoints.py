"""The checkpoints that the peers' benchmarks make: prompts of known lengths, and answers that never end."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoints import END_TOKEN, TINY, Checkpoint, write
from benchmarks.peers.load import WORKLOADS

SMALL = Checkpoint("small", {**TINY.sizes, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(SMALL, tmp_path_factory.mktemp("peers"))


def test_a_prompt_has_a_token_for_each_word(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for workload in WORKLOADS:
        request = workload.requests(seed=1)[0]
        assert len(tokenizer.encode(request.prompt).ids) == request.prompt_tokens
    assert tokenizer.get_vocab_size() == SMALL.sizes["vocab_size"]


def test_a_chat_of_one_message_is_the_prompt_itself(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = WORKLOADS[0].requests(seed=1)[0].prompt
    chat = [{"role": "user", "content": prompt}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt
    assert tokenizer.convert_tokens_to_ids(END_TOKEN) == tokenizer.eos_token_id == 0


def test_greedy_answers_never_end_and_are_plain_words(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for request in WORKLOADS[1].requests(seed=1):
        ids = tokenizer.encode(request.prompt).ids
        answer = model.generate(torch.tensor([ids]), max_new_tokens=48)[0, len(ids) :]
        assert len(answer) == 48
        assert all(tokenizer.decode([token]).startswith(" ") and token != 0 for token in answer.tolist())
    logits = model(torch.tensor([ids])).logits
    assert bool((logits[..., 0] == 0).all())
    assert bool((logits.max(-1).values > 0).all())


def test_a_checkpoint_is_the_same_whenever_it_is_written(folder: Path, tmp_path: Path) -> None:
    again = write(SMALL, tmp_path)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    stamp = (again / "tokenizer.json").stat().st_mtime_ns
    assert write(SMALL, tmp_path) == again
    assert (again / "tokenizer.json").stat().st_mtime_ns == stamp
