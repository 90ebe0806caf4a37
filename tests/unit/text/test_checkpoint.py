"""`resolve_checkpoint`: the sources of a checkpoint, and one sentence if there is none."""

import json
from pathlib import Path

import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.numpy import save_file

from engine.config.paths import check_checkpoint, resolve_checkpoint
from models.demo import CHECKPOINT_DIR
from models.errors import CheckpointError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """A hub that returns `tmp_path`, or raises `answer`; it records its calls."""
    calls: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.update(options, repo_id=repo_id)
        if isinstance(error := calls.get("error"), Exception):
            raise error
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_no_model_is_the_embedded_one(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setattr("engine.config.paths.CHECKPOINT_DIR", checkpoint)
    assert resolve_checkpoint(None) == checkpoint
    assert CHECKPOINT_DIR.name == "checkpoint"


def test_a_directory_is_itself(checkpoint: Path) -> None:
    assert resolve_checkpoint(str(checkpoint)) == checkpoint


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        resolve_checkpoint(str(tmp_path))


def test_a_file_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="which is a file"):
        resolve_checkpoint(str(checkpoint / "config.json"))


@pytest.mark.parametrize("model", ["/no/such/dir", "./missing", "a/b/c", "name with spaces"])
def test_a_path_that_is_no_hub_id_never_reaches_the_hub(hub: dict[str, object], model: str) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_checkpoint(model)
    assert not hub


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/no/such/dir", "no such directory"),
        ("~/no/such/dir", "no such"),
        ("~nobody-of-this-name/dir", "cannot be read"),
        ("/" + "n" * 300, "cannot be read"),
        ("{empty}", "no config.json"),
    ],
)
def test_a_wrong_path_is_found_before_the_start_and_a_hub_id_is_left_to_it(
    model: str, said: str, tmp_path: Path, hub: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_checkpoint(model.format(empty=tmp_path))
    for right in (None, "acme/model"):
        check_checkpoint(right)
    assert not hub


_CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "num_hidden_layers": 3}
_WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{", r"config\.json cannot be read: .*; download the checkpoint again"),
        (
            "config.json",
            json.dumps(_CONFIG | {"hidden_size": "8"}),
            r'hidden_size of .* is "8"; it must be an integer',
        ),
        ("config.json", json.dumps(_CONFIG | {"num_hidden_layers": 5000}), "it must be an integer from 1 to 4096"),
        (
            "config.json",
            json.dumps(_CONFIG | {"num_hidden_layers": 5}),
            r"lacks 2 layers \(3, 4\), but num_hidden_layers",
        ),
        ("generation_config.json", "[]", r"generation_config\.json holds a list; it must hold a JSON object"),
        (_WEIGHTS, "<html>", r"model\.safetensors is truncated or is not a safetensors file .*; download it again"),
        (_WEIGHTS, None, r"has neither model\.safetensors nor"),
    ],
)
def test_a_wrong_checkpoint_is_found_before_the_start(
    name: str, content: str | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    save_file({f"model.layers.{number}.norm": np.zeros(1) for number in range(3)}, tmp_path / _WEIGHTS)
    check_checkpoint(str(tmp_path))
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=said):
        check_checkpoint(str(tmp_path))


def test_layers_of_other_names_and_other_tools_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    save_file({"transformer.h.0.norm": np.zeros(1)}, tmp_path / _WEIGHTS)
    check_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherModel"], "num_hidden_layers": "3"}))
    check_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/dir", ""])
def test_a_sentence_names_the_setting(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^speculative_model "):
        resolve_checkpoint(name or str(tmp_path), setting="speculative_model")


def test_a_hub_id_is_downloaded_without_other_weight_formats(hub: dict[str, object], checkpoint: Path) -> None:
    assert resolve_checkpoint("owner/name", revision="v2") == checkpoint
    assert (hub["repo_id"], hub["revision"]) == ("owner/name", "v2")
    assert isinstance(hub["allow_patterns"], list)
    assert not [pattern for pattern in hub["allow_patterns"] if "bin" in pattern or ".pt" in pattern]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("x"), "cannot be reached"),
        (
            RepositoryNotFoundError("x", response=httpx.Response(404, request=httpx.Request("GET", "http://hub"))),
            "no such",
        ),
        (OSError("No space left on device"), "No space left on device"),
    ],
)
def test_a_failed_download_is_one_sentence(hub: dict[str, object], error: Exception, words: str) -> None:
    hub["error"] = error
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve_checkpoint("owner/name")
    assert "owner/name" in str(caught.value)
    assert "\n" not in str(caught.value)
