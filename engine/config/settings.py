"""`load_config`: reads flags, `KAON_*` variables and a YAML file to one `Config`.

In this order: `SETTINGS`, the table of all leaves of `Config`; the flags of other servers; the sources; and
`read_models`, which reads the file of several models.
"""

import argparse
import os
import re
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from pydantic import SecretStr, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from engine.config.config import CLUSTER_KEY_ENV, Config
from engine.config.section import Section, docstrings
from engine.config.server import ServerConfig
from engine.config.spelling import nearest

ENV_PREFIX = "KAON_"
POSITIONAL = "model"
"""The one setting that the command line takes without a flag."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of `Config`, under all of its names."""

    name: str
    """The leaf's name, which is its YAML key."""
    section: type[Section]
    path: tuple[str, ...]
    """Field names from `Config` down to the section; empty for `Config`'s own leaves."""
    optional: bool
    """Whether the section is None unless one of its leaves is set."""
    field: FieldInfo

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "MODEL" if self.name == POSITIONAL else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """Its name in the environment."""
        return ENV_PREFIX + self.name.upper()

    @property
    def kind(self) -> Any:
        """Its type without constraints and without None."""
        return _bare(self.field.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """All values of a literal type; empty for other types."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    @property
    def type_name(self) -> str:
        """The type in a word or two, for help and docs."""
        if self.choices:
            return " | ".join(self.choices)
        if get_origin(self.kind) is tuple:
            return f"{_word(get_args(self.kind)[0])},..."
        return _word(self.kind)

    @property
    def default(self) -> str | None:
        """The default in YAML's form; None if `meaning` describes it.

        In an optional section, the default of the first setting is `off`; those of the others apply if it is set.
        """
        if self.optional and self.name == next(iter(self.section.model_fields)):
            return "off"
        value = self.field.default
        if value is None or value in ((), "", {}):
            return None
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def secret(self) -> bool:
        """Whether its values must not be shown."""
        return SecretStr in map(_bare, get_args(self.kind))

    @property
    def meaning(self) -> str:
        """Its description, on one line."""
        text = self.field.description or docstrings(self.section).get(self.name, "")
        return " ".join(text.split())


def derive_settings(root: type[Section]) -> tuple[Setting, ...]:
    """Return the leaves of `root` and its sections. Raises `TypeError` if two share a name, since names are flat."""
    settings: dict[str, Setting] = {}
    for setting in _leaves(root, (), optional=False):
        if (other := settings.setdefault(setting.name, setting)) is not setting:
            raise TypeError(
                f"{setting.name} is a field of both {other.section.__name__} and {setting.section.__name__}; "
                "settings are spelled flat, so rename one"
            )
    return tuple(settings.values())


def _leaves(section: type[Section], path: tuple[str, ...], *, optional: bool) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        kind = _bare(field.annotation)
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _leaves(kind, (*path, name), optional=optional or field.default is None)
        else:
            yield Setting(name, section, path, optional, field)


def _word(kind: Any) -> str:
    bare: type = _bare(kind)
    if get_origin(bare) is dict:
        return "JSON"
    return "text" if bare in (str, SecretStr) else bare.__name__


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _bare(next(arg for arg in get_args(annotation) if arg is not types.NoneType))
    return annotation


SETTINGS = derive_settings(Config)


# Flags of other servers. A flag of Kaon with a similar name may have another meaning.

_OTHER_NAMES = {
    "--tp": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--dp": "--data-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "--block-size": "--kv-cache-block-size",
    "--num-gpu-blocks-override": "--num-kvcache-blocks",
    "--lora-modules": "--lora",
    "--max-cpu-loras": "--max-lora-adapters",
    "--max-running-requests": "--max-num-seqs",
    "--speculative-num-draft-tokens": "--num-speculative-tokens",
    "--uvicorn-log-level": "--log-level",
}

_INSTEAD = {
    "--model": "MODEL needs no flag: kaon serve MODEL",
    "--model-path": "MODEL needs no flag: kaon serve MODEL",
    "--enable-auto-tool-choice": "tool calls need no flag (docs/tool-calling.md)",
    "--enable-lora": "adapters need no flag but --lora NAME=DIRECTORY",
    "--trust-remote-code": "code that checkpoints bring is never run (docs/models.md)",
    "--disable-log-requests": "--access-log none logs no requests",
    "--no-enable-log-requests": "--access-log none logs no requests",
    "--pipeline-parallel-size": "pipeline parallelism is not supported; --tensor-parallel-size splits each layer",
    "-pp": "pipeline parallelism is not supported; --tensor-parallel-size splits each layer",
    "--compilation-config": "--compilation-level and --cudagraph-capture-sizes replace it",
    "--enable-reasoning": "reasoning is separated without a flag (docs/tool-calling.md)",
    "--speculative-config": "--num-speculative-tokens and the other speculative flags replace it",
}


def instead_of(flag: str) -> str:
    """Return the end of a sentence that suggests a replacement for a flag of another server; "" for other flags."""
    name = _OTHER_NAMES.get(flag)
    words = _INSTEAD.get(flag) if name is None else f"it is {name} here"
    return f"; {words}" if words else ""


# pydantic-settings reads the environment and the YAML file; argparse, built from the same table, reads the command
# line, because its help groups flags by section and its errors fit into one sentence. Neither converts a value:
# `Config` validates all of them, so that a value means the same wherever it comes from.

CONFIG_FLAG = "--config"
CONFIG_ENV = ENV_PREFIX + "CONFIG"

_BY_NAME = {setting.name: setting for setting in SETTINGS}
_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")


class SettingsError(ValueError):
    """The settings cannot be served; the message is one sentence."""


def load_config(argv: Sequence[str]) -> Config:
    """Return the configuration of command line, environment and YAML file, in the order of their precedence.

    Raises `SettingsError` for the first invalid setting. `--help` prints the settings and exits.
    """
    flags = _read_flags(argv)
    file_named_by = CONFIG_FLAG if "config" in flags else CONFIG_ENV
    file = flags.pop("config", os.environ.get(CONFIG_ENV))
    environment = _read_environment()
    yaml = {} if not file else _read_yaml(Path(file), file_named_by)
    given = ChainMap(flags, environment, yaml)
    try:
        return Config.model_validate(_nested(given))
    except ValidationError as error:
        # The error names the setting as in its source.
        spelled = {name: f"{name} in {file}" for name in yaml}
        spelled |= {name: _BY_NAME[name].env for name in environment}
        spelled |= {name: _BY_NAME[name].flag for name in flags}
        raise SettingsError(_sentence(error, given, spelled)) from None


# -- sources ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _read_flags(argv: Sequence[str]) -> dict[str, Any]:
    parser = serve_parser()
    try:
        known, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        flag = str(error.argument_name).partition("/")[0]
        takes = "takes no value" if "explicit" in error.message else "needs a value"
        raise SettingsError(f"{flag} {takes}") from None
    if unknown:
        word = unknown[0].partition("=")[0]
        if word.startswith("-"):
            flags = [CONFIG_FLAG, *(setting.flag for setting in SETTINGS)]
            hint = instead_of(word) or nearest(word, flags, prefix="--") or "; kaon serve --help lists them"
            raise SettingsError(f"{word} is not a flag{hint}")
        _refuse_values_with_spaces(unknown, argv)
        raise SettingsError(f"one MODEL can be served, and {word} is a second one")
    _refuse_truth_as_model(known, argv)
    # The flag of a list may be repeated, and each value may be a list.
    return {name: ",".join(value) if isinstance(value, list) else value for name, value in vars(known).items()}


def _refuse_values_with_spaces(unknown: Sequence[str], argv: Sequence[str]) -> None:
    """Refuse `b c` in `--served-model-name a b c`, the form of lists in other servers' command lines."""
    word = unknown[0]
    lists = {setting.flag for setting in SETTINGS if get_origin(setting.kind) is tuple}
    before = list(argv[: argv.index(word)])
    flag = next((each for each in reversed(before) if each.startswith("--")), None)
    if flag in lists:
        given = before[len(before) - before[::-1].index(flag) :]
        values = ",".join([*given, *takewhile(lambda each: not each.startswith("-"), unknown)])
        raise SettingsError(f"{word} follows the value of {flag}; write {flag} {values}, or {flag} for each value")


def _refuse_truth_as_model(known: argparse.Namespace, argv: Sequence[str]) -> None:
    """Refuse `false` in `--enable-prefix-caching false`, which would otherwise be the MODEL."""
    model = getattr(known, POSITIONAL, "")
    if model.lower() not in _TRUTH_VALUES:
        return
    switches = {setting.flag for setting in SETTINGS if setting.kind is bool}
    for flag, value in pairwise(argv):
        if value == model and flag in switches:
            raise SettingsError(f"{flag} takes no value; write {flag}, or --no-{flag[2:]} to switch it off")


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `kaon serve`'s flags."""
    parser = _Parser(
        prog="kaon serve",
        usage="kaon serve [MODEL] [--config FILE] [flags]",
        description="Serve a model over OpenAI's HTTP interface.",
        epilog=f"A flag --some-name is also {ENV_PREFIX}SOME_NAME in the environment and some_name in the YAML file. "
        "The command line wins over the environment, the environment over the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(CONFIG_FLAG, metavar="FILE", help=f"YAML file with settings; also {CONFIG_ENV}")
    groups: dict[type[Section], argparse._ArgumentGroup] = {Config: parser.add_argument_group("model and engine")}
    for setting in SETTINGS:
        if setting.section not in groups:
            title = setting.path[-1].removesuffix("_config")
            groups[setting.section] = parser.add_argument_group(title, setting.section.__doc__)
        _add_argument(groups[setting.section], setting)
    return parser


def _add_argument(group: argparse._ArgumentGroup, setting: Setting) -> None:
    help = setting.meaning.replace("%", "%%")
    if setting.default is not None:
        help += f" (default: {setting.default})"
    if setting.name == POSITIONAL:
        group.add_argument(setting.name, metavar=setting.flag, nargs="?", help=help)
    elif setting.kind is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=help)
    else:
        metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.type_name.upper()
        action = "append" if get_origin(setting.kind) is tuple else "store"
        group.add_argument(setting.flag, metavar=metavar, action=action, help=help)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


class _Flat(BaseSettings):
    """The names of the leaves, for pydantic-settings."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True)


def _flat_model() -> type[_Flat]:
    fields: dict[str, Any] = {setting.name: (Any, None) for setting in SETTINGS}
    return create_model("_FlatConfig", __base__=_Flat, **fields)


def _read_environment() -> dict[str, Any]:
    known = {CONFIG_ENV, CLUSTER_KEY_ENV, *(setting.env for setting in SETTINGS)}
    if "KAON_SERVICE_HOST" in os.environ:
        raise SettingsError(
            "KAON_SERVICE_HOST and its like come from a Kubernetes Service named kaon, not from you; "
            "set enableServiceLinks: false in the pod, or rename the Service"
        )
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            hint = nearest(name, known, prefix=ENV_PREFIX) or "; `kaon serve --help` lists them"
            raise SettingsError(f"{name} in the environment is not a setting{hint}")
    return EnvSettingsSource(_flat_model())()


def _read_yaml(path: Path, named_by: str) -> dict[str, Any]:
    values = _yaml_data(path, named_by)
    for key in values:
        if key not in _BY_NAME:
            raise SettingsError(f"{key} in {path} is not a setting{nearest(str(key), _BY_NAME)}")
    return values


def _yaml_data(path: Path, named_by: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `SettingsError`."""
    import yaml

    if not path.is_file():
        missing = "this is not a file" if path.exists() else "there is no such file"
        raise SettingsError(f"{named_by} is {path}, but {missing}")
    try:
        twice = _repeated(yaml.compose(path.read_text("utf-8"), yaml.SafeLoader))
        values = YamlConfigSettingsSource(_flat_model(), yaml_file=path).yaml_data
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{path} is not YAML: {error.problem}{line}") from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply; it has lines of the form `setting: value`") from None
    except (TypeError, ValueError, AttributeError):
        raise SettingsError(f"{path} is YAML, but not lines of the form `setting: value`") from None
    if twice is not None:
        raise SettingsError(f"{path} sets {twice}; remove one of the two lines")
    return values


