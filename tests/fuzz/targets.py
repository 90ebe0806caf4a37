"""Parsers of untrusted bytes, each as a function of bytes that raises if the parser violates its contract.

The contract is: any bytes give a value, or the error that the parser documents. `TARGETS` are run on mutations by
`tests.fuzz.run` (atheris) and on their corpora by `test_corpora`.
"""

import asyncio
import base64
import contextlib
import json
import os
import socket
import struct
import tempfile
from collections.abc import AsyncGenerator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from jwt.algorithms import ECAlgorithm
from starlette.datastructures import Headers
from uvicorn.server import ServerState

from engine.config.server import ServerConfig
from engine.distributed.host_messages import FromHost, ToHost
from engine.distributed.rank_link import FromRank, RankLaunch
from engine.messages import Inbound, ModelInfo, Outbound
from engine.sequence import Sequence
from engine.text.chat_template import ChatTemplate
from engine.text.checkpoint_settings import GenerationDefaults
from engine.text.io_processor import InputOutputProcessor, InvalidRequest
from engine.text.structured.checker import is_gbnf, lark_of_gbnf
from engine.text.structured.spec import GrammarSpec, InvalidGrammar, lark_of
from engine.text.tokenizer import Tokenizer
from models.architectures.config import ModelConfig
from models.config.fields import read_generation_config
from models.demo import CHAT_TEMPLATE_PATH, CHECKPOINT_DIR
from models.errors import CheckpointError
from models.lora.config import LoRAConfig
from server.batches.lines import read_lines
from server.errors import BadRequest, InvalidApiKey
from server.http import HttpProtocol
from server.limits.accounts import Accounts
from server.limits.connections import ConnectionLimits, Connections
from server.limits.keys import ApiKeys
from server.limits.tokens import TokenVerifier
from server.limits.turns import HeadTurns, RequestTurns
from server.metrics import Metrics
from server.parsing import registry
from server.parsing.answer_format import AnswerFormat
from server.parsing.json_repair import mend
from server.request_builder import sampling_params
from server.routes.batches import read_form
from server.schemas.body import RequestModel, parse_object, validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.completions import CompletionRequest
from server.schemas.generation import SamplingFields
from server.schemas.messages import MessagesRequest
from server.schemas.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from server.schemas.responses import ResponsesRequest
from server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from server.sealing import Changed, Foreign, Seal
from tests.unit.answers.dialect_texts import USE, parsed

Target = Callable[[bytes], object]
TARGETS: dict[str, Target] = {}
"""Targets by name, which is also the name of the folder of the corpus."""

CORPORA = Path(__file__).parent / "corpora"


def target(function: Target) -> Target:
    """Register a function under its name."""
    TARGETS[function.__name__] = function
    return function


def choose(data: bytes, number: int) -> tuple[int, bytes]:
    """Select one of `number` values by the first byte. Returns also the other bytes."""
    return (data[0] % number if data else 0), data[1:]


# -- HTTP -------------------------------------------------------------------------------------------------------


@cache
def processor() -> InputOutputProcessor:
    tokenizer = Tokenizer.from_checkpoint(CHECKPOINT_DIR)
    info = ModelInfo("", "", "", "", 0, tokenizer.vocab_size, 100, [], 16, 10)
    return InputOutputProcessor(tokenizer, None, info)


