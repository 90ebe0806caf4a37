"""`TokenVerifier`: accepts JSON Web Tokens of one OpenID Connect issuer in place of API keys. Needs `kaon[jwt]`.

A token's signature is checked with the issuer's public keys, which `KeySource` caches. The subject is the owner, and
the claim `scope` (or `scp`) lists the paths that the token opens.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from engine.config.paths import read_small_file, why_unreadable
from engine.config.server import ServerConfig
from server.errors import InvalidApiKey, NotReady
from server.limits.owners import ALL_SCOPES, Owner, Scope

if TYPE_CHECKING:
    import httpx
    from jwt import PyJWK

_log = logging.getLogger(__name__)

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""Algorithms that sign with a private key. With `none`, or with an HS algorithm whose secret would be the public key,
anybody could sign a token."""

SUBJECT_PREFIX = "subject "
"""Begins `Owner.party` of each subject, so that no revoked API key is taken for one."""

_LEEWAY_SECONDS = 30
"""Accepted difference between the issuer's clock and this host's."""

_MAX_TOKEN_BYTES = 16 * 2**10
_MAX_KEYS_BYTES = 2**20
_SAFE_URLS = ("https://", "http://127.0.0.1:", "http://localhost:", "http://[::1]:")
_MAX_NAME = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9._@-]")
"""Characters of a subject that logs do not show."""

_FRESH_SECONDS = 600.0
"""Age after which the next token causes the issuer's keys to be fetched again."""

_FETCH_SECONDS = 5.0
_MIN_PAUSE, _MAX_PAUSE = 10.0, 300.0
"""Seconds between two fetches, doubled by each failure: tokens with unknown key ids must not cause constant
fetches."""

_MAX_REMEMBERED, _MAX_PER_SUBJECT = 4096, 64
"""Most tokens whose verification is remembered, and most of one subject. The least recently used one is forgotten."""

_MAX_WAITING = 4
"""Most requests that wait for a fetch. Anybody can send a token with an unknown key id, and each waiting request holds
a connection of those that may be served."""


