"""`resolve_checkpoint`: the local checkpoint directory of a MODEL argument. `check_checkpoint`: finds its errors
without torch. `weights_digest`: a hash of its weights.

Called by the server, by `LLMEngine` and by the engine core.
"""

import hashlib
import os
import stat
from pathlib import Path

from models.architectures.registry import ARCHITECTURES
from models.config.fields import MAX_LAYERS, read_config, read_generation_config
from models.config.weight_files import require_layers
from models.demo import CHECKPOINT_DIR
from models.errors import CheckpointError, first_line

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "tiktoken.model")
"""Files of a hub repository that serving needs: weights, configuration, tokenizer and chat templates."""

_MOST_BYTES = 16 * 2**20
"""The largest file that is read: a file of 40,000 keys."""
_SIZES = ("hidden_size", "num_attention_heads", "vocab_size")
"""Fields of config.json that are positive integers, unless an architecture has other names for them or defaults."""
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def resolve_checkpoint(model: str | None, revision: str | None = None, *, setting: str = "model") -> Path:
    """Return the directory of `model`: a path, or a hub id, which is downloaded unless cached; None: the embedded one.

    `setting` is the name of the setting with this value, for errors. Raises `CheckpointError` if there is no such
    directory, if it holds no config.json, or if the download fails.
    """
    if model is None:
        return _checked(CHECKPOINT_DIR, "the embedded model's directory")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _checked(path, setting)
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # `expanduser` raises `RuntimeError` for an unknown user.
        reason = why_unreadable(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{setting} is {model}, which cannot be read: {reason}; check the path") from error
    if exists:
        raise CheckpointError(f"{setting} is {model}, which is a file; give the directory that holds its config.json")
    if not _is_hub_id(model):
        raise CheckpointError(f"{setting} is {model}, but there is no such directory; check the path")
    return _checked(_download(model, revision, setting), f"hub repository {model}, cached at")


def check_checkpoint(model: str | None) -> None:
    """Raise `CheckpointError` for a wrong path, a wrong config.json or damaged weights, as their headers show.

    A start calls it first, since the core finds such errors only after it has loaded torch. A `model` that is no path
    is not checked, because asking the hub takes time.
    """
    if model is None or not (model.startswith(("/", "./", "../", "~")) or os.path.exists(model)):
        return
    path = resolve_checkpoint(model)
    config = read_config(path)
    read_generation_config(path)
    names = config.values.get("architectures")
    is_ours = isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES
    for name in _SIZES if is_ours else ():
        config.integer(name, 1)
    require_layers(path, config.integer("num_hidden_layers", 1, maximum=MAX_LAYERS) if is_ours else 0)


def _checked(path: Path, what: str) -> Path:
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{what} {path} holds no config.json; give the directory of a Hugging Face checkpoint")
    return path


def _is_hub_id(model: str) -> bool:
    """Whether `model` has the form `name` or `owner/name`, which no absolute or relative path has."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def _download(model: str, revision: str | None, setting: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(HUB_PATTERNS)))
    except RevisionNotFoundError:
        reason = f"it has no revision {revision}; check the revision"
    except RepositoryNotFoundError:
        reason = "the hub has no such repository, or it is private; check the id, or set HF_TOKEN"
    except LocalEntryNotFoundError:
        reason = (
            "the hub cannot be reached and the local cache does not hold it; check the network, or give a directory"
        )
    except (HfHubHTTPError, OSError) as error:
        reason = f"the download failed ({first_line(error)}); try again, or give a directory"
    raise CheckpointError(f"{setting} is {model}: no such directory, and as a hub id {reason}")


# Errors of files that a setting names.


def why_unreadable(error: OSError | ValueError) -> str:
    """Return the reason of an error, without the number and the path in the text of an `OSError`."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def read_small_file(path: Path) -> str:
    """Return the text of a regular file of at most `_MOST_BYTES`. Raises `OSError` and `ValueError` for other files.

    The event loop reads such files while it serves, so a pipe or a device with that name must not block it.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        check_regular(file.fileno())
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return content.decode()


def check_regular(file: int | str) -> None:
    """Raise `ValueError` if a path or descriptor is no regular file, or is writable by every user."""
    mode = os.stat(file).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError("it is not a regular file")
    if mode & stat.S_IWOTH:
        raise ValueError("every user of this machine may change it; remove that permission with chmod o-w")


def weights_digest(checkpoint: Path) -> str:
    """Return eight hexadecimal digits of a hash over a checkpoint's configuration and weights.

    The hash covers name, size and first bytes of each file of weights, which locate its tensors, and samples at even
    distances. A change of a few bytes between the samples does not change it. Raises `CheckpointError` if a file
    cannot be read.
    """
    digest = hashlib.sha256()
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]
    for path in (checkpoint / "config.json", *sorted(files)):
        try:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                step = max(_SAMPLE_BYTES, size // _SAMPLES)
                for first in range(0, size, step):
                    file.seek(first)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {why_unreadable(error)}; check it and who may read it, or download it again"
            ) from error
    return digest.hexdigest()[:8]