BODIES: tuple[type[RequestModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    EmbeddingRequest,
    ClassifyRequest,
    ScoreRequest,
    RerankRequest,
)


@target
def http_body(data: bytes) -> None:
    """A request's body becomes a model and the engine's parameters, or a `BadRequest` whose body is JSON."""
    choice, body = choose(data, 2 * len(BODIES))
    model = BODIES[choice // 2]
    try:
        request = validate(parse_object(body), model, allow_unknown=bool(choice % 2))
        if isinstance(request, SamplingFields):
            sampling_params(request, 16, None, None, processor())
    except (BadRequest, InvalidRequest) as error:
        refusal = error
    else:
        return
    said = json.loads(refusal.body())["error"]["message"] if isinstance(refusal, BadRequest) else str(refusal)
    assert said


class Transport(asyncio.Transport):
    """A transport for a protocol's output, which sends nothing."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 80)})
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the whole body and answers."""
    more = True
    while more:
        message = await receive()
        more = message["type"] == "http.request" and message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@cache
def http_settings() -> uvicorn.Config:
    settings = uvicorn.Config(answer, http=HttpProtocol, ws="none", log_config=None, access_log=False)
    settings.load()
    return settings


@target
def http_head(data: bytes) -> None:
    """A connection's bytes, divided at any positions, are answered by status lines and never by an exception."""
    cuts, stream = choose(data, 256)
    asyncio.run(serve(stream, cuts))


@cache
def metrics() -> Metrics:
    return Metrics("fuzz")


async def serve(stream: bytes, cuts: int) -> None:
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    transport = Transport()
    connections = Connections(ConnectionLimits(connections=8, per_address=8), Accounts(), metrics(), lambda: 0.0)
    with socket.socket() as unused:
        connection = connections.open(unused, "192.0.2.1")
        assert connection is not None
        protocol = HttpProtocol(
            config=http_settings(),
            server_state=ServerState(),
            app_state={},
            connection=connection,
            heads=HeadTurns(),
            turns=RequestTurns(),
            keys=ApiKeys(),
            probes=(b"/livez",),
            _loop=loop,
        )
        protocol.connection_made(transport)
        step = max(len(stream) // (cuts % 8 + 1), 1)
        for at in range(0, len(stream), step):
            if transport.closed:
                break
            protocol.data_received(stream[at : at + step])
            for _ in range(4):
                await asyncio.sleep(0)
        if cuts >= 128 and not transport.closed:
            protocol.eof_received()
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(8):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks(loop) - {asyncio.current_task(loop)}:
            task.cancel()
    assert not failures, failures
    assert len(connections) == 0
    assert not transport.written or transport.written.startswith(b"HTTP/1.1 "), transport.written[:100]


@target
def multipart(data: bytes) -> None:
    """An uploaded form, whose content type is the first line, is read or refused."""
    content_type, _, body = data.partition(b"\n")

    async def parse() -> None:
        async def stream() -> AsyncGenerator[bytes, None]:
            for at in range(0, len(body), 100):
                yield body[at : at + 100]

        headers = Headers(raw=[(b"content-type", b"multipart/form-data" + content_type)])
        try:
            form = await read_form(headers, stream())
        except BadRequest:
            return
        for name, value in form.multi_items():  # Answers and the store have them.
            f"{name}{value if isinstance(value, str) else value.filename}".encode()
        await form.close()

    asyncio.run(parse())


@target
def batch_lines(data: bytes) -> None:
    """The input of a batch has lines within its bounds, or errors in words."""
    path = written("input", data) / "input"
    lines, errors = read_lines(path, "/v1/completions")
    assert lines or errors
    for line in lines:
        assert json.loads(data[line.start : line.start + line.length])["custom_id"] == line.custom_id
    assert all(error.message for error in errors)


@cache
def verifier() -> TokenVerifier:
    key = json.loads(ECAlgorithm.to_jwk(generate_private_key(SECP256R1()).public_key()))
    path = Path(_FOLDERS.enter_context(tempfile.TemporaryDirectory(prefix="kaon-fuzz-"))) / "keys.json"
    path.write_text(json.dumps({"keys": [{**key, "kid": "a", "alg": "ES256"}]}))
    found = TokenVerifier.of(ServerConfig(jwt_issuer="https://i", jwt_audience="a", jwt_jwks_file=str(path)))
    assert found is not None
    return found


@target
def token(data: bytes) -> None:
    """An unsigned token gives no access: the parts are encoded here, so that mutations reach their contents."""
    choice, rest = choose(data, 2)
    if choice:
        rest = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in rest.split(b"\n", 2))
    with contextlib.suppress(InvalidApiKey):
        raise AssertionError(f"it opened the server for {asyncio.run(verifier().owner(rest))}")


@cache
def seal() -> Seal:
    return Seal(b"0" * 32)


@target
def sealed(data: bytes) -> None:
    """Sealed text from a client is opened only if this server sealed it for the same owner."""
    choice, rest = choose(data, 2)
    text = rest.decode("utf-8", "replace")
    if choice:
        assert seal().open("reasoning", seal().seal("reasoning", text, "a"), "a") == text
        text = seal().seal("reasoning", text, "a")
    with contextlib.suppress(Foreign, Changed):
        raise AssertionError(f"it was opened for another: {seal().open('reasoning', text, 'b')!r}")


# -- text -------------------------------------------------------------------------------------------------------

DIALECTS = (*registry.TOOL_DIALECTS, registry.HARMONY)
REASONING = (*registry.REASONING_DIALECTS, registry.NONE)


@target
def dialects(data: bytes) -> None:
    """A model's text has the same meaning for any division into pieces: content, reasoning, calls and their
    arguments."""
    choice, rest = choose(data, len(DIALECTS))
    kind, rest = choose(rest, len(REASONING))
    step, rest = choose(rest, 7)
    text = rest.decode("utf-8", "replace")
    tool = DIALECTS[choice]
    reasoning = registry.HARMONY if tool == registry.HARMONY else REASONING[kind]

    def read(*pieces: str) -> Any:
        parser = AnswerFormat(tool, reasoning).parser(USE, prompt_tail="")
        assert parser is not None
        return parsed(parser, *pieces)

    size = step + 1
    assert read(*(text[at : at + size] for at in range(0, len(text), size))) == read(text)


@target
def json_repair(data: bytes) -> None:
    """Repaired text is JSON."""
    mended = mend(data.decode("utf-8", "replace"))
    if mended is not None:
        with contextlib.suppress(RecursionError):
            json.loads(mended)


@cache
def demo_template() -> ChatTemplate:
    return ChatTemplate({"default": CHAT_TEMPLATE_PATH.read_text()})


@target
def chat_template(data: bytes) -> None:
    """A template compiles or is refused; the embedded one renders any JSON, or refuses it in a sentence."""
    choice, rest = choose(data, 2)
    if choice:
        with contextlib.suppress(CheckpointError):
            ChatTemplate({"default": rest.decode("utf-8", "replace")})
        return
    try:
        messages = json.loads(rest)
    except (ValueError, RecursionError):
        return
    if not isinstance(messages, list):
        return
    with contextlib.suppress(ValueError):
        demo_template().render([each for each in messages if isinstance(each, dict)])


KINDS = ("json", "json_object", "regex", "choice", "grammar")


@target
def grammar(data: bytes) -> None:
    """A grammar of a request is converted to Lark, or refused; the native library is not called here."""
    choice, rest = choose(data, len(KINDS))
    text = rest.decode("utf-8", "replace")
    value: Any = text
    if KINDS[choice] in ("json", "choice"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
    with contextlib.suppress(InvalidGrammar):
        lark_of(GrammarSpec(KINDS[choice], value))
    if KINDS[choice] == "grammar" and is_gbnf(text):
        with contextlib.suppress(ValueError):
            lark_of_gbnf(text)


# -- checkpoints ------------------------------------------------------------------------------------------------


@cache
def folder() -> Path:
    """A folder in memory, if there is one, which is deleted with the process."""
    shared = Path("/dev/shm")
    root = str(shared) if os.access(shared, os.W_OK) else None
    return Path(_FOLDERS.enter_context(tempfile.TemporaryDirectory(prefix="kaon-fuzz-", dir=root)))


_FOLDERS = contextlib.ExitStack()


def written(name: str, data: bytes) -> Path:
    """The folder, with that file in it and no other."""
    for file in folder().iterdir():
        file.unlink()
    (folder() / name).write_bytes(data)
    return folder()


@target
def safetensors(data: bytes) -> None:
    """A file of weights gives tensors, or a `CheckpointError`. The length of its header may be corrected first."""
    from models.config.weight_files import weight_files
    from models.loading.checkpoint import tensors_of_file

    choice, rest = choose(data, 4)
    if choice == 0:
        with contextlib.suppress(CheckpointError):
            weight_files(written("model.safetensors.index.json", rest))
        return
    if choice == 1:
        header, _, body = rest.partition(b"\0")
        rest = struct.pack("<Q", len(header)) + header + body
    path = written("model.safetensors", rest)
    with contextlib.suppress(CheckpointError):
        for _, tensor in tensors_of_file(weight_files(path)[0], {}):
            tensor.float().sum()


@target
def config_json(data: bytes) -> None:
    """The JSON files of a checkpoint or an adapter are read, or refused by a `CheckpointError`."""
    choice, rest = choose(data, 4)
    if choice == 0:
        path = written("config.json", rest)
        with contextlib.suppress(CheckpointError):
            ModelConfig.from_checkpoint(path)
    elif choice == 1:
        path = written("generation_config.json", rest)
        with contextlib.suppress(CheckpointError):
            read_generation_config(path)
        with contextlib.suppress(CheckpointError):
            GenerationDefaults.load("auto", path)
    elif choice == 2:
        path = written("tokenizer_config.json", rest)
        with contextlib.suppress(CheckpointError):
            ChatTemplate.from_checkpoint(path)
    else:
        path = written("adapter_config.json", rest)
        with contextlib.suppress(CheckpointError):
            LoRAConfig.from_adapter(path)


@target
def tokenizer_json(data: bytes) -> None:
    """A tokenizer is read, or refused by a `CheckpointError`; one that is read handles any text and ids."""
    path = written("tokenizer.json", data)
    try:
        tokenizer = Tokenizer.from_checkpoint(path)
    except CheckpointError:
        return
    with contextlib.suppress(ValueError):
        tokenizer.decode(tokenizer.encode("Once upon a time, über 12 + 3"))
    tokenizer.decode([0, 1, 2**31, 5])


# -- messages between processes ---------------------------------------------------------------------------------

DECODERS: tuple[msgspec.msgpack.Decoder[Any], ...] = (
    msgspec.msgpack.Decoder(Inbound),
    msgspec.msgpack.Decoder(Outbound),
    msgspec.msgpack.Decoder(FromHost),
    msgspec.msgpack.Decoder(ToHost),
    msgspec.msgpack.Decoder(FromRank),
    msgspec.msgpack.Decoder(RankLaunch),
)


@target
def core_messages(data: bytes) -> None:
    """A message between processes is decoded or refused; a request becomes a sequence or a `ValueError`."""
    choice, rest = choose(data, len(DECODERS))
    with contextlib.suppress(ValueError):
        message = DECODERS[choice].decode(rest)
        if hasattr(message, "prompt_token_ids"):
            Sequence.from_request(message, 16, sent_time=None)
