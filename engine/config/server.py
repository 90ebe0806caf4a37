"""`ServerConfig`: the settings of the HTTP server, which its parts read without the rest of `Config`."""

import json
import re
from ipaddress import ip_network
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from engine.config.section import Section

TEMPLATE_ARGUMENTS = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Variables of chat templates that each request determines."""

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")
"""Valid `Origin` headers of a browser; they are compared letter by letter."""


class ServerConfig(Section):
    """The HTTP server."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines, and needs an API key."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port to listen on; 0 lets the system choose one, which is printed."""

    served_model_name: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Model names that the API accepts and lists; default: the MODEL argument, or `kaon-demo` for the embedded
    model."""

    models: Annotated[str, Field(min_length=1)] | None = None
    """YAML file with several models to serve at this address, instead of MODEL (docs/several-models.md)."""

    model_wait_timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds that a request waits for a model of `models` to be loaded; then it is answered 503."""

    allow_unknown_fields: bool = False
    """Ignore request fields that the API does not know, instead of answering 400."""

    max_tokens_overflow: Literal["clamp", "error"] = "clamp"
    """What happens when `max_tokens` is more than the context has left after the prompt: `clamp` lowers it to the
    rest, because agents always send the same large number; `error` answers 400."""

    strip_billing_line: bool = True
    """Remove from `/v1/messages` the line `x-anthropic-billing-header: ...`, with which Claude Code begins its system
    prompt: it differs between conversations, so that they could not share cached prefixes."""

    max_request_bytes: Annotated[int, Field(ge=1024)] | None = None
    """Largest request body accepted, in bytes; a larger one is answered 413.

    Default: 32 bytes for each token of the context, at least 4 MiB and at most 32 MiB. A body may hold at most one
    JSON value for every 16 bytes of this limit."""

    max_stop_strings: Annotated[int, Field(ge=1)] = 4
    """Most stop strings a request may name (OpenAI's limit is 4)."""

    max_n: Annotated[int, Field(ge=1)] = 128
    """Most choices (`n`) a request may ask for (OpenAI's limit is 128)."""

    max_grammar_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**10
    """Largest JSON schema, regular expression or grammar of a request, in bytes."""

    max_stored_responses: Annotated[int, Field(ge=0)] = 1024
    """Most responses (`/v1/responses`) stored in memory; the least recently used is evicted first; 0 stores none."""

    max_stored_response_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Most bytes of stored responses, including conversations and the events of running background responses; beyond
    it, responses of the owner that stores most are evicted."""

    max_background_responses_per_key: Annotated[int, Field(ge=1)] | None = None
    """Most background responses of one API key, or address, that run at a time; default: a quarter of
    `max_stored_responses`."""

    reasoning_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with a secret of at least 16 bytes, which encrypts reasoning and summaries for clients
    (`encrypted_content`).

    Servers that share an address need the same file; default: a new random key at each start."""

    lora_directories: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Directories beneath which `/v1/load_lora_adapter` finds adapters; without one, none is loaded while the server
    runs."""

    weights_directories: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Directories beneath which `/update_weights` finds checkpoints; without one, weights are not replaced while the
    server runs."""

    max_lora_adapters: Annotated[int, Field(ge=1)] = 64
    """Most LoRA adapters that are loaded at a time, those of `lora` included."""

    data_dir: Annotated[str, Field(min_length=1)] | None = None
    """Directory of uploaded files and of batches, for one server alone.

    Default: `kaon/port-N` in `$XDG_STATE_HOME` or `~/.local/state`; a temporary directory where that cannot be written
    or `port` is 0."""

    max_file_bytes: Annotated[int, Field(ge=1)] = 200 * 2**20
    """Largest file that may be uploaded, in bytes; a larger one is answered 413."""

    max_file_bytes_per_key: Annotated[int, Field(ge=1)] = 4 * 2**30
    """Most bytes of files of one API key; further uploads are answered 429."""

    max_file_bytes_total: Annotated[int, Field(ge=1)] = 16 * 2**30
    """Most bytes of files of all API keys; further uploads are answered 429."""

    file_retention_days: Annotated[int, Field(ge=0)] = 30
    """Days after which uploaded files without an expiry, batches that have ended and their files are deleted; 0:
    never."""

    batch_concurrency: Annotated[int, Field(ge=1)] | None = None
    """Most lines of batches that are computed at a time, an eighth of it while other requests run; in addition, as
    many lines whose owners have no other line running; default: half of `max_num_seqs`, at most 32."""

    max_queued_requests: Annotated[int, Field(ge=1)] | None = None
    """Most sequences that may wait for their first token; further requests are answered 429; default:
    `max_num_seqs` of all replicas together."""

    max_queued_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most prompt tokens of all waiting sequences together; default: as many as the KV caches of all replicas hold."""

    max_requests_per_key: Annotated[int, Field(ge=1)] | None = None
    """Most requests of one API key that are served at a time; further ones are answered 429; default: no limit."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Most requests a minute, on average, of each API key without a quota of its own, or of each address."""

    prompt_tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Most prompt tokens a minute, on average, of each such key or address."""

    output_tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Most generated tokens a minute, on average, of each such key or address."""

    request_timeout: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds after which a request is ended, including the time that it waits; default: no limit."""

    stream_buffer_bytes: Annotated[int, Field(ge=1024)] = 2**20
    """Approximate number of bytes that are buffered for the client of a stream that reads slowly."""

    slow_readers: Literal["pause", "end"] = "pause"
    """What happens when that buffer is full: `pause` the request until the client has read, or `end` it with an
    error."""

    resumable_stream_bytes: Annotated[int, Field(ge=2**16)] = 4 * 2**20
    """Bytes of a resumable stream that are stored for a disconnected client."""

    resumable_stream_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds for which a resumable stream without a client continues, and is stored."""

    max_connections: Annotated[int, Field(ge=4)] | None = None
    """Most connections open at a time; default: what the limit of open files (`ulimit -n`) allows, at most 8192."""

    max_connections_per_address: Annotated[int, Field(ge=1)] | None = None
    """Most of them from one address, or from one /64 network of IPv6; default: half of all."""

    trusted_proxies: tuple[Annotated[str, Field(min_length=1)], ...] = ("127.0.0.0/8", "::1/128")
    """Networks whose addresses may have any number of connections, and name their client in `X-Forwarded-For`: this
    machine, and proxies of many clients."""

    request_head_timeout: Annotated[float, Field(gt=0.0)] = 10.0
    """Seconds in which a request's line and headers must arrive, from the connection's start or their first byte."""

    min_body_rate: Annotated[int, Field(ge=0)] = 1024
    """Bytes a second, on average after `request_head_timeout`, at which a body must arrive at least; 0: any rate."""

    keep_alive_timeout: Annotated[float, Field(gt=0.0)] = 75.0
    """Seconds that a connection stays open between two requests; longer than common load balancers keep theirs."""

    send_timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds after which a connection is closed if its client reads nothing of the waiting data."""

    api_key: tuple[SecretStr, ...] = ()
    """API keys. Each request must send one (`Authorization: Bearer ...`); without any, requests need no key.

    Set them by the environment or `api_key_file`: other users of the machine can see a command line."""

    api_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with further API keys: one that `kaon key` writes, or one key a line, where empty lines and comments (#)
    are ignored. It is read again when it changes."""

    jwt_issuer: Annotated[str, Field(min_length=1)] | None = None
    """Accept JSON Web Tokens of this issuer (`iss`) instead of API keys; needs `kaon[jwt]`."""

    jwt_audience: Annotated[str, Field(min_length=1)] | None = None
    """Audience (`aud`) that these tokens must have."""

    jwt_jwks_url: Annotated[str, Field(min_length=1)] | None = None
    """URL (https) of the issuer's public keys (JWKS), which are fetched when needed."""

    jwt_jwks_file: Annotated[str, Field(min_length=1)] | None = None
    """File with the issuer's public keys, instead of a URL."""

    insecure_no_auth: bool = False
    """Allow a `host` beyond loopback without API keys: everybody who reaches the port can use the model, web pages
    whose names resolve to this machine among them."""

    share_prefix_cache: bool = False
    """Share cached prefixes between API keys; usage figures and timing can then reveal how others' prompts begin."""

    keyless_paths: tuple[Annotated[str, Field(pattern="^/")], ...] = (
        "/livez",
        "/readyz",
        "/health",
        "/ping",
        "/",
        "/favicon.ico",
        "/docs",
        "/openapi.json",
    )
    """Paths that never need an API key: probes, the first page, and the description of the API."""

    allowed_origins: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Origins whose pages may call this server from a browser (CORS), such as https://chat.example; * is any. Without
    API keys, pages of other sites are refused."""

    allowed_methods: tuple[Annotated[str, Field(min_length=1)], ...] = ("*",)
    """HTTP methods that pages of `allowed_origins` may use."""

    allowed_headers: tuple[Annotated[str, Field(min_length=1)], ...] = ("*",)
    """Headers that pages of `allowed_origins` may send."""

    allow_credentials: bool = False
    """Let pages of `allowed_origins` send cookies and the browser's HTTP authentication."""

    ssl_certfile: Annotated[str, Field(min_length=1)] | None = None
    """PEM file with the server's certificate and its chain; the server then speaks https."""

    ssl_keyfile: Annotated[str, Field(min_length=1)] | None = None
    """PEM file with the certificate's private key; default: the key is in `ssl_certfile`."""

    ssl_ca_certs: Annotated[str, Field(min_length=1)] | None = None
    """PEM file with certificate authorities; each client must then present a certificate that one of them signed."""

    drain_timeout: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds that running requests may take to finish after the server is asked to stop; then they end with an
    error."""

    root_path: str = ""
    """Path prefix under which a proxy publishes this server, such as /llm; requests may have the prefix or not."""

    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """Jinja file to use instead of the checkpoint's chat template."""

    default_chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, as JSON, unless a request sets them, as in `{"preserve_thinking": true}`."""

    trust_request_chat_template: bool = False
    """Accept chat templates in requests (`chat_template`); they are rendered in a process that can be killed."""

    tool_call_parser: Annotated[str, Field(min_length=1)] = "auto"
    """Dialect of tool calls: `auto` detects it from the chat template; `none`; or a name in docs/tool-calling.md."""

    reasoning_parser: Annotated[str, Field(min_length=1)] = "auto"
    """Dialect of reasoning: `auto` detects it from the chat template; `none`; or a name in docs/tool-calling.md."""

    access_log: Literal["text", "json", "none"] = "text"
    """Format of the log line of each finished request; probes and scrapes are logged at `log_level` debug only."""

    metrics_aliases: Literal["none", "vllm"] = "none"
    """Show the metrics that routers read under another server's names too (`vllm:num_requests_waiting` and its
    like)."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of messages that are logged."""

    @field_validator("default_chat_template_kwargs", mode="before")
    @classmethod
    def _template_variables_are_json(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"default_chat_template_kwargs is {value!r}, which is not JSON: {error}; write an object like "
                    '{"enable_thinking": false}'
                ) from None
        if not isinstance(value, dict):
            raise ValueError(
                f'default_chat_template_kwargs is {value!r}; it must be an object like {{"enable_thinking": false}}'
            )
        if set_by_requests := sorted(TEMPLATE_ARGUMENTS & value.keys()):
            raise ValueError(
                f"default_chat_template_kwargs sets {', '.join(set_by_requests)}, which requests set; leave it out"
            )
        return value

    @property
    def most_background_responses_per_key(self) -> int:
        """`max_background_responses_per_key`, or its default."""
        return self.max_background_responses_per_key or max(1, self.max_stored_responses // 4)

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_as_browsers_send_them(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _is_origin(origin):
                raise ValueError(
                    f"allowed_origins is {','.join(value)}; each item must be *, null, or a scheme and a host as in "
                    "https://chat.example, in lower case, with nothing after the host but a port"
                )
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            try:
                ip_network(network)
            except ValueError as error:
                raise ValueError(
                    f"trusted_proxies is {','.join(value)}; each item must be an address, or a network as in "
                    f"10.0.0.0/8: {error}"
                ) from None
        return value

    @field_validator("root_path")
    @classmethod
    def _root_path_is_a_prefix(cls, value: str) -> str:
        if value and (not value.startswith("/") or value.endswith("/")):
            raise ValueError(f"root_path is {value}; it must begin with / and not end with it")
        return value

    @model_validator(mode="after")
    def _credentials_go_to_named_origins(self) -> Self:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials is true, but allowed_origins is *; name the origins one by one")
        return self


def _is_origin(value: str) -> bool:
    """Whether a browser can send `value` as `Origin`."""
    try:
        urlsplit(value).port  # noqa: B018 - it raises for a port that is no number, as `urlsplit` does for bad brackets
    except ValueError:
        return False
    return _ORIGIN.fullmatch(value) is not None
