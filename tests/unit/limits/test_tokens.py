"""JSON Web Tokens in place of keys: accepted ones, refused forgeries, and the fetching of the issuer's keys."""

import asyncio
import base64
import hashlib
import hmac
import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from engine.config.server import ServerConfig
from server.app import create_app
from server.errors import InvalidApiKey, NotReady
from server.limits import tokens
from server.limits.keys import ApiKeys
from server.limits.owners import Owner, digest_of
from server.limits.tokens import KeySource, TokenVerifier

ISSUER, AUDIENCE = "https://login.example", "kaon"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
PUBLIC_PEM = RSA_KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)


def public(key: Any, id: str, **members: Any) -> dict[str, Any]:
    algorithm = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": id, **members}


KEYS = {
    "keys": [
        public(RSA_KEY, "rsa", use="sig"),
        public(EC_KEY, "ec"),
        public(OTHER_KEY, "encryption", use="enc"),
        {"kty": "oct", "kid": "secret", "k": "AAAA"},
        {"kty": "EC", "kid": "new curve", "crv": "P-999", "x": "AA", "y": "AA"},
    ]
}


def token(key: Any = RSA_KEY, algorithm: str = "RS256", id: str | None = "rsa", **claims: Any) -> bytes:
    now = int(time.time())
    body = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 600, **claims}
    body = {name: value for name, value in body.items() if value is not None}
    headers = {} if id is None else {"kid": id}
    return jwt.encode(body, key, algorithm=algorithm, headers=headers).encode()


def part(value: dict[str, Any]) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")


def forged(header: dict[str, Any], secret: bytes | None, **claims: Any) -> bytes:
    """A token that no library would create: unsigned, or signed with the public key as if it were a secret."""
    body = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600, **claims}
    signed = part(header) + b"." + part(body)
    signature = b"" if secret is None else hmac.new(secret, signed, hashlib.sha256).digest()
    return signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jwks") / "keys.json"
    path.write_text(json.dumps(KEYS))
    return path


@pytest.fixture(scope="module")
def verifier(file: Path) -> TokenVerifier:
    found = TokenVerifier.of(ServerConfig(jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_jwks_file=str(file)))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("key", "algorithm", "id"),
    [(RSA_KEY, "RS256", "rsa"), (RSA_KEY, "PS384", "rsa"), (EC_KEY, "ES256", "ec")],
)
async def test_a_token_of_the_issuer_stands_for_its_subject(
    verifier: TokenVerifier, key: Any, algorithm: str, id: str
) -> None:
    owner = await verifier.owner(token(key, algorithm, id))
    assert (owner.name, owner.scopes) == ("alice", {"inference"})
    assert owner.party == f"subject {owner.key}"
    other = await verifier.owner(token(key, algorithm, id, sub="bob"))
    assert other.party != owner.party
    again = await verifier.owner(token(key, algorithm, id, jti="2"))
    assert again == owner


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({}, {"inference"}),
        ({"scope": "openid inference metrics"}, {"inference", "metrics"}),
        ({"scp": ["admin", "else"]}, {"admin"}),
        ({"scope": "openid"}, set()),
        ({"scope": 7}, set()),
    ],
)
async def test_the_claim_scope_says_what_a_token_opens(
    verifier: TokenVerifier, claims: dict[str, Any], scopes: set[str]
) -> None:
    assert (await verifier.owner(token(**claims))).scopes == scopes


async def test_a_subject_writes_nothing_of_its_own_into_a_log(verifier: TokenVerifier) -> None:
    owner = await verifier.owner(token(sub="a b\n\x1b[31m" + "x" * 500))
    assert owner.name == "a_b___31m" + "x" * 55


