"""`ServerConfig`: the section of `Config` on the HTTP face."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from engine.section import Section

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")
"""What may stand in a browser's `Origin` header, which is compared letter by letter."""


class ServerConfig(Section):
    """The HTTP face."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port to listen on; 0 lets the system choose one, which is printed."""

    served_model_name: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Model names that the API accepts and lists; default: the MODEL argument, `kaon-demo` for the embedded one."""

    allow_unknown_fields: bool = False
    """Ignore request fields that the API does not know, instead of answering 400."""

    max_request_bytes: Annotated[int, Field(ge=1024)] = 10 * 2**20
    """Largest request body accepted, in bytes; over it the answer is 413."""

    max_stop_strings: Annotated[int, Field(ge=1)] = 4
    """Most stop strings a request may name (OpenAI's limit is 4)."""

    max_n: Annotated[int, Field(ge=1)] = 128
    """Most choices (`n`) a request may ask for (OpenAI's limit is 128)."""

    max_grammar_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**10
    """Largest JSON schema, regular expression or grammar of a request, in bytes."""

    max_stored_responses: Annotated[int, Field(ge=0)] = 1024
    """Most responses (`/v1/responses`) kept in memory; the least recently used makes room; 0 keeps none."""

    max_stored_response_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Most bytes that they keep, conversations included."""

    max_queued_requests: Annotated[int, Field(ge=1)] | None = None
    """Most sequences that wait for their first token, over which the answer is 429; default: `max_num_seqs`,
    of each replica."""

    max_queued_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most prompt tokens that they have together; default: as many as the KV caches of all replicas hold."""

    max_requests_per_key: Annotated[int, Field(ge=1)] | None = None
    """Most requests of one API key that are served at a time, over which the answer is 429; default: no limit."""

    request_timeout: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds that a request may take, waiting included, before it is ended; default: no limit."""

    stream_buffer_bytes: Annotated[int, Field(ge=1024)] = 2**20
    """Bytes of a stream, about, that are held for a client that reads slowly."""

    slow_readers: Literal["pause", "end"] = "pause"
    """What becomes of a request whose client leaves more unread: `pause` until it has read, or `end` with an error."""

    api_key: tuple[SecretStr, ...] = ()
    """Keys that requests must bring one of (`Authorization: Bearer ...`); with none, no request needs any.

    The environment or `api_key_file` are better places for them than a command line."""

    api_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File of further keys, one a line; empty lines, and what follows #, are left out."""

    keyless_paths: tuple[Annotated[str, Field(pattern="^/")], ...] = (
        "/livez",
        "/readyz",
        "/health",
        "/ping",
        "/docs",
        "/openapi.json",
    )
    """Paths that need no key where all others do: probes, and the description of the API."""

    allowed_origins: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Origins whose pages may call this server from a browser (CORS), such as https://chat.example; * is any."""

    allowed_methods: tuple[Annotated[str, Field(min_length=1)], ...] = ("*",)
    """Methods that those pages may use."""

    allowed_headers: tuple[Annotated[str, Field(min_length=1)], ...] = ("*",)
    """Headers that those pages may send."""

    allow_credentials: bool = False
    """Let those pages send cookies and HTTP authentication of the browser's own."""

    ssl_certfile: Annotated[str, Field(min_length=1)] | None = None
    """PEM file of the server's certificate and its chain; turns https on."""

    ssl_keyfile: Annotated[str, Field(min_length=1)] | None = None
    """PEM file of the certificate's private key; default: it is in `ssl_certfile`."""

    ssl_ca_certs: Annotated[str, Field(min_length=1)] | None = None
    """PEM file of authorities; each client must then show a certificate that one of them signed."""

    drain_timeout: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds that live requests have to end once the server is told to; what is left then ends with an error."""

    root_path: str = ""
    """Prefix under which a proxy shows this server, such as /llm; requests may come with it or without."""

    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """Jinja file to use in place of the checkpoint's chat template."""

    trust_request_chat_template: bool = False
    """Let requests bring chat templates of their own (`chat_template`), rendered in a process that can be killed."""

    tool_call_parser: Annotated[str, Field(min_length=1)] = "auto"
    """How the model writes tool calls: `auto` reads its chat template, `none`, or a name in docs/tool-calling.md."""

    reasoning_parser: Annotated[str, Field(min_length=1)] = "auto"
    """How the model writes reasoning: `auto` reads its chat template, `none`, or a name in docs/tool-calling.md."""

    access_log: Literal["text", "json", "none"] = "text"
    """How each request is logged when it has ended; probes and scrapes only at `log_level` debug."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_as_browsers_send_them(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins is {','.join(value)}; each item must be *, null, or a scheme and a host as in "
                    "https://chat.example, in small letters, with nothing behind but a port"
                )
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
