"""Compares the kernels with torch for the loaded model before it is served.

A release of Triton, or of the assembler that it uses, may miscompile a kernel without any error. An operator whose
kernels are wrong is computed by torch, where torch can compute it.
"""

import logging
import time
from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from engine.doctor_report import ANOTHER_TRITON
from engine.runner.device import oom_at_start
from engine.runner.loaded_model import LoadedModel, drafter_caches
from engine.runner.warm_up import dummy_prompt
from models.attention.backend import AttentionBackend
from models.attention.context import forward_context
from models.layers.base import CausalLM
from models.layers.moe import FusedMoE
from models.ops import aiter, flash_attention, triton
from models.ops import registry as backends
from models.ops.flash_attention import FlashCase
from models.ops.self_test import Case, compute_all, first_failure
from models.ops.stored_weight import make_dense, stored_of

if TYPE_CHECKING:
    from models.ops.triton.specializations import CheckedKernels

_log = logging.getLogger(__name__)


def check_kernels(loaded: LoadedModel, checked: "CheckedKernels | None" = None) -> LoadedModel:
    """Leave operators whose kernels are wrong on any rank to torch. Returns the model with the backends it then uses.

    `checked` records which specialisations of kernels were compared.

    An operator that `kernel_backend` assigns to Triton keeps its kernels, with a warning. Raises `ValueError` with one
    sentence where nothing else can compute the operator. The caches of the checks are freed.
    """
    device, backend = loaded.device, loaded.backend
    if device.type == "cpu" and not triton.active():
        return loaded
    start = time.perf_counter()
    # A rank without Triton has no kernels to compare, but takes part in the collectives that share the results.
    every = _every_case_of(loaded) if triton.active() else {}
    cases = _ours_of(every)
    if not loaded.device_api.computes:
        compute_all(chain.from_iterable(cases.values()), device)
        return loaded
    # All ranks check all operators in the same order, even those that their layers do not use.
    for operator in _OPERATORS:
        with nullcontext() if checked is None else checked.checking(operator):
            reason = failure_of(cases.get(operator, ()), device, operator)
        if loaded.parallel.all_agree(reason is None, device):
            continue
        problem = f"Triton's kernels for {operator} are wrong on {_device_name(device)}: "
        problem += reason or "another rank's kernels are wrong"
        backend = _refuse(loaded, operator, problem) or backend
    _start_flash_attention(loaded, every.get("attention", ()))
    _log.info(
        "Triton's kernels were compared with torch in %.1f s%s",
        time.perf_counter() - start,
        "" if checked is None else f", in {len(checked.checked)} specialisations",
    )
    return replace(loaded, backend=backend)


def _start_flash_attention(loaded: LoadedModel, cases: Iterable[Case]) -> None:
    """Enable a library's flash attention for long prompts, if its results are right on all ranks.

    Torch's is used with Triton's kernels only, since aiter's attention backend computes long prompts itself.
    """
    device = loaded.device
    flash_attention.start(frozenset())
    by_triton = backends.named(loaded.config.kernel_backend, backends.TRITON) & {"attention", backends.PREFILL}
    is_there = aiter.takes(backends.PREFILL) or not aiter.takes("attention")
    if by_triton or not is_there or not triton.takes("attention"):
        return
    if triton.is_invariant() or loaded.dtype.itemsize != 2:
        return
    found: dict[Hashable, FlashCase] = {}
    for case in cases:
        from models.ops.triton.cases.attention import AttentionCase

        if not isinstance(case, AttentionCase) or case.has_sinks or case.value_dim is not None:
            continue
        if flash_attention.supports(case.options, None):
            sizes = case.heads, case.kv_heads, case.head_dim
            flash = FlashCase(*sizes, case.options, case.dtype, case.cache_dtype, case.block_size)
            found.setdefault(flash.key, flash)
    by = f"{'aiter' if aiter.takes(backends.PREFILL) else 'torch'}'s flash attention"
    reason = "this release of torch has none" if flash_attention.library() is None else None
    # Either all cases use the library or none, so that all ranks choose the same.
    if reason is None:
        reason = failure_of(found.values(), device, "attention")
    if loaded.parallel.all_agree(reason is None and bool(found), device):
        flash_attention.start(frozenset(found))
        _log.info("Prompts of %d tokens and more attend by %s", flash_attention.LEAST_QUERIES, by)
    elif found:
        _log.info("Long prompts use the kernels of other attention, not %s: %s", by, reason or "it failed on a rank")


