"""The layers that every request passes before its route: keys, request ids, CORS, access log, unknown paths."""

import asyncio
import gzip
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.distributed.logs import BARE
from server.access_log import AccessLog, facts_of
from server.app import create_app
from server.limits.accounts import Accounts
from server.limits.admission import KeyShares
from server.limits.key_file import KeyFile
from server.limits.keys import ApiKeys
from server.limits.owners import Owner
from server.metrics import Metrics
from server.middleware import OwnerMiddleware, RequestIdMiddleware, owner_of

KEY = {"Authorization": "Bearer sk-one"}


class LoadingCore:
    """A core that never becomes ready: requests that pass the outer layers are answered with 503."""

    ready = None
    failure = None
    serving: tuple[int, ...] = ()
    local_pids = (None,)
    is_asleep = False

    def attach(self, *receivers: object) -> None:
        pass

    async def wait_ready_async(self) -> None:
        await asyncio.Event().wait()


def application(**settings: Any) -> FastAPI:
    if "api_key" in settings:
        settings["api_key"] = tuple(map(SecretStr, settings["api_key"]))
    return create_app(Config(server_config=ServerConfig(**settings)), LoadingCore())  # type: ignore[arg-type]


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://kaon")


def client(**settings: Any) -> httpx.AsyncClient:
    return client_of(application(**settings))


# -- errors in Anthropic's form ---------------------------------------------------------------------------------

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        ("POST", "/v1/messages", {}, 401, "authentication_error"),
        ("POST", "/v1/messages?beta=true", {"x-api-key": "sk-wrong"}, 401, "authentication_error"),
        ("GET", "/v1/models", VERSION, 401, "authentication_error"),
        ("GET", "/v1/messages", {"x-api-key": "sk-one"}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/drafts", {"x-api-key": "sk-one"}, 404, "not_found_error"),
        ("POST", "/v1/complete", {**VERSION, "x-api-key": "sk-one"}, 404, "not_found_error"),
        ("GET", "/v1/models/x", {**VERSION, "x-api-key": "sk-one"}, 404, "not_found_error"),
    ],
)
async def test_failures_of_anthropics_api_have_its_error_object_and_request_id(
    method: str, path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    answer = await client(api_key=["sk-one"]).request(method, path, headers=headers)
    assert answer.status_code == status
    error = answer.json()
    assert (error["type"], error["error"]["type"], bool(error["error"]["message"])) == ("error", kind, True)
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_openais_paths_do_not_have_anthropics_header() -> None:
    assert "request-id" not in (await client().get("/v1/models")).headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "sk-one")], 200),
        ([("x-api-key", "sk-one"), ("Authorization", "Bearer of-another-service")], 200),
        ([("x-api-key", "of-another-service"), ("Authorization", "Bearer sk-one")], 200),
        ([("x-api-key", "sk-two")], 401),
        ([("x-api-key", "sk-one"), ("x-api-key", "sk-one")], 401),
    ],
)
async def test_a_key_may_come_in_anthropics_header(headers: list[tuple[str, str]], status: int) -> None:
    assert (await client(api_key=["sk-one"]).get("/v1/models", headers=headers)).status_code == status


# -- keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [{}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic sk-one"}, {"Authorization": "Bearer"}],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/version", "/nowhere"])
async def test_without_a_key_of_the_ring_a_path_is_401_in_openais_form(path: str, header: dict[str, str]) -> None:
    answer = await client(api_key=["sk-one"]).get(path, headers=header)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "sk-" not in answer.text