def _repeated(root: Any) -> str | None:
    """Return a key that a mapping has twice, with its line. YAML forbids it, and the parser takes the last value."""
    import yaml

    pending = [root]
    seen: set[int] = set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            names = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in names:
                        return f"{key.value} twice, again at line {key.start_mark.line + 1}"
                    names.add(key.value)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
    return None


# -- validation -------------------------------------------------------------------------------------------------


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, value in given.items():
        setting = _BY_NAME[name]
        section = config
        for field in setting.path:
            section = section.setdefault(field, {})
        section[name] = _parsed(value, setting) if isinstance(value, str) else value
    return config


def _parsed(text: str, setting: Setting) -> object:
    """Convert text that pydantic does not convert: lists, and choices that are numbers."""
    if get_origin(setting.kind) is tuple:
        return [item.strip() for item in text.split(",")]
    return next((choice for choice in get_args(setting.kind) if str(choice) == text), text)


def _sentence(error: ValidationError, given: Mapping[str, Any], spelled: Mapping[str, str]) -> str:
    """Return a sentence about the first failure, with the value as it was given."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        # A sentence of `Config`'s, which begins with the field's name.
        name, _, rest = first["msg"].removeprefix("Value error, ").partition(" ")
        return f"{spelled.get(name, name)} {rest}"
    name = next(str(part) for part in first["loc"] if part in given)
    subject = "each item" if isinstance(first["loc"][-1], int) else "it"
    message = re.sub(r"^\w+ should", f"{subject} must", first["msg"].partition(", unable to")[0]).replace(
        "tuple", "list"
    )
    value = "a secret" if _BY_NAME[name].secret else _shown(given[name])
    return f"{spelled[name]} is {value}; {message}"


def _shown(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() else repr(value)


# -- several models ---------------------------------------------------------------------------------------------

_GIB = 2**30
_OF_ONE_MODEL = (
    "served_model_name",
    "chat_template",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "lora_directories",
    "weights_directories",
    "max_lora_adapters",
    "max_tokens_overflow",
)
"""Settings of the server's section that each model may override."""


