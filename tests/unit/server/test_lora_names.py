"""Adapters are named in the configuration, listed as models, and chosen by their name."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.config.settings import SettingsError, load_config
from server.adapters import Adapters
from server.app import create_app
from server.errors import BadRequest, ModelNotFound
from server.frontend import Frontend
from tests.unit.server.test_face import LoadingCore, client_of

ADAPTERS = ("one=/a/1", "team/two=/a/2=b")


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KAON_"):
            monkeypatch.delenv(name)


def frontend(**fields: Any) -> Frontend:
    return Frontend(Config(model="/m", lora=ADAPTERS, **fields), LoadingCore())  # type: ignore[arg-type]


def test_the_flag_can_be_repeated_and_paths_may_hold_equals_signs() -> None:
    config = load_config(["/m", "--lora", ADAPTERS[0], "--lora", ADAPTERS[1]])
    assert {name: str(path) for name, path in config.lora_paths.items()} == {"one": "/a/1", "team/two": "/a/2=b"}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lora", "/a/1"], "--lora is '/a/1'; each item must be NAME=DIRECTORY"),
        (["--lora", "a\nb=/a/1"], "--lora is 'a\\nb=/a/1', whose name has a character that cannot be shown"),
        (["--lora", "=/a/1"], "--lora is '=/a/1'; each item must be NAME=DIRECTORY"),
        (["--lora", "x=/1,x=/2"], "--lora names two adapters x; each needs a name of its own"),
        (["m", "--lora", "m=/1"], "--lora names an adapter m, which is the model's own name; choose another"),
        (["m", "--lora", "s=/1", "--served-model-name", "s"], "--lora names an adapter s, which is the model's own"),
        (["--lora", "kaon-demo=/1"], "--lora names an adapter kaon-demo, which is the model's own name"),
    ],
)
def test_ambiguous_names_are_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(flags)
    assert str(error.value).startswith(sentence)


def test_a_served_name_leaves_the_models_path_free() -> None:
    assert list(
        Config.model_validate(
            {"model": "m", "lora": ["m=/1"], "server_config": {"served_model_name": ["s"]}}
        ).lora_paths
    ) == ["m"]
    with pytest.raises(ValidationError):
        Config(model="m", lora=("m=/1",))


def test_a_models_name_chooses_its_adapter() -> None:
    front = frontend()
    assert front.model_names == ("/m", "one", "team/two")
    assert [front.adapters.number_of(name) for name in front.model_names] == [0, 1, 2]
    for name in front.model_names:
        front.check_model(name)
    with pytest.raises(ModelNotFound, match="model is 'three', which this server does not serve; use /m or one or"):
        front.check_model("three")


async def test_adapters_are_listed_with_the_model_they_adapt() -> None:
    config = Config.model_validate({"lora": ADAPTERS, "server_config": {"served_model_name": ["big", "alias"]}})
    async with client_of(create_app(config, LoadingCore())) as http:  # type: ignore[arg-type]
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in listed] == [
            ("big", None),
            ("alias", None),
            ("one", "big"),
            ("team/two", "big"),
        ]
        assert (await http.get("/v1/models/team/two")).json()["parent"] == "big"
        missing: httpx.Response = await http.get("/v1/models/three")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


class SlowCore(LoadingCore):
    """A core that loads adapters once `opened` is set, and counts those that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.adapters: set[int] = set()
        self.most = 0

    async def load_adapter(self, number: int, name: str, path: str) -> None:
        await self.opened.wait()
        self.adapters.add(number)
        self.most = max(self.most, len(self.adapters))

    async def unload_adapter(self, number: int) -> None:
        await asyncio.sleep(0.01)
        self.adapters.remove(number)


async def test_an_adapter_that_is_being_unloaded_counts_until_it_is(tmp_path: Path) -> None:
    """A load that waited before the unloading took its room at once, so that the core had one adapter too many."""
    core = SlowCore()
    core.adapters |= {1, 2}
    config = Config(lora=ADAPTERS, server_config=ServerConfig(lora_directories=[str(tmp_path)], max_lora_adapters=3))
    adapters = Adapters(config, core)  # type: ignore[arg-type]
    (tmp_path / "a").mkdir()
    loads = [
        asyncio.create_task(adapters.load(name, str(tmp_path / "a"), in_place=False)) for name in ("three", "four")
    ]
    while not adapters._loading.locked() or len(adapters._tasks) < 2:
        await asyncio.sleep(0.001)
    unload = asyncio.create_task(adapters.unload("one"))
    await asyncio.sleep(0.01)
    core.opened.set()
    answers = await asyncio.gather(*loads, return_exceptions=True)
    await unload
    # Either gets the lock first.
    refused = ("three", "four")[answers[0] is None]
    assert isinstance(answers[answers[0] is None], BadRequest)
    assert None in answers
    assert (core.most, len(core.adapters)) == (3, 2)
    await adapters.load(refused, str(tmp_path / "a"), in_place=False)
    assert set(adapters.names) == {"team/two", "three", "four"}
