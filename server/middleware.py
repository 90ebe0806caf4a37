"""The middleware of every request: `RequestIdMiddleware` outermost, then `OwnerMiddleware`."""

import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access_log import (
    ANTHROPIC_HEADER,
    CLIENT_GONE,
    HEADER,
    REQUEST_ID,
    AccessLog,
    RequestFacts,
    RequestOutcome,
    facts_of,
    new_request_id,
    route_path,
    usable_request_id,
)
from server.error_answers import as_response, speaks_anthropic
from server.errors import ApiError, Forbidden, InvalidApiKey, NotReady
from server.ignored import HEADER as IGNORED_HEADER
from server.ignored import IgnoredLog, collect, header_value
from server.limits.admission import KeyShares
from server.limits.keys import ApiKeys, sent_keys
from server.limits.owners import NO_QUOTAS, Owner
from server.limits.owners import Scope as KeyScope
from server.limits.pages import PageGuard
from server.limits.quotas import QuotaMeter
from server.metrics import Metrics
from server.tracing import RequestTrace, Tracing

_audit_log = logging.getLogger("server.audit")

_ID_HEADER = HEADER.lower().encode()
_ANTHROPIC_ID_HEADER = ANTHROPIC_HEADER.encode()
_PROCESSING_HEADER = b"openai-processing-ms"
_IGNORED_HEADER = IGNORED_HEADER.encode()
_LOAD_HEADER = b"endpoint-load-metrics-format"
"""Request header of ORCA load reports: a router asks for the header `endpoint-load-metrics` in the answer."""


class RequestIdMiddleware:
    """Gives each request an id, sends the id with the answer, and logs and counts the request when it has ended.

    It is the outermost layer, so that every answer, error answers included, has an id and a line in the log.
    """

    def __init__(
        self,
        app: ASGIApp,
        log: AccessLog | None,
        metrics: Metrics,
        tracing: Tracing | None = None,
        untraced_paths: Collection[str] = (),
    ) -> None:
        """`tracing` traces the requests except those of `untraced_paths`; None means no tracing."""
        self._tracing = tracing
        self._untraced_paths = frozenset(untraced_paths)
        self._app = app
        self._log = log
        self._metrics = metrics
        self._ignored_log = IgnoredLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_time = time.monotonic()
        given_id, load_format = _given(scope)
        request_id = given_id or new_request_id()
        facts = RequestFacts()
        trace = None
        if self._tracing is not None and route_path(scope) not in self._untraced_paths:
            trace = facts.trace = self._tracing.begin(scope, arrival_time)
        scope.setdefault("state", {}).update(request_id=request_id, facts=facts)
        token = REQUEST_ID.set(request_id)
        with collect() as ignored:
            answer = _Answer(send, request_id, arrival_time, ignored, self._ignored_log, speaks_anthropic(scope))
            # The inner layers change only the head of the answer, so a stream's events need not pass through them.
            scope["state"]["send_body"] = answer.send
            if trace is not None:
                answer.report_trace(trace)
            if load_format is not None:
                answer.report_load(self._metrics, load_format)
            try:
                await self._app(scope, receive, answer.send)
            finally:
                REQUEST_ID.reset(token)
                del scope["state"]["send_body"]  # It refers to the request, whose scope would be part of a cycle.
                status = answer.status if answer.status is not None and answer.complete else CLIENT_GONE
                if trace is not None:
                    trace.end(status)
                self._metrics.http_request(scope["method"], getattr(scope.get("route"), "path", None), status)
                if self._log is not None:
                    seconds = time.monotonic() - arrival_time
                    self._log.write(
                        scope, RequestOutcome(request_id, answer.status, answer.complete, answer.bytes, seconds)
                    )


class _Answer:
    """Counts the sent bytes of an answer. `send` is a plain function: a coroutine would slow every streamed chunk."""

    __slots__ = (
        "_arrival_time",
        "_headers",
        "_ignored",
        "_ignored_log",
        "_load_report",
        "_send",
        "bytes",
        "complete",
        "status",
    )

    def __init__(
        self,
        send: Send,
        request_id: str,
        arrival_time: float,
        ignored: list[str],
        ignored_log: IgnoredLog,
        speaks_anthropic: bool,
    ) -> None:
        """`ignored` lists the ignored fields of the request; it is complete when the answer begins."""
        self._send = send
        self._arrival_time = arrival_time
        self._ignored = ignored
        self._ignored_log = ignored_log
        names = (_ID_HEADER, _ANTHROPIC_ID_HEADER) if speaks_anthropic else (_ID_HEADER,)
        self._headers = [(name, request_id.encode()) for name in names]
        self._load_report: Callable[[], bytes | None] | None = None
        self.status: int | None = None
        self.bytes = 0
        self.complete = False

    def report_trace(self, trace: RequestTrace) -> None:
        """Add the trace's identity to the answer's headers."""
        if (header := trace.header) is not None:
            self._headers.append((b"traceresponse", header))

    def report_load(self, metrics: Metrics, format: bytes) -> None:
        """Add the load to the headers of a successful answer: only clients with access may learn the load."""
        self._load_report = functools.partial(metrics.load_report, format.decode("latin-1").lower())

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            milliseconds = (time.monotonic() - self._arrival_time) * 1000
            processing = (_PROCESSING_HEADER, b"%d" % milliseconds)
            message["headers"] = [*message.get("headers", ()), *self._headers, processing]
            if self._load_report is not None and message["status"] < 300 and (load := self._load_report()) is not None:
                message["headers"].append((b"endpoint-load-metrics", load))
            if self._ignored:
                value = header_value(self._ignored)
                self._ignored_log.write(value)
                message["headers"].append((_IGNORED_HEADER, value))
        return self._send(message)