class ModelEntry(NamedTuple):
    """One model that the server serves."""

    config: Config
    loads_at_start: bool = True
    """Whether it is loaded before the server is ready; otherwise, its first request causes it to be loaded."""
    memory_bytes: int = 0
    """Bytes of the budget that it takes while it is loaded."""


class ModelList(NamedTuple):
    """All models of a server."""

    entries: list[ModelEntry]
    memory_bytes: int | None = None
    """Budget in bytes of all loaded models; None: no model is ever unloaded."""


def read_models(config: Config) -> ModelList:
    """Return the models of the file `models`, whose settings default to those of `config`; without a file, `config`.

    Raises `SettingsError` for the first invalid setting.
    """
    file = config.server_config.models
    if file is None:
        return ModelList([ModelEntry(config)])
    path = Path(file)
    data = _yaml_data(path, "models")
    for key in data:
        if key not in ("models", "memory_gib"):
            raise SettingsError(f"{key} in {path} is not known; the file has a list `models`, and may have memory_gib")
    items = data.get("models")
    if not isinstance(items, list) or not items:
        raise SettingsError(f"{path} lists no models; write `models:`, and an item `- model: ...` for each")
    budget = _memory(data, path)
    entries = [_model_entry(config, item, f"model {number} in {path}") for number, item in enumerate(items, 1)]
    _check_names(entries, path)
    if budget is not None:
        _check_memory(entries, budget, path)
    return ModelList(entries, budget)