def watch_kernels() -> "CheckedKernels":
    """Record from now on which specialisations of kernels are compared and launched."""
    from models.ops.triton.specializations import CheckedKernels

    checked = CheckedKernels()
    checked.watch()
    return checked


def refuse_unchecked(loaded: LoadedModel, checked: "CheckedKernels") -> LoadedModel | None:
    """Leave operators to torch, on all ranks, whose kernels the start launched in a specialisation that was not
    compared.

    Returns the changed model, or None if there are no such operators. Raises as `check_kernels` does.
    """
    backend, is_other = loaded.backend, False
    for operator in _OPERATORS:
        forms = checked.unchecked_of(operator)
        if loaded.parallel.all_agree(not forms, loaded.device):
            continue
        is_other = True
        problem = f"Triton's kernels for {operator} were launched in a form that was not compared with torch: "
        backend = _refuse(loaded, operator, problem + (str(forms[0]) if forms else "on another rank")) or backend
    return replace(loaded, backend=backend) if is_other else None


def _refuse(loaded: LoadedModel, operator: str, problem: str) -> AttentionBackend | None:
    """Leave an operator to torch, unless `kernel_backend` assigns it to Triton. `problem`: a sentence
    without its full stop.

    Returns the new attention backend, if it changes. Raises `ValueError` where nothing else can compute the operator.
    """
    name = _name_of(operator)
    if name in backends.named(loaded.config.kernel_backend, backends.TRITON):
        used = f"They are used nevertheless, because kernel_backend has {name}=triton"
        _log.warning("%s. %s; %s", problem, used, ANOTHER_TRITON)
        return None
    if operator == _LATENTS:
        raise ValueError(
            f"{problem}; a GPU has no other kernels for them. Use device cpu, or set kernel_backend to "
            f"attention=triton to serve nevertheless; {ANOTHER_TRITON}"
        )
    _log.warning("%s. Plain torch computes them, slowly; %s", problem, ANOTHER_TRITON)
    return leave_to_torch(operator, loaded.model, loaded.device)


_LATENTS = "latents"
"""Latent attention, for which Kaon has no torch implementation on a GPU."""
_OPERATORS = ("moe", "attention", _LATENTS, "norm", "activation", "linear", "recurrent", "sampling")
"""The order of the checks. Wrong expert sorting yields wrong addresses, which may end the process, so it is first."""
_OF_AITER = frozenset({"attention", "norm", "activation", "linear"})
"""Operators that aiter's probe compares where aiter computes them. Its experts have no cases here."""
_FUSED = frozenset({"norm", "activation"})
"""Operators that torch.compile fuses with others, where it is enabled."""


def _cases_of(loaded: LoadedModel) -> dict[str, list[Case]]:
    """The cases of the operators that Triton's kernels compute."""
    return _ours_of(_every_case_of(loaded))


def _ours_of(every: dict[str, list[Case]]) -> dict[str, list[Case]]:
    found = {operator: [case for case in cases if _is_ours(case)] for operator, cases in every.items()}
    return {operator: cases for operator, cases in found.items() if cases}