def _given(scope: Scope) -> tuple[str | None, bytes | None]:
    """Return the request id that the client sent, and the requested format of the load report."""
    request_id, load_format = None, None
    for name, value in scope["headers"]:
        if name == _ID_HEADER and request_id is None:
            request_id = usable_request_id(value)
        elif name == _LOAD_HEADER:
            load_format = value
    return request_id, load_format


def owner_of(scope: Scope) -> Owner:
    """Return the party that a request is accounted to, which `OwnerMiddleware` has set."""
    owner: Owner = scope["state"]["owner"]
    return owner


class OwnerMiddleware:
    """Sets the `Owner` of each request. If keys are needed, a request without a valid key gets a 401.

    `keyless_paths` need no key. A key without the path's scope gets a 403. Calls with scope `admin` are logged with
    their outcome.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        keyless_paths: Iterable[str],
        scopes: Mapping[str, KeyScope | None] = MappingProxyType({}),
        quotas: QuotaMeter | None = None,
        shares: KeyShares | None = None,
        pages: PageGuard | None = None,
    ) -> None:
        """`scopes` is the scope that a key needs by path, by default `inference`; None means that any key suffices.

        Answers report the rest of the owner's `quotas` in their headers. `shares` bounds the requests of the scope
        `inference` that a key may have at a time, where there are several keys. `pages` checks requests that need no
        key because the server has none.
        """
        self._app = app
        self._keys = keys
        self._keyless_paths = frozenset(keyless_paths)
        self._scopes = scopes
        self._quotas = quotas
        self._shares = shares
        self._pages = pages
        _audit_log.setLevel(logging.INFO)  # The audit log is written even if the level of the other logs is higher.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        needed = self._scopes.get(path, "inference")
        client = scope.get("client")
        owner = Owner.of_address(client[0] if client else None)
        app = self._app
        shares = None
        try:
            if self._keys:
                owner = await self._keyed_owner(scope, path) or owner
                if needed is not None and needed not in owner.scopes:
                    raise _out_of_scope(path, needed, owner)
                # `HttpProtocol` counts requests with an API key as served, all others only once they are accepted.
                serve: Callable[[], ApiError | None] | None = scope.get("state", {}).get("serve")
                if serve is not None and (refused := serve()) is not None:
                    raise refused
                if self._shares is not None and needed == "inference" and owner.key is not None:
                    # What ends work is never refused, since it gives connections back.
                    ends_work = scope["method"] == "DELETE" or path.endswith("/cancel")
                    self._shares.begin(owner, is_bounded=self._keys.has_several_holders and not ends_work)
                    shares = self._shares
            elif self._pages is not None and path not in self._keyless_paths:
                self._pages.check(scope["method"], scope["headers"])
        except ApiError as refusal:
            facts_of(scope).error = str(refusal)
            app = as_response(refusal, scope)
        scope.setdefault("state", {})["owner"] = owner
        if needed == "admin":
            send = _audited(scope, path, owner, send)
        elif needed == "inference" and self._quotas is not None and self._quotas.quotas_of(owner) != NO_QUOTAS:
            send = _with_rate_limits(self._quotas, owner, send)
        try:
            await app(scope, receive, send)
        finally:
            if shares is not None:
                shares.end(owner)

    async def _keyed_owner(self, scope: Scope, path: str) -> Owner | None:
        """Return the owner of the request's key; None if it has no key and needs none. Raises `InvalidApiKey`
        and `NotReady`."""
        keys = sent_keys(scope["headers"])
        refusal: ApiError = _refusal(keys)
        for key in keys:
            try:
                if (owner := await self._keys.authenticate(key)) is not None:
                    return owner
            except (InvalidApiKey, NotReady) as error:
                refusal = error
        if path in self._keyless_paths:
            return None
        raise refusal


def _out_of_scope(path: str, needed: str, owner: Owner) -> Forbidden:
    scopes = ", ".join(sorted(owner.scopes)) or "nothing"
    return Forbidden(f"{path} needs a key of the scope {needed}; this one opens {scopes}")


def _with_rate_limits(quotas: QuotaMeter, owner: Owner, send: Send) -> Send:
    """Wrap `send` so that it adds the rest of the owner's quotas to the answer's headers."""

    def send_with_headers(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *quotas.headers(owner)]
        return send(message)

    return send_with_headers


def _audited(scope: Scope, path: str, owner: Owner, send: Send) -> Send:
    """Wrap `send` so that it logs the caller and the status when the answer begins."""

    async def send_and_log(message: Message) -> None:
        if message["type"] == "http.response.start":
            entry = {
                "audit": f"{scope['method']} {path}",
                "owner": owner.name,
                "client": scope["client"][0] if scope.get("client") else None,
                "status": message["status"],
                "request_id": scope["state"].get("request_id"),
            }
            _audit_log.info("%s", json.dumps(entry))
        await send(message)

    return send_and_log


def _refusal(keys: list[bytes]) -> InvalidApiKey:
    if not keys:
        return InvalidApiKey("the request has no API key; send one as Authorization: Bearer KEY, or as x-api-key")
    # The first words are OpenAI's: clients search for them.
    return InvalidApiKey("Incorrect API key provided; send one of this server's as Authorization: Bearer KEY")
