"""Which library computes each operator, depending on the request and on what is installed."""

import pytest

from models.ops import registry as backends


def choices(*words: str, triton: str | None = None, **reasons: str | None) -> dict[str, str]:
    found = backends.choose(backends.parse(words), triton, reasons)
    return {choice.operator: str(choice) for choice in found}


def test_triton_computes_what_nothing_better_is_there_for() -> None:
    by_torch = ("gemm", "all_reduce")
    assert choices() == {name: f"{name} by {'torch' if name in by_torch else 'triton'}" for name in backends.OPERATORS}
    assert choices(norm=None)["norm"] == "norm by aiter"
    assert choices(norm=None)["moe"] == "moe by triton"
    assert choices(norm="it failed")["norm"] == "norm by triton"


def test_torch_computes_where_triton_does_not_work() -> None:
    found = choices(triton="no compiler", norm=None)
    assert found["attention"] == "attention by torch (no compiler)"
    assert found["norm"] == "norm by aiter"


def test_one_operator_or_all_are_left_to_what_is_asked_for() -> None:
    assert choices("torch", "norm=triton", norm=None)["norm"] == "norm by triton"
    assert choices("torch", "norm=triton")["moe"] == "moe by torch"
    assert choices("triton", norm=None)["norm"] == "norm by triton"


def test_a_library_that_is_asked_for_and_broken_prevents_nothing() -> None:
    found = choices("aiter", norm="it failed")
    assert found["norm"] == "norm by triton (not aiter: it failed)"
    assert found["moe"] == "moe by triton (not aiter: Kaon does not call it for this)"
    assert choices("aiter", triton="no compiler", norm="x")["norm"] == "norm by torch (not aiter: x; no compiler)"


def test_operators_that_are_named_as_tritons_are_those_of_the_last_word() -> None:
    assert backends.named(["norm=triton", "moe=triton", "moe=torch"], "triton") == {"norm"}
    assert backends.named(["norm=triton", "triton"], "triton") == set()
    assert backends.named([], "triton") == set()


@pytest.mark.parametrize("word", ["cuda", "norm=cuda", "nrm=torch", "="])
def test_a_name_that_there_is_not_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"kernel_backend is {word}; it must be one of auto, triton"):
        backends.parse([word])


def test_aiter_computes_some_operators_only_where_it_is_asked_to() -> None:
    works = dict.fromkeys(("attention", "decode", "gemm", "all_reduce"))
    found = choices(**works)
    assert found["attention"] == "attention by aiter"
    assert found["gemm"] == "gemm by torch"
    assert found["all_reduce"] == "all_reduce by torch"
    assert "decode" not in found
    found = choices("aiter", **works)
    assert {found[name] for name in works} == {f"{name} by aiter" for name in works}
    assert choices("gemm=aiter", **works)["gemm"] == "gemm by aiter"
    assert choices("gemm=aiter", gemm="it hung")["gemm"] == "gemm by torch (not aiter: it hung)"


def test_decodes_are_the_spans_backends_unless_another_is_asked_for() -> None:
    works = dict.fromkeys(("attention", "decode"))
    assert "decode" not in choices("triton", **works)
    assert choices("decode=triton", **works)["decode"] == "decode by triton"
    assert choices("attention=triton", "decode=aiter", **works)["decode"] == "decode by aiter"
    assert choices("attention=torch", "decode=aiter", **works)["decode"] == "decode by torch (attention is)"
    assert "decode" not in choices("aiter", "decode=auto", **works)


def test_long_prompts_are_aiters_where_it_works_and_known_later_elsewhere() -> None:
    assert choices(prefill=None)["prefill"] == "prefill by aiter"
    assert choices("prefill=aiter", prefill=None)["prefill"] == "prefill by aiter"
    for words in ((), ("prefill=torch",), ("prefill=triton",), ("attention=torch",), ("torch",)):
        assert "prefill" not in choices(*words, prefill=None if words else "it failed")


def test_aiter_attends_only_to_what_triton_has_stored() -> None:
    found = choices("aiter", triton="no compiler", attention=None, linear=None, moe=None)
    assert found["attention"] == "attention by torch (no compiler)"
    assert found["decode"] == "decode by torch (attention is)"
    assert found["linear"] == "linear by torch (no compiler)"
    assert found["moe"] == "moe by aiter"


@pytest.mark.parametrize(
    ("word", "others"),
    [("gemm=triton", "torch or aiter"), ("all_reduce=triton", "torch or aiter"), ("decode=torch", "triton or aiter")],
)
def test_a_backend_that_has_no_such_operator_is_refused(word: str, others: str) -> None:
    with pytest.raises(ValueError, match=f"kernel_backend is {word}, but .* is computed by {others}; name one"):
        backends.parse([word])