NOW = int(time.time())
HOSTILE = {
    "unsigned": forged({"alg": "none", "kid": "rsa"}, None),
    "unsigned in capitals": forged({"alg": "NONE", "kid": "rsa"}, None),
    "signed with the public key as secret": forged({"alg": "HS256", "kid": "rsa"}, PUBLIC_PEM),
    "signed with a secret of the set": forged({"alg": "HS256", "kid": "secret"}, b"\0\0\0"),
    "algorithm that is no text": forged({"alg": ["RS256"], "kid": "rsa"}, b""),
    "signed by another key": token(OTHER_KEY),
    "signed by a key for encryption": token(OTHER_KEY, id="encryption"),
    "unknown key": token(id="who"),
    "no key id": token(id=None),
    "key id of another kind of key": token(RSA_KEY, "RS256", "ec"),
    "algorithm of another kind of key": token(EC_KEY, "ES256", "rsa"),
    "expired": token(exp=NOW - 3600),
    "not yet valid": token(nbf=NOW + 3600),
    "without expiry": token(exp=None),
    "without subject": token(sub=None),
    "empty subject": token(sub=""),
    "expiry that is infinite": token(exp=math.inf),
    "start that is infinite": token(nbf=-math.inf),
    "audience within lists": token(aud=[[AUDIENCE]]),
    "audience as an object": token(aud={AUDIENCE: True}),
    "subject that is a list": token(sub=["alice"]),
    "of another issuer": token(iss="https://evil.example"),
    "for another audience": token(aud="else"),
    "without audience": token(aud=None),
    "changed after it was signed": token()[:-40] + b"A" * 40,
    "key of its own in the header": jwt.encode(
        {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": NOW + 600},
        OTHER_KEY,
        algorithm="RS256",
        headers={"jwk": public(OTHER_KEY, "own"), "jku": "http://127.0.0.1:1/keys", "kid": "own"},
    ).encode(),
    "huge": token(pad="x" * 50_000),
    "nonsense": b"a.b.c",
    "empty parts": b"..",
    "nested deeply": base64.urlsafe_b64encode(b'{"alg":' + b"[" * 5000 + b"]" * 5000 + b"}") + b".e30.x",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_forged_token_is_accepted(verifier: TokenVerifier, name: str) -> None:
    with pytest.raises(InvalidApiKey, match="the token is not accepted: ") as refused:
        await verifier.owner(HOSTILE[name])
    assert refused.value.status == 401
    assert len(str(refused.value)) < 300


async def test_clocks_may_differ_a_little(verifier: TokenVerifier) -> None:
    await verifier.owner(token(exp=int(time.time()) - 5))
    await verifier.owner(token(nbf=int(time.time()) + 5))


async def test_keys_and_tokens_are_accepted_side_by_side(verifier: TokenVerifier) -> None:
    keys = ApiKeys(["sk-one", "sk.two.dots"], tokens=verifier)
    assert await keys.authenticate(b"sk-one") == keys.owner(b"sk-one")
    assert await keys.authenticate(b"sk.two.dots") == keys.owner(b"sk.two.dots")
    found = await keys.authenticate(token())
    assert isinstance(found, Owner)
    assert found.name == "alice"
    assert await keys.authenticate(b"sk-two") is None
    assert bool(ApiKeys(tokens=verifier))


async def test_a_revoked_key_is_not_taken_for_a_subject(verifier: TokenVerifier, tmp_path: Path) -> None:
    """Its batches went on, without its quotas, wherever tokens were accepted too."""
    file = tmp_path / "keys"
    file.write_text("sk-one\nsk-two\n")
    keys = ApiKeys(file=file, tokens=verifier)
    one, subject = keys.owner(b"sk-one"), await keys.authenticate(token())
    assert one is not None
    assert subject is not None
    assert one.key == one.party == digest_of("sk-one")
    assert (subject.party, subject.key) == (f"subject {subject.key}", digest_of(f"{ISSUER}\0alice"))
    assert keys.holder(digest_of("sk-one")) == one
    file.write_text("sk-two\n")
    keys.reload()
    assert keys.holder(digest_of("sk-one")) is None
    held = keys.holder(subject.party)
    assert held is not None
    assert (held.party, held.key) == (subject.party, subject.key)
    assert ApiKeys(file=file).holder(subject.party) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"jwt_audience": "a"}, "jwt_issuer is not"),
        ({"jwt_issuer": "i"}, "jwt_audience is not"),
        ({"jwt_issuer": "i", "jwt_audience": "a"}, "set one of jwt_jwks_url and jwt_jwks_file"),
        ({"jwt_issuer": "i", "jwt_audience": "a", "jwt_jwks_file": "/none"}, "jwt_jwks_file is /none"),
        ({"jwt_issuer": "i", "jwt_audience": "a", "jwt_jwks_url": "http://login.example/k"}, "must begin with https"),
    ],
)
def test_settings_that_do_not_fit_together_are_a_sentence(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TokenVerifier.of(ServerConfig(**settings))


class KeyServer(ThreadingHTTPServer):
    """Answers with a set of keys, and counts the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = json.dumps(KEYS).encode()
        self.status = 200
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/keys"


class _Handler(BaseHTTPRequestHandler):
    server: KeyServer

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def key_server() -> Iterator[KeyServer]:
    server = KeyServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Source:
    """Keys from a server, with a clock of the test's own."""

    def __init__(self, server: KeyServer) -> None:
        self.now = 1000.0
        self.keys = KeySource(server.url, None, lambda: self.now)
        self.verifier = TokenVerifier(ISSUER, AUDIENCE, self.keys)

    async def is_accepted(self, given: bytes) -> bool:
        try:
            await self.verifier.owner(given)
        except InvalidApiKey:
            return False
        return True

    async def settle(self) -> None:
        if self.keys._fetching is not None:
            await self.keys._fetching


async def test_keys_are_fetched_once_and_again_when_they_are_old(key_server: KeyServer) -> None:
    source = Source(key_server)
    for _ in range(5):
        assert await source.is_accepted(token())
    assert key_server.asked == 1
    source.now += 700
    assert await source.is_accepted(token())
    await source.settle()
    assert key_server.asked == 2


async def test_the_event_loop_does_not_read_the_systems_authorities_for_a_fetch(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    class Client(httpx.AsyncClient):
        def __init__(self) -> None:
            threads.append(threading.current_thread())
            super().__init__()

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    assert await Source(key_server).is_accepted(token())
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_new_key_is_found_and_unknown_ones_do_not_make_the_server_fetch_all_the_time(
    key_server: KeyServer,
) -> None:
    source = Source(key_server)
    assert await source.is_accepted(token())
    for number in range(50):
        assert not await source.is_accepted(token(OTHER_KEY, id=f"guess{number}"))
    assert key_server.asked == 1
    key_server.content = json.dumps({"keys": [public(OTHER_KEY, "new")]}).encode()
    source.now += 11
    assert await source.is_accepted(token(OTHER_KEY, id="new"))
    assert not await source.is_accepted(token())
    assert key_server.asked == 2


@pytest.mark.parametrize("fault", ["status", "content", "size", "gone"])
async def test_while_the_issuer_fails_known_keys_stay_and_it_is_asked_ever_less_often(
    key_server: KeyServer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(key_server)
    assert await source.is_accepted(token())
    if fault == "status":
        key_server.status = 500
    elif fault == "content":
        key_server.content = b'{"keys": []}'
    elif fault == "size":
        key_server.content = b" " * (2**20 + 1) + key_server.content
    else:
        source.keys._url = "http://127.0.0.1:1/keys"
    source.now += 700
    fetches = 0
    for _ in range(120):
        source.now += 10
        warned = len(caplog.records)
        assert await source.is_accepted(token())
        await source.settle()
        fetches += len(caplog.records) > warned
    assert 5 <= fetches <= 9
    assert "the 2 known ones stay" in caplog.text


async def test_few_requests_wait_for_an_issuer_that_stalls_and_none_with_a_known_key(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can send an unknown key id. Each request that waits holds one of the connections that are served."""
    source = Source(key_server)
    await source.verifier.prepare()
    assert key_server.asked == 1
    answering = asyncio.Event()

    async def stall(url: str) -> bytes:
        await answering.wait()
        return json.dumps({"keys": [*KEYS["keys"], public(OTHER_KEY, "new")]}).encode()

    monkeypatch.setattr(tokens, "_download", stall)
    source.now += 11
    guesses = [asyncio.create_task(source.is_accepted(token(OTHER_KEY, id=f"guess{each}"))) for each in range(200)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sum(not each.done() for each in guesses) == 4
    assert await source.is_accepted(token())
    with pytest.raises(NotReady):
        await source.verifier.owner(token(OTHER_KEY, id="new"))
    answering.set()
    await asyncio.wait(guesses)
    assert sum(isinstance(each.exception(), NotReady) for each in guesses) == 196
    assert await source.is_accepted(token(OTHER_KEY, id="new"))


async def test_keys_are_not_waited_for_without_limit_where_all_threads_are_busy(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokens, "_FETCH_SECONDS", 0.01)
    may_end = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        busy = asyncio.get_running_loop().run_in_executor(None, may_end.wait)
        try:
            async with asyncio.timeout(10):
                await Source(key_server).verifier.prepare()
        finally:
            may_end.set()
            await busy
    assert "cannot be fetched" in caplog.text
    assert key_server.asked == 0


async def test_a_verified_token_is_known_until_it_expires_or_keys_are_fetched_without_its_own(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(key_server)
    keys, given = ApiKeys(tokens=source.verifier), token()
    headers = [(b"authorization", b"Bearer " + given)]
    assert keys.known_owner(headers) is None
    owner = await keys.authenticate(given)
    assert owner is not None
    assert keys.known_owner(headers) == owner
    assert keys.known_owner([(b"authorization", b"Bearer " + given[:-1])]) is None
    with monkeypatch.context() as later:
        later.setattr(tokens, "time", SimpleNamespace(time=lambda: time.time() + 10**6))
        assert keys.known_owner(headers) is None
    key_server.content = json.dumps({"keys": [public(OTHER_KEY, "new")]}).encode()
    source.now += 700
    assert await keys.authenticate(given) == owner, "old keys are used while new ones are fetched"
    await source.settle()
    assert keys.known_owner(headers) is None
    with pytest.raises(InvalidApiKey):
        await keys.authenticate(given)


async def test_a_verified_token_stays_known_when_an_unknown_key_id_causes_a_fetch_of_the_same_keys(
    key_server: KeyServer,
) -> None:
    """Otherwise anybody could make the server forget all tokens, as often as it fetches."""
    source, given = Source(key_server), token()
    assert await source.is_accepted(given)
    source.now += 11
    assert not await source.is_accepted(token(OTHER_KEY, id="guess"))
    assert key_server.asked == 2
    assert source.verifier.known_owner(given) is not None


async def test_few_verified_tokens_are_remembered(key_server: KeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_MAX_REMEMBERED", 3)
    source = Source(key_server)
    given = [token(sub=f"subject{each}") for each in range(5)]
    for each in given:
        assert await source.is_accepted(each)
    assert [source.verifier.known_owner(each) is not None for each in given] == [False] * 2 + [True] * 3
    assert len(source.verifier._of_subject) == 3


async def test_a_verified_token_that_is_used_stays_known_while_others_are_forgotten(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MAX_REMEMBERED", 3)
    source, used = Source(key_server), token(sub="user")
    assert await source.is_accepted(used)
    for each in range(5):
        assert await source.is_accepted(token(sub=f"subject{each}"))
        assert source.verifier.known_owner(used) is not None


async def test_the_tokens_of_one_subject_do_not_displace_those_of_others(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MAX_REMEMBERED", 6)
    monkeypatch.setattr(tokens, "_MAX_PER_SUBJECT", 3)
    source, other = Source(key_server), token(sub="other")
    assert await source.is_accepted(other)
    given = [token(jti=str(each)) for each in range(8)]
    for each in given:
        assert await source.is_accepted(each)
        assert source.verifier.known_owner(given[0]) is not None, "this one is used"
    known = {each for each in (other, *given) if source.verifier.known_owner(each) is not None}
    assert known == {other, given[0], *given[-2:]}


async def test_a_server_takes_tokens_over_http_and_answers_by_their_scopes(file: Path) -> None:
    config = ServerConfig(jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_jwks_file=str(file))
    core = SimpleNamespace(ready=None, failure=None, serving=(), local_pids=(None,))
    app = create_app(Config(server_config=config), cast(CoreManager, core))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kaon") as http:

        async def status(path: str, given: bytes | None) -> int:
            headers = {} if given is None else {"Authorization": f"Bearer {given.decode()}"}
            return (await http.get(path, headers=headers)).status_code

        assert await status("/v1/models", token()) == 200
        assert await status("/metrics", token()) == 403
        assert await status("/metrics", token(scope="metrics")) == 200
        for given in (None, HOSTILE["unsigned"], HOSTILE["expired"], b"sk-none"):
            assert await status("/v1/models", given) == 401
        limits = (await http.get("/kaon/limits", headers={"x-api-key": token().decode()})).json()
    assert (limits["name"], limits["scopes"]) == ("alice", ["inference"])
