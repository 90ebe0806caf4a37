"""No parser violates its contract on the inputs of its corpus, or on simple mutations of them. Longer: `make fuzz`."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz import run
from tests.fuzz.targets import CORPORA, TARGETS

MUTATIONS = 15
"""Number of mutations of each input of a corpus."""
LONG_MINUTES = 5.0


def mutations(data: bytes) -> Iterator[bytes]:
    """The input, and the same variants each time, which differ in a byte or a piece."""
    yield data
    random = Random(0)
    for _ in range(MUTATIONS if data else 0):
        at, end = sorted(random.choices(range(len(data) + 1), k=2))
        match random.randrange(4):
            case 0:
                yield data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
            case 1:
                yield data[:at] + data[end:]
            case 2:
                yield data[:end] + data[at:end] + data[end:]
            case _:
                yield data[:end]


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert run.names() == sorted(TARGETS)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_inputs_of_a_corpus_and_their_mutations_break_no_promise(name: str) -> None:
    inputs = sorted((CORPORA / name).iterdir())
    assert inputs
    for file in inputs:
        for data in mutations(file.read_bytes()):
            try:
                TARGETS[name](data)
            except BaseException as error:
                error.add_note(f"{name} on a mutation of {file.name}: {data!r}")
                raise


@pytest.mark.slow
@pytest.mark.timeout(LONG_MINUTES * 60 * 3)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_input_that_a_fuzzer_finds_breaks_a_promise(name: str) -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this Python or machine")
    outcome = run.fuzz(name, LONG_MINUTES * 60)
    assert not outcome.failure, outcome.failure
    assert outcome.runs > 0
