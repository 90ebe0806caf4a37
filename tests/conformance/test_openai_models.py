"""The official client: `models`."""

import openai
import pytest


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI(max_retries=0)


def test_the_served_model_is_listed(client: openai.OpenAI, model: str) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.object) == (model, "model")
    assert listed.created > 0


def test_a_model_is_retrieved_by_name(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model) == client.models.list().data[0]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-17")
    assert raised.value.code == "model_not_found"


async def test_the_async_client_pages_through_the_same_list(model: str) -> None:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        assert [each.id async for each in client.models.list()] == [model]