class KeySource:
    """The issuer's public keys (JWKS, RFC 7517), by their ids, from a URL or a file."""

    def __init__(self, url: str | None, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """If `file` is given, it is read at once. Raises `ValueError` if it cannot be used."""
        self._url = url
        self._clock = clock
        self._keys: dict[str | None, PyJWK] = {}
        self._fetched_at: float | None = None
        self._next_fetch = 0.0
        self._pause = _MIN_PAUSE
        self._fetching: asyncio.Task[None] | None = None
        self._num_waiting = 0
        self._content = b""
        """The latest set that was fetched."""
        self.num_changes = 0
        """How often a fetched set differed from the one before. Anybody can cause a fetch, by an unknown key id."""
        if file is not None:
            try:
                self._keys = _public_keys(read_small_file(file).encode())
            except (OSError, ValueError) as error:
                why = why_unreadable(error) if isinstance(error, OSError) else str(error)
                raise ValueError(f"jwt_jwks_file is {file}, which cannot be used: {why}") from error

    async def key(self, id: str | None) -> "PyJWK | None":
        """Return the key with this id; without an id, the only key. Fetches the keys if they are old or lack this
        one. Raises `NotReady` if many requests wait for a fetch already."""
        self.renew()  # Meanwhile an old key is used: the issuer's server may be slow, or down.
        known = self._find(id)
        if known is None and self._url is not None and (fetching := self._fetch_unless_too_soon()) is not None:
            if self._num_waiting >= _MAX_WAITING:
                raise NotReady("the keys of tokens are being fetched from their issuer; try again in a moment")
            self._num_waiting += 1
            try:
                await asyncio.shield(fetching)
            finally:
                self._num_waiting -= 1
            known = self._find(id)
        return known

    def renew(self) -> None:
        """Begin to fetch the keys if they are old, and have a URL."""
        is_old = self._fetched_at is None or self._clock() - self._fetched_at > _FRESH_SECONDS
        if self._url is not None and is_old:
            self._fetch_unless_too_soon()

    async def prepare(self) -> None:
        """Fetch the keys if they have a URL, so that the first tokens need not wait."""
        if self._url is not None and (fetching := self._fetch_unless_too_soon()) is not None:
            await asyncio.shield(fetching)

    def _find(self, id: str | None) -> "PyJWK | None":
        if id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(id)

    def _fetch_unless_too_soon(self) -> "asyncio.Task[None] | None":
        if self._fetching is None and self._clock() >= self._next_fetch:
            self._next_fetch = self._clock() + self._pause
            self._fetching = asyncio.create_task(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        try:
            content = await _download(self._url or "")
            if content != self._content:
                # A thread parses the keys, because a megabyte of them takes 0.3 s.
                self._keys = await asyncio.to_thread(_public_keys, content)
                self._content = content
                self.num_changes += 1
        except Exception as error:  # noqa: BLE001 - the keys that are known stay, and the next fetch may succeed
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            _log.warning(
                "the keys of tokens cannot be fetched from %s (jwt_jwks_url): %s; the %d known ones stay, and it is "
                "tried again in %g s",
                self._url,
                str(error) or type(error).__name__,
                len(self._keys),
                self._pause,
            )
        else:
            self._pause = _MIN_PAUSE
            self._fetched_at = self._clock()
        finally:
            self._next_fetch = self._clock() + self._pause
            self._fetching = None


def _http_client() -> "httpx.AsyncClient":
    import httpx

    return httpx.AsyncClient()


async def _download(url: str) -> bytes:
    content = b""
    async with asyncio.timeout(_FETCH_SECONDS):
        # In a thread, which may have to be waited for: to read the system's authorities takes 30 ms.
        client = await asyncio.to_thread(_http_client)
        async with client as http, http.stream("GET", url) as answer:
            answer.raise_for_status()
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > _MAX_KEYS_BYTES:
                    raise ValueError(f"it answers with more than {_MAX_KEYS_BYTES} bytes")
    return content


def _public_keys(content: bytes) -> "dict[str | None, PyJWK]":
    """Parse the keys of a JWKS that verify signatures, by id. Raises `ValueError` if there is none."""
    import jwt

    try:
        given = json.loads(content)["keys"]
        keys: dict[str | None, PyJWK] = {}
        for each in given:
            # Other kinds, such as a shared secret (`oct`) or a key for encryption, are skipped.
            if each.get("kty") in ("RSA", "EC", "OKP") and each.get("use", "sig") == "sig":
                # A key on a curve that the library does not know must not make the other keys unusable.
                with contextlib.suppress(jwt.PyJWTError):
                    keys[each.get("kid")] = jwt.PyJWK(each)
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError, jwt.PyJWTError) as error:
        raise ValueError(f"it is not a JSON Web Key Set: {error}") from error
    if not keys:
        raise ValueError("it is a JSON Web Key Set without a public key that verifies signatures")
    return keys


class _Verified(NamedTuple):
    """A verified token."""

    owner: Owner
    ends: float
    """Time since 1970 at which it expires."""
    num_changes: int
    """`KeySource.num_changes` when it was verified: a later set may lack its key."""


class TokenVerifier:
    """Checks tokens of one issuer."""

    def __init__(self, issuer: str, audience: str, keys: KeySource) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = keys
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()
        """Verified tokens by their digests, the one used last at the end."""
        self._of_subject: dict[str, OrderedDict[bytes, None]] = {}
        """Digests of each subject's verified tokens, by `Owner.party`, in the same order."""

    @classmethod
    def of(cls, config: ServerConfig) -> Self | None:
        """Create the verifier that `config` describes; None if it names no issuer. Raises `ValueError` with a
        sentence."""
        if config.jwt_issuer is None:
            for field in ("jwt_audience", "jwt_jwks_url", "jwt_jwks_file"):
                if getattr(config, field) is not None:
                    raise ValueError(f"{field} is set, but jwt_issuer is not; set it too, or leave {field} out")
            return None
        if config.jwt_audience is None:
            raise ValueError("jwt_issuer is set, but jwt_audience is not; set the audience of tokens for this server")
        if (config.jwt_jwks_url is None) == (config.jwt_jwks_file is None):
            raise ValueError("jwt_issuer needs the issuer's keys: set one of jwt_jwks_url and jwt_jwks_file")
        if config.jwt_jwks_url is not None and not config.jwt_jwks_url.startswith(_SAFE_URLS):
            raise ValueError(
                f"jwt_jwks_url is {config.jwt_jwks_url}; it must begin with https://, because whoever changes these "
                "keys on their way can sign tokens"
            )
        try:
            import jwt.algorithms

            has_crypto = jwt.algorithms.has_crypto
        except ImportError:
            has_crypto = False
        if not has_crypto:
            raise ValueError("jwt_issuer needs a library that is not installed; pip install 'kaon[jwt]'")
        file = None if config.jwt_jwks_file is None else Path(config.jwt_jwks_file)
        return cls(config.jwt_issuer, config.jwt_audience, KeySource(config.jwt_jwks_url, file))

    async def prepare(self) -> None:
        """Fetch the issuer's keys. A failure is logged, and the first token tries again."""
        await self._keys.prepare()

    def known_owner(self, token: bytes) -> Owner | None:
        """Return the owner of a token that was verified before, and is still valid; else None."""
        digest = hashlib.sha256(token).digest()
        verified = self._verified.get(digest)
        if verified is None or verified.num_changes != self._keys.num_changes or verified.ends <= time.time():
            return None
        self._verified.move_to_end(digest)
        self._of_subject[verified.owner.party].move_to_end(digest)
        return verified.owner

    async def owner(self, token: bytes) -> Owner:
        """Verify a token and return its subject as the owner. Raises `InvalidApiKey`, and `NotReady` while keys are
        fetched."""
        import jwt

        if (known := self.known_owner(token)) is not None:
            self._keys.renew()
            return known
        if len(token) > _MAX_TOKEN_BYTES:
            raise _refused(f"it has {len(token)} bytes; it may have at most {_MAX_TOKEN_BYTES}")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, RecursionError) as error:
            raise _refused("it is not a JSON Web Token") from error
        algorithm, id = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS:
            raise _refused(f"it is signed with {str(algorithm)[:20]!r}; this server takes {', '.join(ALGORITHMS)}")
        key = await self._keys.key(id)
        num_changes = self._keys.num_changes
        if key is None:
            raise _refused("its key (kid) is not one of the issuer's")
        if key.algorithm_name != algorithm and not (key.key_type == "RSA" and algorithm[:2] in ("RS", "PS")):
            raise _refused(f"it is signed with {algorithm}, which its key (kid) is not for")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise _refused(str(error)) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise _refused("it cannot be read") from error
        owner = self._owner(claims)
        ends = int(claims["exp"]) + _LEEWAY_SECONDS
        self._remember(hashlib.sha256(token).digest(), _Verified(owner, ends, num_changes))
        return owner

    def _remember(self, digest: bytes, verified: _Verified) -> None:
        """Add a verified token as the one used last. One subject's tokens never displace all those of others."""
        self._forget(digest)
        self._verified[digest] = verified
        of_subject = self._of_subject.setdefault(verified.owner.party, OrderedDict())
        of_subject[digest] = None
        if len(of_subject) > _MAX_PER_SUBJECT:
            self._forget(next(iter(of_subject)))
        elif len(self._verified) > _MAX_REMEMBERED:
            self._forget(next(iter(self._verified)))

    def _forget(self, digest: bytes) -> None:
        verified = self._verified.pop(digest, None)
        if verified is not None:
            of_subject = self._of_subject[verified.owner.party]
            del of_subject[digest]
            if not of_subject:
                del self._of_subject[verified.owner.party]

    def _owner(self, claims: dict[str, Any]) -> Owner:
        subject: str = claims["sub"]
        if not subject:
            raise _refused("its subject (sub) is empty, so that it names no owner")
        digest = hashlib.sha256(f"{self._issuer}\0{subject}".encode("utf-8", "surrogatepass")).hexdigest()
        name = _UNSAFE.sub("_", subject[:_MAX_NAME])
        return Owner(SUBJECT_PREFIX + digest, digest, key_name=name, scopes=_scopes(claims))


def _scopes(claims: dict[str, Any]) -> frozenset[Scope]:
    """Return the scopes of a token. A token without the claim opens inference, since its audience is this server."""
    given = claims.get("scope", claims.get("scp"))
    if given is None:
        return frozenset(("inference",))
    words = given.split() if isinstance(given, str) else given if isinstance(given, list) else []
    return frozenset(scope for scope in ALL_SCOPES if scope in words)


def _refused(why: str) -> InvalidApiKey:
    return InvalidApiKey(f"the token is not accepted: {why}")
