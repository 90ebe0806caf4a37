"""`instructor`: typed answers in each mode that OpenAI's provider has."""

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

ALICE: Any = [
    {"role": "user", "content": "Extract name and age as JSON: Alice is 30 years old and lives in Paris."},
]
MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
]


class Person(BaseModel):
    name: str
    age: int


class Ticket(BaseModel):
    kind: Literal["bug", "wish"]
    weight: int = Field(ge=1, le=3)


def client_of(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_type_is_filled_in(model: str, mode: instructor.Mode) -> None:
    person = client_of(mode).create(model=model, messages=ALICE, response_model=Person, temperature=0, max_retries=0)
    assert isinstance(person, Person)
    assert person.name


@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.name
)
@pytest.mark.parametrize("seed", range(3))
def test_bounds_and_choices_hold_at_any_temperature(model: str, mode: instructor.Mode, seed: int) -> None:
    ticket = client_of(mode).create(
        model=model,
        messages=[{"role": "user", "content": "The door does not open."}],
        response_model=Ticket,
        temperature=1.5,
        seed=seed,
        max_retries=0,
    )
    assert isinstance(ticket, Ticket)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_partial_answers_grow_into_the_whole(model: str, mode: instructor.Mode) -> None:
    partial = list(
        client_of(mode).create_partial(
            model=model, messages=ALICE, response_model=Person, temperature=0, max_retries=0
        )
    )
    assert len(partial) > 2
    Person.model_validate(partial[-1].model_dump())


def test_a_list_of_a_type_is_streamed(model: str) -> None:
    people = client_of(instructor.Mode.TOOLS).create(
        model=model,
        messages=ALICE,
        response_model=Iterable[Person],
        temperature=0,
        max_tokens=400,
        stream=True,
        max_retries=0,
    )
    assert all(isinstance(person, Person) for person in people)


def test_the_completion_comes_with_the_value(model: str) -> None:
    person, completion = client_of(instructor.Mode.JSON_SCHEMA).create_with_completion(
        model=model, messages=ALICE, response_model=Person, temperature=0, max_retries=0
    )
    assert person.model_dump() == {"name": "Alice", "age": 30}
    assert completion.usage.total_tokens > 0


async def test_the_async_client_fills_in_a_type(model: str) -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(max_retries=0), mode=instructor.Mode.JSON_SCHEMA)
    person = await client.create(model=model, messages=ALICE, response_model=Person, temperature=0, max_retries=0)
    assert person.model_dump() == {"name": "Alice", "age": 30}