async def test_two_authorization_headers_open_nothing() -> None:
    headers = [("Authorization", "Bearer sk-one"), ("Authorization", "Bearer sk-one")]
    assert (await client(api_key=["sk-one"]).get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("key", ["sk-one", "sk-two"])
async def test_each_key_opens_every_path(key: str) -> None:
    headers = {"Authorization": f"bearer {key}"}
    async with client(api_key=["sk-one", "sk-two"]) as http:
        for path in ("/v1/models", "/version", "/metrics", "/"):
            assert (await http.get(path, headers=headers)).status_code == 200


@pytest.fixture
def scoped(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Headers with a key of each scope, and the path of their file under `file`."""
    file = KeyFile(1, [])
    keys = {scope: file.create(scope, scopes=[scope]) for scope in ("inference", "metrics", "admin")}
    file.save(tmp_path / "keys")
    headers = {scope: {"Authorization": f"Bearer {key}"} for scope, key in keys.items()}
    return {**headers, "file": {"api_key_file": str(tmp_path / "keys")}}


async def test_a_key_opens_what_its_scopes_say_and_a_403_says_what_is_missing(
    scoped: dict[str, dict[str, str]],
) -> None:
    async with client(**scoped["file"]) as http:
        for scope, path, status in (
            ("inference", "/v1/models", 200),
            ("inference", "/metrics", 403),
            ("inference", "/nowhere", 404),
            ("metrics", "/metrics", 200),
            ("metrics", "/v1/models", 403),
            ("metrics", "/v1/completions", 403),
            ("metrics", "/version", 200),
            ("admin", "/v1/models", 403),
            ("admin", "/livez", 200),
        ):
            answer = await http.get(path, headers=scoped[scope])
            assert (answer.status_code, scope, path) == (status, scope, path)
            if status == 403:
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "insufficient_scope")
                assert f"this one opens {scope}" in error["message"]


async def test_each_key_sees_its_own_use_and_quotas_and_the_admin_all_owners(
    scoped: dict[str, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.audit")
    app = application(**scoped["file"], requests_per_minute=60, max_requests_per_key=7)
    body = {"model": "kaon-demo", "prompt": "Hi"}
    async with client_of(app) as http:
        refused = await http.post("/v1/completions", json=body, headers=scoped["inference"])
        own = (await http.get("/kaon/limits", headers=scoped["metrics"])).json()
        forbidden = await http.get("/kaon/owners", headers=scoped["metrics"])
        owners = (await http.get("/kaon/owners", headers=scoped["admin"])).json()
    assert refused.status_code == 503  # The model is still loading.
    assert {name: refused.headers[f"x-ratelimit-{name}"] for name in ("limit-requests", "remaining-requests")} == {
        "limit-requests": "60",
        "remaining-requests": "60",
    }
    assert (own["name"], own["scopes"], own["most"]["requests"]) == ("metrics", ["metrics"], 7)
    assert own["quotas"] == {"requests": {"limit": 60, "remaining": 60, "reset_seconds": 0.0}}
    assert own["used"] == {"requests": 0, "refused": 0, "prompt_tokens": 0, "output_tokens": 0}
    assert forbidden.status_code == 403
    assert {owner["name"] for owner in owners["data"]} == {"inference", "metrics"}
    assert all(len(owner["key"]) == 12 for owner in owners["data"])
    audited = [json.loads(record.getMessage()) for record in caplog.records if record.name == "server.audit"]
    assert [(line["owner"], line["status"]) for line in audited] == [("metrics", 403), ("admin", 200)]


async def test_admin_calls_leave_a_line_each_with_who_what_and_outcome(
    scoped: dict[str, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("ok")(scope, receive, send)

    keys = ApiKeys.of(ServerConfig(**scoped["file"]))  # type: ignore[arg-type]
    app = OwnerMiddleware(route, keys, (), {"/kaon/secret": "admin"})
    caplog.set_level(logging.INFO, "server.audit")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kaon") as http:
        for headers in (scoped["admin"], scoped["metrics"], {}):
            await http.post("/kaon/secret", headers=headers)
        await http.get("/v1/models", headers=scoped["inference"])
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "server.audit"]
    assert [(line["audit"], line["owner"], line["status"]) for line in lines] == [
        ("POST /kaon/secret", "admin", 200),
        ("POST /kaon/secret", "metrics", 403),
        ("POST /kaon/secret", "127.0.0.1", 401),
    ]


@pytest.mark.parametrize(("keys", "statuses"), [(["sk-one"], {200}), (["sk-one", "sk-two"], {200, 429})])
async def test_a_key_leaves_served_connections_only_to_other_keys(keys: list[str], statuses: set[int]) -> None:
    shares = KeyShares(8, Accounts(), Metrics("test").connection_closed)
    all_begun = asyncio.Event()

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await all_begun.wait()
        await Response("ok")(scope, receive, send)

    app = OwnerMiddleware(route, ApiKeys(keys), (), shares=shares)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kaon") as http:
        asked = [http.get("/v1/models", headers={"Authorization": "Bearer sk-one"}) for _ in range(8)]
        answers = asyncio.gather(*asked)
        ended = asyncio.gather(http.delete("/v1/responses/a", headers={"Authorization": "Bearer sk-one"}))
        for _ in range(100):
            await asyncio.sleep(0)
        all_begun.set()
        assert {answer.status_code for answer in await answers} == statuses
        # What ends work is served whatever the key holds.
        assert {answer.status_code for answer in await ended} == {200}


@pytest.mark.parametrize("path", ServerConfig().keyless_paths)
async def test_probes_and_the_description_need_no_key(path: str) -> None:
    assert (await client(api_key=["sk-one"]).get(path)).status_code != 401


async def test_the_keyless_paths_are_the_operators_choice() -> None:
    async with client(api_key=["sk-one"], keyless_paths=("/metrics",)) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/livez")).status_code == 401


@pytest.mark.parametrize(
    "path", ["/livez/", "/livez/../v1/models", "//livez", "/LIVEZ", "/v1/models?/livez", "/docs/x"]
)
async def test_a_path_that_only_looks_like_a_keyless_one_needs_a_key(path: str) -> None:
    transport = httpx.ASGITransport(application(api_key=["sk-one"]))
    url = httpx.URL("http://kaon").copy_with(raw_path=path.encode())
    async with httpx.AsyncClient(transport=transport) as http:
        assert (await http.get(url)).status_code == 401


async def test_a_key_file_has_a_key_a_line_and_comments(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("# of the team\nsk-a\n\n  sk-b  # of the batch jobs\n")
    async with client(api_key_file=str(tmp_path / "keys")) as http:
        for key, status in (("sk-a", 200), ("sk-b", 200), ("of", 401), ("#", 401)):
            assert (await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == status


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# none\n", "holds no key"),
        ("sk-a\na b\n", "keys, whose line 2 is empty, or has a space"),
        (None, "cannot be read: No such file or directory$"),
    ],
)
def test_a_key_file_that_opens_nothing_is_refused_with_a_sentence(tmp_path: Any, text: str | None, said: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=said):
        ApiKeys.of(ServerConfig(api_key_file=str(file)))


@pytest.mark.parametrize("key", ["", "a b", "schlüssel", "a\n"])
def test_a_key_that_no_header_carries_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ValueError, match=r"^api_key holds a key that is empty.*no client could send it") as reported:
        ApiKeys([key])
    assert not key or key not in str(reported.value)


def test_a_ring_keeps_no_key_and_names_owners_apart() -> None:
    ring = ApiKeys(["sk-one", "sk-two"])
    assert "sk-one" not in str(vars(ring))
    one, two = ring.owner(b"sk-one"), ring.owner(b"sk-two")
    assert one != two
    assert "sk-one" not in str(one)
    assert ring.owner(b"sk-on") is None


@pytest.mark.parametrize(("settings", "owned"), [({"api_key": ["sk-one"]}, True), ({}, False)])
async def test_a_request_has_an_owner_where_keys_are_asked_for(settings: dict[str, Any], owned: bool) -> None:
    seen: list[Owner] = []

    async def whose(request: Request) -> Response:
        seen.append(owner_of(request.scope))
        return Response()

    app = application(**settings)
    app.add_route("/whose", whose)
    await client_of(app).get("/whose", headers=KEY)
    [owner] = seen
    assert (owner.key is not None) == owned
    assert owner.party == (owner.key or "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "party"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.7%eth0", "10.0.0.7"),
        ("10.0.0.7%eth0", "10.0.0.7%eth0"),
        ("testclient", "testclient"),
        ("x" * 60_000, "x" * 64),
        (None, "local"),
    ],
)
def test_a_client_without_a_key_is_its_address(host: str | None, party: str) -> None:
    assert Owner.of_address(host) == Owner(party, None)


# -- request ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/v1/completions", "/nowhere", "/openapi.json"])
async def test_the_clients_request_id_is_on_every_answer(path: str) -> None:
    answer = await client().get(path, headers={"X-Request-Id": "trace-7/a"})
    assert answer.headers.get_list("x-request-id") == ["trace-7/a"]
    assert int(answer.headers["openai-processing-ms"]) >= 0


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"caf\xe9", b"a\tb"])
async def test_an_id_that_is_not_fit_for_a_log_line_is_replaced(given: bytes) -> None:
    answer = await client().get("/livez", headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"].startswith("req_")


async def test_requests_without_an_id_get_one_each() -> None:
    async with client() as http:
        ids = {(await http.get("/livez")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_a_401_and_a_bug_have_ids_too(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = await client(api_key=["sk-one"]).get("/v1/models", headers={"X-Request-Id": "mine"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
    app = application()
    monkeypatch.setattr(app.state.models.shared.metrics, "render", lambda: 1 / 0)
    failed = await client_of(app).get("/metrics", headers={"X-Request-Id": "mine"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (500, "mine")


# -- CORS -------------------------------------------------------------------------------------------------------

PREFLIGHT = {
    "Origin": "https://chat.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


async def test_cors_is_off_unless_origins_are_allowed() -> None:
    async with client() as http:
        assert (await http.options("/v1/models", headers=PREFLIGHT)).status_code == 405
        answer = await http.get("/v1/models", headers={"Origin": "https://chat.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)


async def test_a_preflight_needs_no_key_and_the_request_itself_does() -> None:
    async with client(api_key=["sk-one"], allowed_origins=("https://chat.example",)) as http:
        preflight = await http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = await http.get("/v1/models", headers={"Origin": "https://chat.example"})
        # Without this header the page could not even read that its key is wrong.
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
        assert "X-Request-Id" in refused.headers["access-control-expose-headers"]


async def test_other_origins_get_no_headers() -> None:
    async with client(allowed_origins=("https://chat.example",)) as http:
        answer = await http.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert (await http.options("/v1/models", headers={**PREFLIGHT, "Origin": "https://evil.example"})).is_error


@pytest.mark.parametrize(
    "origin",
    [
        "chat.example",
        "https://chat.example/",
        "https://Chat.example",
        "https://*.example",
        "https://",
        "http://[::1",
        "http://[abc]",
        "http://chat.example:web",
        "",
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_origins"):
        ServerConfig(allowed_origins=("https://fine.example:8443", origin))


@pytest.mark.parametrize("origin", ["*", "null", "http://localhost:3000", "https://[::1]:3000", "app+x://y"])
def test_origins_that_browsers_send_are_taken(origin: str) -> None:
    assert ServerConfig(allowed_origins=(origin,)).allowed_origins == (origin,)


def test_credentials_for_any_origin_are_refused() -> None:
    with pytest.raises(ValueError, match="name the origins one by one"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)


# -- pages of other sites, which a browser lets send requests to this machine -----------------------------------

EVIL = {"Origin": "https://evil.example"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # A body without a type, a form and no body: browsers send these without a preflight request.
        ("/v1/completions", {"content": b'{"model": "kaon-demo", "prompt": "x"}'}),
        ("/v1/files", {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}),
        ("/sleep", {}),
        ("/v1/responses/resp_1/cancel", {}),
    ],
)
async def test_a_page_of_another_site_sends_nothing_to_a_server_without_keys(path: str, body: dict[str, Any]) -> None:
    async with client() as http:
        answer = await http.post(path, **body, headers=EVIL)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "https://evil.example" in answer.json()["error"]["message"]
        assert "--allowed-origins https://evil.example" in answer.json()["error"]["message"]
        assert (await http.post(path, **body)).status_code != 403


@pytest.mark.parametrize(
    "origin", ["null", "https://evil.example:80 --insecure-no-auth", f"https://{'e' * 200}.example"]
)
async def test_a_refusal_names_no_flag_with_what_is_no_origin(origin: str) -> None:
    answer = await client().post("/sleep", headers={"Origin": origin})
    assert answer.status_code == 403
    assert "--allowed-origins" in answer.json()["error"]["message"]
    assert f"--allowed-origins {origin[:20]}" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "settings", "status"),
    [
        ("null", {}, 403),  # A sandboxed frame, of any site.
        ("null", {"allowed_origins": ("null",)}, 503),
        ("https://evil.example", {"allowed_origins": ("https://chat.example",)}, 403),
        ("https://evil.example", {"insecure_no_auth": True}, 403),
        ("https://chat.example", {"allowed_origins": ("https://chat.example",)}, 503),
        ("https://evil.example", {"allowed_origins": ("*",)}, 503),
        ("http://localhost.evil.example", {}, 403),
        ("http://127.0.0.1.evil.example", {}, 403),
        ("http://kaon", {}, 503),  # Its own page.
        ("http://localhost:3000", {}, 503),
        ("http://[::1]:3000", {}, 503),
        ("http://0.0.0.0:3000", {}, 503),
        ("http://[::ffff:127.0.0.1]:3000", {}, 503),
        ("chrome-extension://abcdef", {}, 503),
    ],
)
async def test_own_local_and_allowed_pages_may_use_a_server_without_keys(
    origin: str, settings: dict[str, Any], status: int
) -> None:
    async with client(**settings) as http:
        body = {"model": "kaon-demo", "prompt": "x"}
        assert (await http.post("/v1/completions", json=body, headers={"Origin": origin})).status_code == status


async def test_the_browsers_word_that_a_page_is_the_servers_own_counts_behind_a_proxy() -> None:
    headers = {"Origin": "https://llm.example", "Sec-Fetch-Site": "same-origin"}
    body = {"model": "kaon-demo", "prompt": "x"}
    assert (await client().post("/v1/completions", json=body, headers=headers)).status_code == 503


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("evil.example:8000", {"insecure_no_auth": True}, 403),
        ("evil.example", {"ssl_ca_certs": "/authorities.pem"}, 403),
        ("localhost:8000", {"insecure_no_auth": True}, 503),
        ("192.168.1.2:8000", {"insecure_no_auth": True}, 503),
        ("llm.lan", {"insecure_no_auth": True, "allowed_origins": ("http://llm.lan",)}, 503),
    ],
)
async def test_a_page_whose_name_resolves_to_this_machine_sends_nothing_whatever_is_set(
    host: str, settings: dict[str, Any], status: int
) -> None:
    async with client(**settings) as http:
        body = {"model": "kaon-demo", "prompt": "x"}
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == status


async def test_a_page_of_another_site_with_a_key_is_served() -> None:
    body = {"model": "kaon-demo", "prompt": "x"}
    answer = await client(api_key=["sk-one"]).post("/v1/completions", json=body, headers={**KEY, **EVIL})
    assert answer.status_code == 503


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("evil.example:8000", {}, 403),
        ("evil.example.", {}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("chat.example", {"allowed_origins": ("https://chat.example",)}, 200),
        ("obsidian.md", {"allowed_origins": ("app://obsidian.md",)}, 403),
        ("evil.example", {"insecure_no_auth": True}, 200),
        ("evil.example", {"ssl_ca_certs": "/authorities.pem"}, 200),
        ("localhost:8000", {}, 200),
        ("127.0.0.1:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("kaon.localhost", {}, 200),
        ("host.docker.internal:8000", {}, 200),
        ("kaon:8000", {}, 200),
        ("", {}, 200),
    ],
)
async def test_a_page_whose_name_resolves_to_this_machine_reads_nothing(
    host: str, settings: dict[str, Any], status: int
) -> None:
    async with client(**settings) as http:
        answer = await http.get("/version", headers={"Host": host})
        assert answer.status_code == status
        if status == 403:
            message = answer.json()["error"]["message"]
            assert f"--allowed-origins https://{host.partition(':')[0].removesuffix('.')}" in message
            assert "--insecure-no-auth" not in message
        assert (await http.get("/livez", headers={"Host": host})).status_code == 200


async def test_requests_are_counted_by_route_and_status() -> None:
    async with client() as http:
        for path in ("/livez", "/v1/models/one", "/v1/models/a/b", "/nowhere/1", "/nowhere/2"):
            await http.get(path)
        text = (await http.get("/metrics")).text
    counted = dict(re.findall(r'^kaon_http_requests_total\{method="GET",(.*)\} (\S+)$', text, re.M))
    assert counted == {
        'route="/livez",status="200"': "1.0",
        'route="/v1/models/{model:path}",status="404"': "2.0",
        'route="none",status="404"': "2.0",
    }


# -- access log -------------------------------------------------------------------------------------------------


async def test_a_request_is_one_line_without_its_query(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "httpx")
    caplog.set_level(logging.INFO, "server.access_log")
    await client().get("/v1/models?api_key=sk-secret", headers={"X-Request-Id": "trace-7"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "server.access_log"]
    assert "GET /v1/models 200 " in line
    assert ' trace-7 agent="python-httpx/' in line
    assert "sk-secret" not in caplog.text


async def test_a_refused_request_is_logged_with_its_reason_and_no_line_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server.access_log")
    async with client(api_key=["sk-one"]) as http:
        await http.get("/v1/models")
        await http.get('/no"where', headers={**KEY, "User-Agent": 'evil\tfinish=stop "x'})
    first, second = [record.getMessage() for record in caplog.records if record.name == "server.access_log"]
    assert 'error="the request has no API key; send one as Authorization: Bearer KEY, or as x-api-key"' in first
    assert " key=" not in first
    assert f" key={hashlib.sha256(b'sk-one').hexdigest()[:12]} " in second
    assert ' agent="evil\\tfinish=stop \'x" error="/no\'where is not a path of this server' in second


async def test_a_json_line_has_every_part(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server.access_log")
    answer = await client(access_log="json").get("/v1/nothing%0Ahere", headers={"X-Request-Id": "trace-7"})
    (record,) = (record for record in caplog.records if record.name == "server.access_log")
    assert BARE.items() <= vars(record).items()  # Its line contains nothing else.
    entry = json.loads(record.getMessage())
    assert (entry["method"], entry["path"], entry["status"]) == ("GET", "/v1/nothing%0Ahere", 404)
    assert (entry["bytes"], entry["request_id"]) == (len(answer.content), "trace-7")
    assert entry["seconds"] >= 0


PROBES = {"/livez": 200, "/metrics": 200, "/readyz": 503, "/health": 503, "/ping": 503}


@pytest.mark.parametrize(("path", "status"), PROBES.items())
async def test_probes_and_scrapes_are_logged_at_debug_only_also_while_the_model_loads(
    path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.access_log")
    async with client() as http:
        assert (await http.get(path)).status_code == (await http.head(path)).status_code == status
        assert caplog.records == []
        caplog.set_level(logging.DEBUG, "server.access_log")
        await http.get(path)
    assert f"{path} {status}" in caplog.text


async def test_a_probe_that_fails_for_another_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server.access_log")
    await client(api_key=["sk-one"]).get("/metrics")
    assert "/metrics 401" in caplog.text


async def test_no_access_log_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server.access_log")
    await client(access_log="none").get("/v1/models")
    assert caplog.records == []


@pytest.mark.parametrize("is_json", [False, True])
async def test_an_error_without_a_message_is_not_logged(is_json: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        facts_of(scope).error = ""
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body"})

    async def send(message: Any) -> None: ...

    caplog.set_level(logging.INFO)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await RequestIdMiddleware(fails, AccessLog(json=is_json), Metrics("1"))(scope, None, send)  # type: ignore[arg-type]
    assert "/v1/completions" in caplog.text
    assert "error" not in caplog.text


async def test_a_client_that_leaves_is_logged_as_499(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def send(message: Any) -> None: ...

    caplog.set_level(logging.INFO)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await RequestIdMiddleware(breaks_off, AccessLog(json=False), Metrics("1"))(scope, None, send)  # type: ignore[arg-type]
    assert "/v1/completions 499 4 B" in caplog.text


# -- paths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/images/generations", "/v1/moderations"])
async def test_what_openai_has_and_this_server_has_not_is_a_404_that_says_so(path: str) -> None:
    answer = await client().post(path, json={})
    assert answer.status_code == 404
    assert "which this server does not have" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/completion", "/v1/completions"),
    ],
)
async def test_a_path_that_is_nearly_one_gets_a_hint(path: str, meant: str) -> None:
    answer = await client().post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"{path} is not a path of this server; did you mean {meant}?"


@pytest.mark.parametrize("path", ["/", "/generate", "/v1", "/" + "v1/models" * 5000])
async def test_another_path_gets_the_place_of_the_list(path: str) -> None:
    answer = await client().get(path + "x")
    assert answer.json()["error"]["message"] == f"{path}x is not a path of this server; /docs lists them"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/models", "GET, HEAD"),
        ("GET", "/tokenize", "POST"),
        ("PATCH", "/v1/responses/resp_1", "GET, HEAD, DELETE"),
        ("PUT", "/v1/responses/input_tokens", "POST"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("TRACE", "/", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_gets_every_right_one(method: str, path: str, allowed: str) -> None:
    answer = await client().request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert allowed in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models"])
async def test_behind_a_prefix_requests_come_with_it_or_without(path: str) -> None:
    assert (await client(root_path="/llm").get(path)).status_code == 200


async def test_the_description_is_created_while_the_model_loads() -> None:
    app = application()  # Its core never becomes ready.
    async with app.router.lifespan_context(app), asyncio.timeout(60):
        while app.openapi_schema is None:
            await asyncio.sleep(0.01)


async def test_behind_a_prefix_links_and_description_have_it_and_keys_do_not_mind() -> None:
    async with client(root_path="/llm", api_key=["sk-one"]) as http:
        assert (await http.get("/llm/v1/models")).status_code == 401
        assert (await http.get("/llm/livez")).status_code == 200
        assert (await http.get("/llm", headers=KEY)).status_code in (200, 404)
        welcome = (await http.get("/", headers=KEY)).json()
        assert (welcome["docs"], welcome["models"]) == ("/llm/docs", "/llm/v1/models")
        assert (await http.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]
        assert "/llm/openapi.json" in (await http.get("/llm/docs")).text


async def test_a_browser_gets_a_page_with_links_and_an_icon() -> None:
    async with client(root_path="/llm", api_key=["sk-one"]) as http:
        page = await http.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert set(re.findall(r'href="([^"]+)"', page.text)) == {
            "/llm/favicon.ico",
            "/llm/docs",
            "/llm/v1/models",
            "/llm/readyz",
            "/llm/metrics",
            "/llm/openapi.json",
        }
        icon = await http.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
    ElementTree.fromstring(icon.text)


@pytest.mark.parametrize("media_type", ["text/plain", "multipart/form-data", "x"])
async def test_a_body_that_says_it_is_no_json_is_415(media_type: str) -> None:
    answer = await client().post("/v1/completions", content=b"{}", headers={"Content-Type": media_type})
    assert answer.status_code == 415
    assert media_type in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("client_host", "headers", "status"),
    [
        ("127.0.0.1", {}, 503),
        ("::1", {}, 503),
        ("::ffff:127.0.0.1", {}, 503),
        ("10.0.0.7", {}, 415),
        # A page in a browser may send this type to any address without a preflight request.
        ("127.0.0.1", {"Origin": "https://chat.example"}, 415),
    ],
)
async def test_curls_default_media_type_is_json_on_this_machine(
    client_host: str, headers: dict[str, str], status: int
) -> None:
    app = application(allowed_origins=("https://chat.example",))
    transport = httpx.ASGITransport(app, client=(client_host, 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://kaon") as http:
        headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        answer = await http.post("/v1/completions", content=b'{"model": "kaon-demo", "prompt": "x"}', headers=headers)
    assert answer.status_code == status


async def test_a_compressed_body_is_415() -> None:
    body = gzip.compress(b'{"prompt": "Hi"}')
    answer = await client().post("/v1/completions", content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "Content-Encoding is gzip; send the body uncompressed" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Type": "Application/JSON"},
        {"Content-Encoding": "identity"},
    ],
)
async def test_json_by_any_spelling_and_a_body_without_type_are_read(headers: dict[str, str]) -> None:
    answer = await client().post("/v1/completions", content=b"[]", headers=headers)
    assert answer.status_code == 400
    assert "must be a JSON object" in answer.json()["error"]["message"]
