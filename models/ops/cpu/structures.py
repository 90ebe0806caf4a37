"""ctypes mirrors of the C structures that the compiled operators take: of operators.h, exchange.c and group.c.

Fields have the names and the order of the C declarations. `Library` compares the size of each with the C compiler's.
"""

import ctypes
from typing import ClassVar

_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

SOFTMAX, SIGMOID = range(2)
"""Scorings of `Route`."""
MAX_HEAD_DIM = 256
MAX_LATENT_RANK, MAX_LATENT_DIM = 512, 640
MAX_IN_FEATURES = 1 << 16
"""Of a row: a thread's scratch holds sixteen."""
MAX_LARGEST = 1024
"""Values of a row that `Largest` finds."""
MAX_DRAWN = 480 << 10
"""Tokens of a row that `Draw` draws from."""
WEIGHED, LOOKED_AT = 256, 64
"""Tokens whose weights it adds up first, and that it orders of a row at least."""


class Step(ctypes.Structure):
    """`struct step`: what a program runs on."""

    _fields_: ClassVar = [
        ("num_tokens", _INTEGER),
        ("num_rows", _INTEGER),
        ("input_ids", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("query_starts", _POINTER),
        ("seq_lens", _POINTER),
        ("block_tables", _POINTER),
        ("max_blocks", _INTEGER),
        ("state_slots", _POINTER),
        ("is_dummy", _INTEGER),
    ]
    kept: tuple[object, ...] = ()
    """What the pointers point to."""


class Arguments(ctypes.Structure):
    """What one operator is called with."""

    kind: ClassVar[int]


class Linear(Arguments):
    """`struct linear`."""

    kind = 0
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("in_features", _INTEGER),
        ("out_features", _INTEGER),
        ("is_float", _INTEGER),
    ]


class Pack(Arguments):
    """`struct pack`."""

    kind = 1
    _fields_: ClassVar = [
        ("rows", _POINTER),
        ("row_stride", _INTEGER),
        ("first", _INTEGER),
        ("count", _INTEGER),
        ("in_features", _INTEGER),
        ("weight", _POINTER),
    ]