def _model_entry(base: Config, item: object, where: str) -> ModelEntry:
    if not isinstance(item, dict):
        raise SettingsError(f"{where} is {_shown(item)}; write its settings as lines of the form `setting: value`")
    given = dict(item)
    memory, load = _memory(given, where), given.pop("load", "use")
    given.pop("memory_gib", None)
    if load not in ("start", "use"):
        raise SettingsError(f"load of {where} is {_shown(load)}; it must be start or use")
    for name in given:
        setting = _BY_NAME.get(name)
        if setting is None:
            raise SettingsError(f"{name} of {where} is not a setting{nearest(str(name), _BY_NAME)}")
        if setting.section is ServerConfig and name not in _OF_ONE_MODEL:
            raise SettingsError(f"{name} of {where} is the same for all models; set it by a flag, or in {CONFIG_FLAG}")
    fields = base.model_dump(exclude_unset=True)
    for section, values in _nested(given).items():
        if section in _BY_NAME:
            fields[section] = values
        else:
            fields[section] = {**(fields.get(section) or {}), **values}
    fields.setdefault("server_config", {})["models"] = None
    try:
        return ModelEntry(Config.model_validate(fields), load == "start", memory or 0)
    except ValidationError as error:
        inherited = {setting.name: None for setting in SETTINGS if setting.name not in given}
        spelled = {name: f"{name} of {where}" for name in given}
        raise SettingsError(_sentence(error, {**inherited, **given}, spelled)) from None


def _memory(data: Mapping[Any, Any], where: object) -> int | None:
    """Return `memory_gib` in bytes; None if it is not set."""
    value = data.get("memory_gib")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**20:
        raise SettingsError(f"memory_gib of {where} is {_shown(value)}; it must be a number of GiB above 0")
    return int(value * _GIB)


def _check_names(entries: Sequence[ModelEntry], path: Path) -> None:
    """Raise `SettingsError` if two models share a name or an address for events."""
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        events = entry.config.kv_events_config
        addresses = [each for each in (events.kv_events_endpoint, events.kv_events_replay_endpoint) if each]
        for name in (*entry.config.model_names, *entry.config.lora_paths, *addresses):
            if (other := seen.setdefault(name, number)) != number:
                raise SettingsError(
                    f"models {other} and {number} in {path} both have {name}; give one another (served_model_name, "
                    "lora, kv_events_endpoint)"
                )


def _check_memory(entries: Sequence[ModelEntry], budget: int, path: Path) -> None:
    """Raise `SettingsError` unless each model, and all that are loaded at start, fit the budget."""
    for number, entry in enumerate(entries, 1):
        if not entry.memory_bytes:
            raise SettingsError(
                f"model {number} in {path} has no memory_gib, but the file has a budget; set what the loaded model "
                "takes with its KV cache"
            )
        if entry.memory_bytes > budget:
            raise SettingsError(
                f"memory_gib of model {number} in {path} is {entry.memory_bytes / _GIB:g}, more than that of all, "
                f"{budget / _GIB:g}"
            )
    at_start = sum(entry.memory_bytes for entry in entries if entry.loads_at_start)
    if at_start > budget:
        raise SettingsError(
            f"the models in {path} that are loaded at the start take {at_start / _GIB:g} GiB, more than memory_gib, "
            f"{budget / _GIB:g}; set `load: use` for some"
        )
