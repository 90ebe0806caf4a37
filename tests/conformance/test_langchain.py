"""`langchain-tests`: the standard chat-model suites through `ChatOpenAI`, over chat completions and over responses."""

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests


class _Served:
    """What the two standard suites ask of whoever runs them."""

    use_responses_api = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["KAON_MODEL"],
            "base_url": os.environ["OPENAI_BASE_URL"],
            "api_key": os.environ["OPENAI_API_KEY"],
            "temperature": 0,
            "max_retries": 0,
            "stream_usage": True,
            "use_responses_api": self.use_responses_api,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestUnit(_Served, ChatModelUnitTests):
    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"OPENAI_API_KEY": "key", "OPENAI_API_BASE": "http://127.0.0.1/v1"},
            {"model": os.environ["KAON_MODEL"]},
            {"openai_api_key": "key", "openai_api_base": "http://127.0.0.1/v1"},
        )

    @pytest.mark.xfail(reason="compares the client's own serialised form with a snapshot; makes no request")
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


class TestChatCompletions(_Served, ChatModelIntegrationTests):
    @property
    def model_override_value(self) -> str:
        return os.environ["KAON_MODEL"]


class TestResponses(TestChatCompletions):
    use_responses_api = True
