"""The suites of `make conformance`: their requirements, their tests, and the tests that cannot run here."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """Tests that drive the server with one client, in an environment of the client's own."""

    name: str
    """Also the name of the environment, `.conformance/<name>`, with the packages of `requirements/<name>.txt` or npm's
    lock."""
    packages: tuple[str, ...]
    """The clients under test, whose versions the results contain."""
    tests: tuple[str, ...]
    """Files with the tests, in this folder."""
    what: str
    """The subject of the suite, in a line for the results."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    script: str = ""
    """Answers of the model, for `tests.e2e.scripted_server`; default: the embedded model answers."""
    flags: tuple[str, ...] = ()
    """Further flags of a server of the suite's own; files are in this folder."""
    has_npm: bool = False
    """Whether tests in Python run a program of npm's: `<name>/package-lock.json` is installed too."""

    @property
    def is_node(self) -> bool:
        """Whether npm installs it: its package files are next to the tests."""
        return self.tests[0].endswith(".mjs")


SUITES = (
    Suite(
        "openai",
        ("openai",),
        (
            "test_openai_chat.py",
            "test_openai_completions.py",
            "test_openai_errors.py",
            "test_openai_models.py",
            "test_openai_responses.py",
        ),
        "the official client: every method that maps to this server, plain, streamed, raw and async",
    ),
    Suite(
        "node",
        ("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai-compatible"),
        ("node/openai.test.mjs", "node/anthropic.test.mjs", "node/ai_sdk.test.mjs"),
        "the npm clients of both APIs, and the Vercel AI SDK's OpenAI-compatible provider",
    ),
    Suite(
        "anthropic",
        ("anthropic",),
        ("test_anthropic.py",),
        "Anthropic's official client: messages, tools, structured output, counts and errors, plain and streamed",
    ),
    Suite(
        "claude-code",
        ("@anthropic-ai/claude-code",),
        ("claude-code/claude_code.test.mjs",),
        "the agent itself, with a scripted model: a loop of tools, a conversation that goes on, errors",
        script="claude-code/script.json",
    ),
    Suite(
        "codex",
        ("@openai/codex",),
        ("test_codex.py",),
        "Codex CLI, with a scripted model: shell, patches, MCP, agents, reasoning, compaction, resuming",
        script="codex/script.json",
        flags=("--chat-template", "codex/messages.jinja", "--tool-call-parser", "hermes"),
        has_npm=True,
    ),
    Suite(
        "coding-agents",
        ("opencode-linux-x64", "@continuedev/cli"),
        ("coding-agents/agents.test.mjs",),
        "opencode and Continue's command line, with a scripted model: a command is run and its output read",
        script="coding-agents/script.json",
        flags=("--chat-template", "codex/messages.jinja", "--tool-call-parser", "hermes"),
    ),
    Suite(
        "qwen-code",
        ("@qwen-code/qwen-code",),
        ("qwen-code/qwen_code.test.mjs",),
        "qwen-code, with a scripted model: commands are run and their output read, and a conversation goes on",
        script="qwen-code/script.json",
        flags=("--chat-template", "codex/messages.jinja", "--tool-call-parser", "hermes"),
    ),
    Suite(
        "pi",
        ("@mariozechner/pi-coding-agent",),
        ("pi/pi.test.mjs",),
        "pi, with a scripted model: a command is run and its output read",
        script="pi/script.json",
        flags=("--chat-template", "codex/messages.jinja", "--tool-call-parser", "hermes"),
    ),
    Suite(
        "aider",
        ("aider-chat",),
        ("test_aider.py",),
        "aider, with a scripted model: an edit is applied and committed, streamed and not",
        {"AIDER_ANALYTICS": "false"},
        script="aider/script.json",
        flags=("--chat-template", "codex/messages.jinja", "--tool-call-parser", "hermes"),
    ),
    Suite(
        "langchain",
        ("langchain-tests", "langchain-openai", "langchain-anthropic"),
        ("test_langchain.py",),
        "the standard chat-model suite, unit and integration, over chat completions, responses and messages",
        {"LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false"},
    ),
    Suite("instructor", ("instructor",), ("test_instructor.py",), "typed answers in each of its modes"),
    Suite(
        "agents",
        ("openai-agents",),
        ("test_agents.py",),
        "a two-turn tool loop over chat completions and over responses, plain and streamed",
        {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    ),
    Suite(
        "litellm",
        ("litellm",),
        ("test_litellm.py",),
        "its completion, text completion and responses calls, and its errors",
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Suite("llm", ("llm",), ("test_llm.py",), "its command line, with the server named in extra-openai-models.yaml"),
    Suite("pydantic-ai", ("pydantic-ai-slim",), ("test_pydantic_ai.py",), "agents with tools and typed output"),
    Suite(
        "lm-eval",
        ("lm-eval", "transformers"),
        ("test_lm_eval.py",),
        "a multiple-choice task scored through `local-completions` and by transformers",
        {"HF_DATASETS_OFFLINE": "1"},
    ),
    Suite("guidellm", ("guidellm",), ("test_guidellm.py",), "a short load over each endpoint"),
    Suite(
        "schemathesis",
        ("schemathesis",),
        ("test_schemathesis.py",),
        "requests generated from `/openapi.json`: examples, coverage, fuzzing and stateful phases",
    ),
    Suite(
        "schemathesis-pooling",
        ("schemathesis",),
        ("test_schemathesis.py",),
        "the same for embeddings, scores, reranking and pooling, which another server of the model answers",
        {"CONFORMANCE_PATHS": "embeddings|rerank|score|classify|pooling"},
        flags=("--task", "embed"),
    ),
)
"""In the order in which they run."""
