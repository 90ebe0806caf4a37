"""`AttentionBackend`: the contract between the model runner, the attention layers and a device's attention code.

In order: a step's rows and its metadata, the contract, and the registry from which `select_backend` chooses.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from models.ops import aiter, triton
from models.ops.cpu import runtime
from models.ops.cpu.structures import Step
from models.ops.memory import Send
from models.ops.types import AttentionInputs, AttentionOptions, KVCacheTensor, LatentInputs, VectorCache
from models.registry import Registry

_log = logging.getLogger(__name__)

NO_SLOT = -1
"""The slot of tokens that are not stored, of rows without a state, and of tokens that change no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The rows of a step, on the host: B rows with T tokens in total, first `num_decodes` of `query_len` tokens each,
    then prefills."""

    query_lens: npt.NDArray[np.int64]  # [B], tokens computed
    seq_lens: npt.NDArray[np.int64]  # [B], tokens attended to, this step's included
    block_tables: npt.NDArray[np.int32] | None
    """[B, max_blocks]; entries past a row's length are ignored. None where the tables are on the device."""
    slot_mapping: npt.NDArray[np.int64]  # [T], where the token's K and V go: block * block_size + offset
    num_decodes: int
    query_len: int = 1
    """Tokens of a decode row: one plus the drafts that are verified with it."""
    states: npt.NDArray[np.int64] | None = None  # [B], see `AttentionMetaData.states`; None where layers keep none
    states_after: npt.NDArray[np.int64] | None = None  # [T], see `AttentionMetaData.states_after`
    num_by_token: int = 0
    """See `AttentionMetaData.num_by_token`."""


_NONE = np.zeros(0, dtype=np.int64)
NO_ROWS = AttentionBatch(
    query_lens=_NONE, seq_lens=_NONE, block_tables=np.zeros((0, 1), np.int32), slot_mapping=_NONE, num_decodes=0
)
"""A step without rows, for code that is recorded and not run."""


@dataclass(slots=True, kw_only=True)
class AttentionMetaData:
    """A step's metadata, shared by all layers: B rows, decodes first, with T tokens in total."""

    backend: "AttentionBackend"
    cu_seqlens_q: torch.Tensor  # [B + 1] int32, the index of each row's first token among the T
    seq_lens: torch.Tensor  # [B] int32, tokens attended to, this step's included
    block_tables: torch.Tensor  # [B, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64, block * block_size + offset of each token's K and V
    num_decodes: int
    """Number of leading rows with `query_len` tokens each."""
    query_len: int = 1
    """One plus the number of drafts that are verified."""
    states: torch.Tensor | None = None  # [B] int64
    """Index in the layers' `StateCache` of each row's initial state."""
    states_after: torch.Tensor | None = None  # [T] int64
    """Index at which the state after each token is stored; `NO_SLOT` for a token that was computed before and changes
    no state. None if each row's state is updated in place."""
    num_by_token: int = 0
    """Number of leading rows with several indices in `states_after`, because they verify drafts."""
    step: Step | None = None
    """The same step in the layout of the CPU operators, if they are used."""


Observer: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, KVCacheTensor, AttentionOptions, torch.Tensor | None, bool], None
]
"""Receives the final queries, the output, the layer's cache, options and sinks, and whether the cache holds values in
pairs, the layout of the CPU's operators. # 2 x [T, Hq, D]"""