def _every_case_of(loaded: LoadedModel) -> dict[str, list[Case]]:
    """The cases by operator of the model and of its draft model, found by a pass of each with suspended
    kernels.
    """
    from engine.runner.kernel_cases import cases_of_model, merged_cases
    from models.attention.observer import ObservingBackend
    from models.ops.triton.cases.sampling import SamplingCase

    config, device, caches = loaded.config, loaded.device, loaded.layer_caches()
    is_compiled = loaded.compilation_level > 0
    block_size, have_states = config.kv_cache_block_size, caches.have_states
    # Two blocks, which are as far apart as those that serve.
    data = caches.allocate(2, 1)
    observer, of_drafter = ObservingBackend(device), ObservingBackend(device)
    context, token = dummy_prompt(observer, 0, block_size, device, have_states=have_states)
    with (
        torch.inference_mode(),
        nullcontext() if loaded.exchange is not None else loaded.parallel.without_collectives(),
        triton.idle(),
        torch.compiler.set_stance("force_eager") if is_compiled else nullcontext(),
    ):
        with forward_context(token.metadata, context, loaded.dp_metadata(1), kv_cache_data=data):
            loaded.model(token.input_ids, token.positions)
        if loaded.drafter is not None:
            drafter = loaded.drafter
            context, token = dummy_prompt(of_drafter, 0, block_size, device, have_states=False)
            states = torch.zeros(1, len(drafter.hidden_layers) * loaded.hidden_size, dtype=loaded.dtype, device=device)
            with forward_context(token.metadata, context, kv_cache_data=drafter_caches(data)):
                drafter(token.input_ids, token.positions, drafter.combine(states))
    most, query_len = config.max_num_batched_tokens, 1 + config.num_drafts
    dtype = loaded.dtype
    found = cases_of_model(loaded.model, observer, data, dtype, most, query_len=query_len)
    if loaded.drafter is not None:
        # A drafting pass has entries for a step's tokens and for the sampled tokens.
        most += config.max_num_seqs
        of_drafts = cases_of_model(loaded.drafter, of_drafter, drafter_caches(data), dtype, most)
        found = merged_cases(found, of_drafts)
    found["sampling"] = [SamplingCase(loaded.model_config.vocab_size)]
    by_torch = _FUSED if is_compiled else frozenset()
    return {operator: cases for operator, cases in found.items() if operator not in by_torch}


def _is_ours(case: Case) -> bool:
    """Whether Triton's kernels compute a case, rather than a library with its own probe."""
    operator = case.operator
    is_others = operator in _OF_AITER and case.is_in_aiter and aiter.takes(operator)
    return triton.takes(_name_of(operator)) and not is_others


def failure_of(cases: Iterable[Case], device: torch.device, operator: str) -> str | None:
    """The reason why an operator's kernels are wrong; None if they are right, or memory did not suffice to compare.

    Raises `ValueError` if the kernels made the device unusable.
    """
    try:
        return first_failure(cases, device)
    except torch.OutOfMemoryError:
        _log.warning("There is no memory to compare the kernels for %s with torch", operator)
        return None
    # A compiler or a driver may raise any exception.
    except Exception as failure:  # noqa: BLE001
        reason = f"they failed: {type(failure).__name__}: {failure}".splitlines()[0]
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as lost:
        raise ValueError(
            f"Triton's kernels for {operator} took the GPU from this process ({reason}); set kernel_backend to "
            f"{'torch' if operator == _LATENTS else operator + '=torch'}; {ANOTHER_TRITON}"
        ) from lost
    return reason


def leave_to_torch(operator: str, model: CausalLM, device: torch.device) -> AttentionBackend | None:
    """Have plain torch compute an operator from now on. Returns the new attention backend, if it changes."""
    triton.leave_to_torch(triton.left() | {operator})
    if operator == "attention":
        from models.attention.torch_paged import TorchAttentionBackend

        return TorchAttentionBackend(device)
    if operator in ("moe", "linear"):
        is_expert = operator == "moe"
        with oom_at_start(
            "a model whose weights were made dense", "serve a smaller one, or repair the installation of Triton"
        ):
            for module in cast(nn.Module, model).modules():
                if isinstance(module, FusedMoE) is is_expert:
                    for parameter in module.parameters(recurse=False):
                        if stored_of(parameter) is not None:
                            make_dense(parameter)
    return None


def _name_of(operator: str) -> str:
    """The operator's name in `kernel_backend`."""
    return "attention" if operator == _LATENTS else operator


def _device_name(device: torch.device) -> str:
    """The device and the compiler, in words."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return f"{name} by Triton {triton.version()}" if triton.active() else name
