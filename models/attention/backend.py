"""`AttentionBackend`: the contract between the model runner, the attention layers and a device's attention code."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from models.attention.context import AttentionMetaData
from models.ops import aiter as library
from models.ops import triton as kernels
from models.ops.cpu import runtime
from models.ops.memory import Send
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor, LatentInputs, Rotation, VectorCache


class AttentionBackend(Protocol):
    """Attention over a paged KV cache for one kind of device.

    The model runner builds metadata once a step; each layer calls `forward` with it. GPU backends replay decode
    steps from captured graphs: `init_capture` allocates the fixed buffers that graphs refer to, then for each size
    `prepare_for_capture` gives metadata over those buffers, and before each replay `prepare_for_replay` copies the
    step's values into them. A backend whose device has no graphs does nothing in the three.
    """

    name: str
    reads_tables_on_device: bool
    """Whether `build_metadata` takes block tables that lie on the device."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's K, and of its V."""

    def build_metadata(
        self,
        *,
        query_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
        seq_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
        block_tables: npt.NDArray[np.int32] | torch.Tensor,
        slot_mapping: npt.NDArray[np.int64],
        num_decodes: int,
        slots: npt.NDArray[np.int64] | None = None,
        query_len: int = 1,
        send: Send | None = None,
    ) -> AttentionMetaData:
        """Everything that a step's layers share. B rows, `num_decodes` of `query_len` first, then spans; T tokens.

        `query_lens` [B]: tokens computed. `seq_lens` [B]: tokens attended to, those included. `block_tables`
        [B, max_blocks]: entries past a row's length are ignored. `slot_mapping` [T]: block * block_size + offset.
        `slots` [B]: each row's place in the layers' states, where they keep any. `send` brings the arrays to the
        device; without it each call makes a copy of its own. Nothing is enqueued that reads them.
        """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCacheTensor,
        metadata: AttentionMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Write K and V to the cache, then attend. # q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]

        `sinks` [Hq] are logits beside the scores: they take probability and add no value. `norms` and `rotation`, in
        this order, are applied to queries and keys first; queries may be changed in place.
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
        """Write latents to the cache, then attend to what they expand to. # -> [T, H, v]

        `q` [T, H, nope + rope]: rotated. `latent` [T, rank + rope]: the normalised latent, then the rotated key that
        all heads share. With `inputs`, neither is normalised or rotated yet. `kv_b` [H, nope + v, rank]: makes a
        head's key and value of a latent. `selected` [T, K]: positions that each token attends to, -1 for none; None:
        all before it and itself.
        """

    def index_top_k(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        top_k: int,
    ) -> torch.Tensor | None:
        """Write index keys to the cache, then choose each token's `top_k` best. # -> [T, top_k] int64

        A key's score is the sum over heads of `weights * relu(q . k)`. # q [T, H, D], weights [T, H] f32, k [T, D]
        Positions are in no order, -1 where fewer are seen. None where no sequence is longer than `top_k`.
        """

    def init_capture(self, max_batch_size: int, max_blocks: int, query_len: int = 1) -> None:
        """Allocate the buffers of graphs of up to `max_batch_size` rows of `query_len` tokens and `max_blocks`."""

    def captured_tables(self, batch_size: int, query_len: int = 1) -> torch.Tensor | None:
        """Where a graph of `batch_size` rows reads its block tables, if they may be written there at once.

        # [batch_size, max_blocks] int32
        """

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> AttentionMetaData | None:
        """Metadata over those buffers for a graph of `batch_size` rows; None where the device has no graphs."""

    def prepare_for_replay(self, metadata: AttentionMetaData, batch_size: int) -> None:
        """Copy a step's metadata into the buffers of the graph of `batch_size` rows; those after its own are empty.

        An empty row is of length 0, with slots of -1: it writes nothing, attends to nothing, and comes out as zeros.
        """


# [attention] Attention backends, one a kind of device; `select_backend` chooses.

_log = logging.getLogger(__name__)


def select_backend(device: torch.device) -> AttentionBackend:
    """The backend for `device`, whose Triton kernels run from here on. Raises `ValueError` where there is no GPU."""
    require_backend(device)
    if device.type == "cuda":
        return _gpu_backend(device)
    if runtime.active():
        from models.attention.cpu_native import NativeCPUAttentionBackend

        return NativeCPUAttentionBackend()
    from models.attention.cpu import CPUAttentionBackend

    return CPUAttentionBackend()


def require_backend(device: torch.device) -> None:
    """Raise `ValueError` where a kind of device has no backend. Touches no GPU: a rank has not chosen its own yet."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device.type}, but torch finds no GPU; `kaon doctor` says why; use device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device.type}, for which this release has no attention backend; use device cpu")


def _gpu_backend(device: torch.device) -> AttentionBackend:
    # Who leaves attention to torch may do so because Triton takes the process down.
    reason = None if kernels.leaves("attention") else kernels.start(device)
    if kernels.takes("attention") and (library.takes("attention") or library.takes("decode")):
        from models.attention.aiter import AiterAttentionBackend

        return AiterAttentionBackend(device)
    if kernels.takes("attention"):
        from models.attention.triton import TritonAttentionBackend

        return TritonAttentionBackend(device)
    from models.attention.torch_paged import TorchAttentionBackend

    if reason is not None:
        _log.warning("Plain torch computes everything, slowly: %s", reason)
    return TorchAttentionBackend(device)