class AttentionBackend(ABC):
    """Attention over a paged KV cache for one kind of device.

    The model runner builds metadata once per step; each layer calls `forward` or `latent_attention` with it. A backend
    whose device replays decode steps from captured graphs also implements the four methods of capture:
    `init_capture` allocates the fixed buffers that graphs refer to, then for each size `prepare_for_capture` returns
    metadata over those buffers, and before each replay `prepare_for_replay` copies the step's values into them.
    """

    name: ClassVar[str]
    """The backend's name in logs."""
    reads_tables_on_device: ClassVar[bool] = False
    """Whether `build_metadata` takes block tables that are on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.observer: Observer | None = None
        """Called by `forward` of backends whose kernels are observed, with their results."""

    @classmethod
    def serves(cls, device: torch.device) -> bool:
        """Whether a backend of another package serves a device. Kaon's own are chosen by `select_backend`."""
        del device
        return False

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's K or V with vectors of `head_dim`. By default a head's vectors in a block are
        contiguous."""
        return num_blocks, num_kv_heads, block_size, head_dim

    def stored_size(self, dim: int, dtype: torch.dtype, *, is_latent: bool = False) -> int:
        """Number of elements that a key, a value or a latent of `dim` elements takes in a cache of `dtype`; the others
        are padding, which no layer sees."""
        del dtype, is_latent
        return dim

    @abstractmethod
    def build_metadata(
        self, batch: AttentionBatch, tables: torch.Tensor | None = None, send: Send | None = None
    ) -> AttentionMetaData:
        """Build a step's metadata.

        `tables`: the block tables on the device, where `batch` has none. # [B, max_blocks] int32
        `send` copies the arrays to the device, possibly later; without it they are copied at once. No work that reads
        them is enqueued here.
        """

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cache: KVCacheTensor,
        metadata: AttentionMetaData,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Write K and V to the cache, then attend. # q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, V] -> [T, Hq, V]

        Without `k` and `v`, an earlier layer of the step has written them, normalised and rotated, to this cache.
        Queries and keys are first normalised and rotated if `inputs` has norms and a rotation; queries may be
        overwritten. Raises `ValueError` for an FP8 cache that the hardware does not support.
        """

    def latent_attention(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        options: AttentionOptions,
        selected: torch.Tensor | None = None,
        inputs: LatentInputs | None = None,
    ) -> torch.Tensor:
        """Write latents to the cache, then attend to their keys and values. # -> [T, H, v]

        `q` [T, H, nope + rope]: rotated. `latent` [T, rank + rope]: the normalised latent, then the rotated key that
        all heads share. With `inputs`, neither is normalised or rotated yet. `kv_b` [H, nope + v, rank]: the
        projection from a latent to each head's key and value. `selected` [T, K]: positions that each token attends
        to, -1 for none; None for all up to its own. Raises `ValueError` if the backend has no latent attention.
        """
        raise _no_latents(self)

    def index_top_k(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        top_k: int,
    ) -> torch.Tensor | None:
        """Write index keys to the cache, then select the `top_k` best positions of each token. # -> [T, top_k] int64

        A key's score is the sum over heads of `weights * relu(q . k)`. # q [T, H, D], weights [T, H] f32, k [T, D]
        Positions are unordered, -1 if fewer are visible. Returns None if no sequence is longer than `top_k`. Raises
        `ValueError` if the backend has no latent attention.
        """
        raise _no_latents(self)

    def init_capture(self, max_batch_size: int, max_blocks: int, query_len: int = 1) -> None:  # noqa: B027, optional
        """Allocate the buffers of graphs of up to `max_batch_size` rows of `query_len` tokens and `max_blocks`."""

    def captured_tables(self, batch_size: int, query_len: int = 1) -> torch.Tensor | None:
        """The block tables that a graph of `batch_size` rows reads, if a step may write its own there directly.

        # [batch_size, max_blocks] int32
        """
        del batch_size, query_len
        return None

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> AttentionMetaData | None:
        """Metadata over the fixed buffers for a graph of `batch_size` rows; None if the backend supports no
        capture."""
        del batch_size, query_len
        return None

    def prepare_for_replay(self, metadata: AttentionMetaData, batch_size: int) -> None:  # noqa: B027, optional
        """Copy a step's metadata into the buffers of the graph of `batch_size` rows, and empty the remaining rows.

        An empty row has length 0, and its slots and states are -1: it writes nothing, and its output is zero.
        """


def _no_latents(backend: AttentionBackend) -> ValueError:
    return ValueError(
        f"the model attends to latents, which the attention backend {backend.name} cannot do; on a GPU this "
        "needs Triton: repair its installation, or use device cpu"
    )


BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "aiter": "models.attention.aiter",
        "triton": "models.attention.triton",
        "torch": "models.attention.torch_paged",
        "cpu-native": "models.attention.cpu_native",
        "cpu": "models.attention.cpu",
    },
)


def select_backend(device: torch.device) -> AttentionBackend:
    """The backend for `device`: the first of another package that serves it, or Kaon's own.

    On a GPU, Triton's kernels are initialised unless attention is left to torch. Raises `ValueError` if there is no
    GPU.
    """
    foreign = (name for name in BACKENDS.foreign_names() if BACKENDS[name].serves(device))
    if (name := next(foreign, None)) is None:
        require_backend(device)
        name = _gpu_backend(device) if device.type == "cuda" else _cpu_backend()
    return BACKENDS[name](device)


def require_backend(device: torch.device) -> None:
    """Raise `ValueError` if a type of device has no backend. Uses no GPU, since a rank has not chosen its own yet."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {device.type}, but torch finds no GPU; run `kaon doctor` for the reason, or use device cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device.type}, for which this release has no attention backend; use device cpu")


def _cpu_backend() -> str:
    return "cpu-native" if runtime.active() else "cpu"


def _gpu_backend(device: torch.device) -> str:
    # Triton is not initialised if attention is left to torch, since it may end the process.
    reason = None if triton.leaves("attention") else triton.start(device)
    if triton.takes("attention"):
        return "aiter" if aiter.takes("attention") or aiter.takes("decode") else "triton"
    if reason is not None:
        _log.warning("Plain torch computes everything, slowly: %s", reason)
    return "torch"