class Embed(Arguments):
    """`struct embed`."""

    kind = 2
    _fields_: ClassVar = [
        ("weight", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("in_features", _INTEGER),
        ("scale", _REAL),
        ("first_row", _INTEGER),
        ("num_rows", _INTEGER),
    ]


class RMSNorm(Arguments):
    """`struct rms_norm`."""

    kind = 3
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("residual", _POINTER),
        ("residual_stride", _INTEGER),
        ("weight", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("size", _INTEGER),
        ("is_added", _INTEGER),
        ("offset", _REAL),
        ("eps", _REAL),
    ]


class RopeTable(Arguments):
    """`struct rope_table`."""

    kind = 4
    _fields_: ClassVar = [
        ("frequencies", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("pairs", _INTEGER),
        ("factor", _REAL),
    ]


class RopeStore(Arguments):
    """`struct rope_store`."""

    kind = 5
    _fields_: ClassVar = [
        ("q", _POINTER),
        ("k", _POINTER),
        ("v", _POINTER),
        ("q_stride", _INTEGER),
        ("k_stride", _INTEGER),
        ("v_stride", _INTEGER),
        ("heads", _INTEGER),
        ("kv_heads", _INTEGER),
        ("dim", _INTEGER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("offset", _REAL),
        ("eps", _REAL),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("rotary_dim", _INTEGER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("block_size", _INTEGER),
        ("block_stride", _INTEGER),
    ]


class Attention(Arguments):
    """`struct attention`."""

    kind = 6
    _fields_: ClassVar = [
        ("q", _POINTER),
        ("q_stride", _INTEGER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("heads", _INTEGER),
        ("kv_heads", _INTEGER),
        ("dim", _INTEGER),
        ("block_size", _INTEGER),
        ("block_stride", _INTEGER),
        ("scale", _REAL),
        ("window", _INTEGER),
        ("soft_cap", _REAL),
        ("sinks", _POINTER),
    ]


class Gated(Arguments):
    """`struct gated`."""

    kind = 7
    _fields_: ClassVar = [
        ("gate_up", _POINTER),
        ("stride", _INTEGER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("size", _INTEGER),
        ("per_token", _INTEGER),
        ("activation", _INTEGER),
        ("alpha", _REAL),
        ("limit", _REAL),
    ]


class GroupedLinear(Arguments):
    """`struct grouped_linear`."""

    kind = 8
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("tokens", _POINTER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("counts", _POINTER),
        ("groups", _INTEGER),
        ("in_features", _INTEGER),
        ("out_features", _INTEGER),
        ("per_token", _INTEGER),
    ]


class FloatLinear(Arguments):
    """`struct float_linear`."""

    kind = 9
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("weight", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("in_features", _INTEGER),
        ("out_features", _INTEGER),
    ]


class Route(Arguments):
    """`struct route`."""

    kind = 10
    _fields_: ClassVar = [
        ("logits", _POINTER),
        ("stride", _INTEGER),
        ("correction", _POINTER),
        ("weights", _POINTER),
        ("ids", _POINTER),
        ("experts", _INTEGER),
        ("top_k", _INTEGER),
        ("groups", _INTEGER),
        ("top_groups", _INTEGER),
        ("scoring", _INTEGER),
        ("renormalize", _INTEGER),
        ("scaling_factor", _REAL),
    ]


class SortPairs(Arguments):
    """`struct sort_pairs`."""

    kind = 11
    _fields_: ClassVar = [
        *(("ids", _POINTER), ("top_k", _INTEGER), ("experts", _INTEGER), ("first", _INTEGER)),
        *(("counts", _POINTER), ("tokens", _POINTER), ("places", _POINTER)),
    ]


class Combine(Arguments):
    """`struct combine`."""

    kind = 12
    _fields_: ClassVar = [
        ("products", _POINTER),
        ("products_stride", _INTEGER),
        ("weights", _POINTER),
        ("places", _POINTER),
        ("beside", _POINTER),
        ("beside_stride", _INTEGER),
        ("gate", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("size", _INTEGER),
        ("top_k", _INTEGER),
    ]


class HeadedLinear(Arguments):
    """`struct headed_linear`."""

    kind = 13
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("x_step", _INTEGER),
        ("weight", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("out_step", _INTEGER),
        ("heads", _INTEGER),
        ("in_features", _INTEGER),
        ("out_features", _INTEGER),
    ]


class LatentStore(Arguments):
    """`struct latent_store`."""

    kind = 14
    _fields_: ClassVar = [
        ("q", _POINTER),
        ("q_stride", _INTEGER),
        ("latent_q", _POINTER),
        ("heads", _INTEGER),
        ("nope", _INTEGER),
        ("rank", _INTEGER),
        ("rope", _INTEGER),
        ("latent", _POINTER),
        ("latent_stride", _INTEGER),
        ("norm", _POINTER),
        ("eps", _REAL),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("is_interleaved", _INTEGER),
        ("cache", _POINTER),
        ("block_size", _INTEGER),
        ("block_stride", _INTEGER),
    ]


class LatentAttention(Arguments):
    """`struct latent_attention`."""

    kind = 15
    _fields_: ClassVar = [
        ("q", _POINTER),
        ("q_stride", _INTEGER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("cache", _POINTER),
        ("heads", _INTEGER),
        ("rank", _INTEGER),
        ("dim", _INTEGER),
        ("block_size", _INTEGER),
        ("block_stride", _INTEGER),
        ("scale", _REAL),
    ]


class GateHeads(Arguments):
    """`struct gate_heads`."""

    kind = 16
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("x_step", _INTEGER),
        ("gate", _POINTER),
        ("gate_stride", _INTEGER),
        ("gate_step", _INTEGER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("heads", _INTEGER),
        ("dim", _INTEGER),
    ]


class DeltaNet(Arguments):
    """`struct delta_net`."""

    kind = 17
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("ba", _POINTER),
        ("ba_stride", _INTEGER),
        ("conv", _POINTER),
        ("a_log", _POINTER),
        ("dt_bias", _POINTER),
        ("norm", _POINTER),
        ("eps", _REAL),
        ("inputs", _POINTER),
        ("states", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INTEGER),
        ("key_heads", _INTEGER),
        ("group", _INTEGER),
        ("key_dim", _INTEGER),
        ("value_dim", _INTEGER),
        ("kernel", _INTEGER),
    ]


class GreedyHead(Arguments):
    """`struct greedy_head`."""

    kind = 18
    _fields_: ClassVar = [
        ("x", _POINTER),
        ("x_stride", _INTEGER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("in_features", _INTEGER),
        ("out_features", _INTEGER),
        ("peaks", _POINTER),
        ("tokens", _POINTER),
        ("max_rows", _INTEGER),
    ]


class GreedyChoice(Arguments):
    """`struct greedy_choice`."""

    kind = 19
    _fields_: ClassVar = [("head", _POINTER)]


class QuantizedLinear(Arguments):
    """`struct quantized_linear`."""

    kind = 20
    _fields_: ClassVar = [*Linear._fields_, ("bits", _INTEGER)]


class QuantizedPack(Arguments):
    """`struct quantized_pack`."""

    kind = 21
    _fields_: ClassVar = [*Pack._fields_, ("bits", _INTEGER)]


class QuantizedEmbed(Arguments):
    """`struct quantized_embed`."""

    kind = 22
    _fields_: ClassVar = [*Embed._fields_, ("bits", _INTEGER)]


class QuantizedGroupedLinear(Arguments):
    """`struct quantized_grouped_linear`."""

    kind = 23
    _fields_: ClassVar = [*GroupedLinear._fields_, ("bits", _INTEGER)]


class GatedLinear(Arguments):
    """`struct gated_linear`."""

    kind = 24
    _fields_: ClassVar = [*Linear._fields_, ("activation", _INTEGER), ("alpha", _REAL), ("limit", _REAL)]


class Largest(Arguments):
    """`struct largest`."""

    kind = 25
    _fields_: ClassVar = [
        ("values", _POINTER),
        ("stride", _INTEGER),
        ("width", _INTEGER),
        ("pieces", _INTEGER),
        ("k", _INTEGER),
        ("best", _POINTER),
        ("found", _POINTER),
        ("ended", _POINTER),
        ("ids", _POINTER),
    ]


class Draw(Arguments):
    """`struct draw`."""

    kind = 26
    _fields_: ClassVar = [
        ("logits", _POINTER),
        ("stride", _INTEGER),
        ("width", _INTEGER),
        ("pieces", _INTEGER),
        ("peaks", _POINTER),
        ("rows", _POINTER),
        ("temperature", _POINTER),
        ("top_k", _POINTER),
        ("top_p", _POINTER),
        ("min_p", _POINTER),
        ("uniform", _POINTER),
        ("filtered", _POINTER),
        ("masses", _POINTER),
        ("best", _POINTER),
        ("found", _POINTER),
        ("most", _INTEGER),
        ("ended", _POINTER),
        ("tokens", _POINTER),
    ]


# Structures of exchange.c.


class Exchange(ctypes.Structure):
    """`struct exchange`: a replica's place among those that share memory."""

    _fields_: ClassVar = [
        ("memory", _POINTER),
        ("replica", _INTEGER),
        ("replicas", _INTEGER),
        ("meetings", _INTEGER),
        ("left_by", _INTEGER),
    ]


class CopyRows(Arguments):
    """`struct copy_rows`."""

    kind = 28
    _fields_: ClassVar = [
        ("from", _POINTER),
        ("from_stride", _INTEGER),
        ("places", _POINTER),
        ("to", _POINTER),
        ("row_bytes", _INTEGER),
    ]


class ShareTokens(Arguments):
    """`struct share_tokens`."""

    kind = 29
    _fields_: ClassVar = [
        ("exchange", _POINTER),
        ("ids", _POINTER),
        ("top_k", _INTEGER),
        ("shared_ids", _POINTER),
        ("most_tokens", _INTEGER),
        ("first_asked", _INTEGER),
        ("asked", _INTEGER),
        ("first_local", _INTEGER),
        ("local", _INTEGER),
        ("next", _POINTER),
        ("counts", _POINTER),
        ("tokens", _POINTER),
        ("to", _POINTER),
        ("places", _POINTER),
        ("pairs", _POINTER),
    ]


class AwaitAnswers(Arguments):
    """`struct await_answers`."""

    kind = 30
    _fields_: ClassVar = [("exchange", _POINTER)]


class OnStep(Arguments):
    """`struct on_step`."""

    kind = 31
    _fields_: ClassVar = [
        ("number", _INTEGER),
        ("arguments", _POINTER),
        ("step", _POINTER),
    ]


# Structures of group.c.


class Group(ctypes.Structure):
    """`struct group`: a rank's place among those that share memory."""

    _fields_: ClassVar = [
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("has_left", ctypes.c_int64),
    ]


class AllReduce(Arguments):
    """`struct all_reduce`."""

    kind = 27
    _fields_: ClassVar = [
        ("x", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("is_float", ctypes.c_int64),
        ("group", ctypes.c_void_p),
    ]
