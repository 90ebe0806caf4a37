"""`CapturingBackend`: the CPU's attention in plain torch over fixed metadata, for graphs that are the call itself."""

from dataclasses import fields

from models.attention.backend import AttentionMetaData
from models.attention.cpu import CPUAttentionBackend
from models.attention.cpu_plan import CPUAttentionMetaData


class CapturingBackend(CPUAttentionBackend):
    """The metadata of a graph is one object for each size, into which each replay copies the step's values."""

    def __init__(self) -> None:
        super().__init__()
        self.most = (0, 0)
        self.held: dict[tuple[int, int], CPUAttentionMetaData] = {}

    def init_capture(self, max_batch_size: int, max_blocks: int, query_len: int = 1) -> None:
        """See `AttentionBackend`."""
        self.most = max_batch_size, max_blocks

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> AttentionMetaData | None:
        """See `AttentionBackend`. Its metadata has no step before `prepare_for_replay`."""
        return self.held.setdefault((batch_size, query_len), object.__new__(CPUAttentionMetaData))

    def prepare_for_replay(self, metadata: AttentionMetaData, batch_size: int) -> None:
        """See `AttentionBackend`."""
        assert len(metadata.seq_lens) == batch_size
        assert metadata.num_decodes == (batch_size if metadata.query_len == 1 else 0)
        for field in fields(metadata):
            setattr(self.held[batch_size, metadata.query_len], field.name, getattr(metadata, field.name))
