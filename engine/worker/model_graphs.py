"""Which models replay decodes from graphs, and the `DecodeGraphs` of one that does. Asked by the model runner."""

import dataclasses

from engine.config import Config
from engine.spec_decode.drafts import most_rows
from engine.worker.decode_graphs import DecodeGraphs
from engine.worker.device import Device
from engine.worker.graph_memory import GraphMemory
from engine.worker.graph_runner import GraphRunner, GraphShape, capture_sizes
from engine.worker.layer_caches import LayerCaches
from models.attention.base import AttentionBackend
from models.base import CausalLM
from models.lora.captured import why_not_captured
from models.parallel import TensorParallel


def why_no_graphs(config: Config, device: Device, parallel: TensorParallel, model: CausalLM) -> str | None:
    """What keeps decodes out of graphs, in words; empty where that needs none; None: nothing."""
    if not device.has_graphs or config.compilation_config.enforce_eager:
        return ""
    if parallel.experts is not None and parallel.experts.exchange is not None:
        return "what replicas exchange is of another size at each step"
    if not parallel.is_captured:
        return "a graph captures no exchange between ranks on a CPU"
    return why_not_captured(model) if config.lora else None


def make_graphs(
    config: Config,
    device: Device,
    parallel: TensorParallel,
    model: CausalLM,
    backend: AttentionBackend,
    caches: LayerCaches,
    *,
    max_model_len: int,
    spare_block: int,
    spare_slot: int,
) -> DecodeGraphs:
    """Graphs of a model whose caches have a block and a slot to spare."""
    shape = GraphShape(
        block_size=config.kv_cache_block_size,
        max_blocks=-(-max_model_len // config.kv_cache_block_size),
        spare_block=spare_block,
        spare_slot=spare_slot,
        has_adapters=bool(config.lora),
        have_states=caches.have_states,
    )
    sizes = capture_sizes(config.compilation_config.cudagraph_capture_sizes, config.max_num_seqs)
    memory = GraphMemory(device.memory)
    plain = GraphRunner(device, backend, model, sizes, shape, parallel, memory)
    if not config.num_drafts:
        return DecodeGraphs(plain)
    shape = dataclasses.replace(shape, query_len=1 + config.num_drafts)
    most = most_rows(config.max_num_seqs, config.num_drafts)
    sizes = sorted({min(size, most) for size in sizes})
    return DecodeGraphs(plain, GraphRunner(device, backend, model, sizes, shape, parallel, memory))
