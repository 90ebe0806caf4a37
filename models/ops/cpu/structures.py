"""ctypes mirrors of the C structures of operators.h, exchange.c and group.c, which are the operators' arguments.

Fields have the names and the order of the C declarations, where they are documented. `Library` compares the size of
each structure with the C compiler's.
"""

import ctypes
from typing import Any, ClassVar


def _declared(declaration: str) -> list[tuple[str, Any]]:
    """Parse a structure's fields, in C's order: `*name` is a pointer, `name:double` a double, and `name` an
    int64_t."""
    fields: list[tuple[str, Any]] = []
    for word in declaration.split():
        if word.startswith("*"):
            fields.append((word.removeprefix("*"), ctypes.c_void_p))
        elif word.endswith(":double"):
            fields.append((word.removesuffix(":double"), ctypes.c_double))
        else:
            fields.append((word, ctypes.c_int64))
    return fields


SOFTMAX, SIGMOID, SQRT_SOFTPLUS = range(3)
"""Scorings of `Route`."""
MAX_HEAD_DIM = 512
MAX_LATENT_RANK, MAX_LATENT_DIM = 512, 640
INDEX_HEADS, MAX_INDEX_DIM = 128, 256
"""Limits of an indexer's heads, and of the elements of its keys."""
MAX_INDEXED = 1 << 20
"""Limit in `SelectKeys` of a sequence's keys, or of the heads times its blocks of keys."""
MAX_EXPERTS = 1 << 16
"""Limit of `experts`, whose scores and counts a thread's scratch holds."""
MAX_IN_FEATURES = 1 << 16
"""Limit of the inputs of a row; a thread's scratch holds sixteen rows."""
MAX_LARGEST = 1024
"""Limit of `k` in `Largest`."""
MOST_STREAMS = 8
"""Limit of `count` in `MixStreams`."""
MOST_COMPRESSED = 1024
"""Limit of `span` in `Compress`."""
MAX_DRAWN = 480 << 10
"""Limit of a row's tokens in `Draw`."""
WEIGHED, LOOKED_AT = 256, 64
"""`Draw`: number of tokens whose weights are added up first, and the smallest number of tokens of a row that is
sorted."""


class Step(ctypes.Structure):
    """`struct step`: the tokens, rows and caches of a step, on which a program runs."""

    _fields_: ClassVar = _declared(
        "num_tokens num_rows *input_ids *positions *slots *query_starts *seq_lens *block_tables max_blocks "
        "*state_slots *states_after is_dummy"
    )
    kept: tuple[object, ...] = ()
    """The objects to which the pointers point, kept alive."""


class Arguments(ctypes.Structure):
    """Base of the structures with one operator's arguments."""

    kind: ClassVar[int]


class Linear(Arguments):
    """`struct linear`."""

    kind = 0
    _fields_: ClassVar = _declared("*x x_stride *weight *bias *out out_stride in_features out_features is_float")


class Pack(Arguments):
    """`struct pack`."""

    kind = 1
    _fields_: ClassVar = _declared("*rows row_stride first count in_features *weight")


class Embed(Arguments):
    """`struct embed`."""

    kind = 2
    _fields_: ClassVar = _declared("*weight *out out_stride in_features scale:double first_row num_rows")


class RMSNorm(Arguments):
    """`struct rms_norm`."""

    kind = 3
    _fields_: ClassVar = _declared(
        "*x x_stride *residual residual_stride *weight *bias *out out_stride size heads weight_step is_added "
        "is_centred offset:double eps:double x_scale:double sum_scale:double"
    )


class RopeTable(Arguments):
    """`struct rope_table`."""

    kind = 4
    _fields_: ClassVar = _declared("*frequencies *further *cos *sin pairs original growth:double factor:double base")


class RopeStore(Arguments):
    """`struct rope_store`."""

    kind = 5
    _fields_: ClassVar = _declared(
        "*q *k *v q_stride k_stride v_stride heads kv_heads dim value_dim *q_norm *k_norm offset:double "
        "eps:double *cos *sin rotary_dim is_rotated_first *q_scales *k_cache *v_cache block_size block_stride "
        "value_stride key_size value_size"
    )


class Attention(Arguments):
    """`struct attention`."""

    kind = 6
    _fields_: ClassVar = _declared(
        "*q q_stride *out out_stride *k_cache *v_cache heads kv_heads dim value_dim block_size block_stride "
        "value_stride scale:double window is_chunked soft_cap:double *sinks "
        "*selected top_k block"
    )


class Gated(Arguments):
    """`struct gated`."""

    kind = 7
    _fields_: ClassVar = _declared(
        "*gate stride *up up_stride *out out_stride size per_token activation alpha:double limit:double"
    )


class GroupedLinear(Arguments):
    """`struct grouped_linear`."""

    kind = 8
    _fields_: ClassVar = _declared(
        "*x x_stride *tokens *weight *bias *out out_stride *counts groups in_features out_features per_token"
    )


class FloatLinear(Arguments):
    """`struct float_linear`."""

    kind = 9
    _fields_: ClassVar = _declared("*x x_stride *weight *out out_stride in_features out_features")


class Route(Arguments):
    """`struct route`."""

    kind = 10
    _fields_: ClassVar = _declared(
        "*logits stride *correction *weights *ids experts top_k groups top_groups scoring renormalize "
        "scaling_factor:double *expert_scales *table"
    )


class SortPairs(Arguments):
    """`struct sort_pairs`."""

    kind = 11
    _fields_: ClassVar = _declared("*ids top_k experts first *counts *tokens *places")


class Combine(Arguments):
    """`struct combine`."""

    kind = 12
    _fields_: ClassVar = _declared(
        "*products products_stride *weights *places *shared shared_stride *gate *out out_stride size top_k"
    )


class HeadedLinear(Arguments):
    """`struct headed_linear`."""

    kind = 13
    _fields_: ClassVar = _declared(
        "*x x_stride x_step *weight *out out_stride out_step heads in_features out_features"
    )


class LatentStore(Arguments):
    """`struct latent_store`."""

    kind = 14
    _fields_: ClassVar = _declared(
        "*q q_stride *latent_q heads nope rank rope *latent latent_stride *norm eps:double *cos *sin is_interleaved "
        "*cache block_size block_stride size"
    )


class LatentAttention(Arguments):
    """`struct latent_attention`."""

    kind = 15
    _fields_: ClassVar = _declared(
        "*q q_stride *out out_stride *cache heads rank dim block_size block_stride scale:double window *vectors "
        "page_stride page_tokens rate *selected top_k *sinks"
    )


class RotateHeads(Arguments):
    """`struct rotate_heads`."""

    kind = 49
    _fields_: ClassVar = _declared(
        "*x x_stride *norm offset:double eps:double *cos *sin rotary_dim first is_interleaved is_back *out out_stride "
        "block_size heads dim"
    )


class SelectKeys(Arguments):
    """`struct select_keys`."""

    kind = 50
    _fields_: ClassVar = _declared(
        "*q q_stride *weights weight_stride scale:double *vectors page_stride page_tokens rate heads dim block "
        "num_local *selected top_k"
    )


class GateHeads(Arguments):
    """`struct gate_heads`."""

    kind = 16
    _fields_: ClassVar = _declared(
        "*x x_stride x_step *gate gate_stride gate_step *out out_stride out_step heads dim is_of_head zeros"
    )


class DeltaNet(Arguments):
    """`struct delta_net`."""

    kind = 17
    _fields_: ClassVar = _declared(
        "*x x_stride *ba ba_stride *conv *a_log *dt_bias *norm eps:double *inputs *states *out out_stride key_heads "
        "group key_dim value_dim kernel"
    )


class GreedyHead(Arguments):
    """`struct greedy_head`."""

    kind = 18
    _fields_: ClassVar = _declared("*x x_stride *weight *bias in_features out_features *peaks *tokens max_rows bits")


class GreedyChoice(Arguments):
    """`struct greedy_choice`."""

    kind = 19
    _fields_: ClassVar = _declared("*head *peaks *tokens")


class TakeDrafts(Arguments):
    """`struct take_drafts`."""

    kind = 38
    _fields_: ClassVar = _declared("*peaks *chosen *next *counts depth *drafts block_size *slots *by ahead")


class AcceptDrafts(Arguments):
    """`struct accept_drafts`."""

    kind = 39
    _fields_: ClassVar = _declared(
        "*peaks *tokens *verified *wanted *num_blocks *rows *tables blocks block_size max_len *next *order *last "
        "*counts *slots *by *num_drafting *began"
    )


class NextRound(Arguments):
    """`struct next_round`."""

    kind = 52
    _fields_: ClassVar = _declared(
        "*peaks *tokens *step *first *buffers *rows *row_of *wanted *num_blocks *limits *ends num_ends *tables blocks "
        "block_size max_len *order *counts *num_drafting *drafts max_rows *by *slots *accepted *num_accepted capacity "
        "*counted *round *continues"
    )


class FirstRound(Arguments):
    """`struct first_round`."""

    kind = 58
    _fields_: ClassVar = _declared("*round *positions *counts *drafts")


class QuantizedLinear(Arguments):
    """`struct quantized_linear`."""

    kind = 20
    _fields_: ClassVar = [*Linear._fields_, *_declared("bits")]


class QuantizedPack(Arguments):
    """`struct quantized_pack`."""

    kind = 21
    _fields_: ClassVar = [*Pack._fields_, *_declared("bits")]


class QuantizedEmbed(Arguments):
    """`struct quantized_embed`."""

    kind = 22
    _fields_: ClassVar = [*Embed._fields_, *_declared("bits")]


class QuantizedGroupedLinear(Arguments):
    """`struct quantized_grouped_linear`."""

    kind = 23
    _fields_: ClassVar = [*GroupedLinear._fields_, *_declared("bits")]


class GatedLinear(Arguments):
    """`struct gated_linear`."""

    kind = 24
    _fields_: ClassVar = [*Linear._fields_, *_declared("activation alpha:double limit:double")]


class QuantizedGatedLinear(Arguments):
    """`struct quantized_gated_linear`."""

    kind = 47
    _fields_: ClassVar = [*GatedLinear._fields_, *_declared("bits")]


_CODES = _declared("code_kind scales group has_zeros *order")


class CodedLinear(Arguments):
    """`struct coded_linear`."""

    kind = 34
    _fields_: ClassVar = [*Linear._fields_, *_CODES, *_declared("*expanded")]


class ExpandCodes(Arguments):
    """`struct expand_codes`."""

    kind = 35
    _fields_: ClassVar = CodedLinear._fields_


class CodedPack(Arguments):
    """`struct coded_pack`."""

    kind = 36
    _fields_: ClassVar = [
        *_declared("*rows row_stride *row_scales *row_zeros first count in_features *weight"),
        *_CODES,
        *_declared("is_paired"),
    ]


class CodedGroupedLinear(Arguments):
    """`struct coded_grouped_linear`."""

    kind = 37
    _fields_: ClassVar = [*GroupedLinear._fields_, *_CODES]


class PositionScales(Arguments):
    """`struct position_scales`."""

    kind = 40
    _fields_: ClassVar = _declared("*out first length factor:double")


class ShortConv(Arguments):
    """`struct short_conv`."""

    kind = 41
    _fields_: ClassVar = _declared(
        "*x x_stride *before *after gate_stride *weight *bias *inputs *out out_stride channels kernel has_silu"
    )


class StateSpace(Arguments):
    """`struct state_space`."""

    kind = 42
    _fields_: ClassVar = _declared(
        "*x x_stride *dt dt_stride *a_log *d *dt_bias *states *out out_stride heads dim groups state least:double "
        "most:double"
    )


class DeltaRule(Arguments):
    """`struct delta_rule`."""

    kind = 45
    _fields_: ClassVar = _declared(
        "*x x_stride *a a_stride *b b_stride *a_log *dt_bias *states *out out_stride heads group key_dim value_dim "
        "decays most:double bound:double"
    )


class SelectiveScan(Arguments):
    """`struct selective_scan`."""

    kind = 46
    _fields_: ClassVar = _declared(
        "*x x_stride *dt dt_stride *b *c b_stride c_stride *a_log *d *dt_bias *states *out out_stride channels state"
    )


class GroupNorm(Arguments):
    """`struct group_norm`."""

    kind = 43
    _fields_: ClassVar = _declared(
        "*x x_stride *gate gate_stride *weight *out out_stride groups size is_gated_first eps:double"
    )


class ScaleRows(Arguments):
    """`struct scale_rows`."""

    kind = 44
    _fields_: ClassVar = _declared(
        "*x x_stride *by scale:double *added added_stride *out out_stride columns per_token"
    )


class MixStreams(Arguments):
    """`struct mix_streams`."""

    kind = 53
    _fields_: ClassVar = _declared(
        "*streams *projected *base *scale count size iterations eps:double norm_eps:double *out *post *mix"
    )


class SpreadStreams(Arguments):
    """`struct spread_streams`."""

    kind = 54
    _fields_: ClassVar = _declared("*x x_stride *streams *post *mix count size *out")


class StoreVectors(Arguments):
    """`struct store_vectors`."""

    kind = 55
    _fields_: ClassVar = _declared("*x x_stride *pages page_stride block_size dim")


class Compress(Arguments):
    """`struct compress`."""

    kind = 56
    _fields_: ClassVar = _declared(
        "*tokens token_stride *bias series dim span *norm eps:double *frequencies pairs factor:double *vectors "
        "page_stride page_tokens rate"
    )


class TokensOfPools(Arguments):
    """`struct tokens_of_pools`."""

    kind = 57
    _fields_: ClassVar = _declared("*pools top_k rate *out")


class Largest(Arguments):
    """`struct largest`."""

    kind = 25
    _fields_: ClassVar = _declared("*values stride width pieces k *best *found *ended *ids")


class Draw(Arguments):
    """`struct draw`."""

    kind = 26
    _fields_: ClassVar = _declared(
        "*logits stride width pieces *peaks *rows *temperature *top_k *top_p *min_p *row_keys *filtered *masses "
        "*best *scores *found most *ended *tokens *probabilities"
    )


class VerifyDrafts(Arguments):
    """`struct verify_drafts`."""

    kind = 51
    _fields_: ClassVar = [*Draw._fields_, *_declared("*firsts *drafts *probabilities_of_drafts *numbers")]


class Sampling(ctypes.Structure):
    """`struct sampling`: how sequences sample, by slot."""

    _fields_: ClassVar = _declared(
        "*temperature *top_k *top_p *min_p *keys *repetition *presence *frequency *num_prompt_tokens *known "
        "known_stride"
    )
    kept: tuple[object, ...] = ()
    """The objects to which the pointers point, kept alive."""


class SampleTokens(Arguments):
    """`struct sample_tokens`."""

    kind = 48
    _fields_: ClassVar = _declared("*logits width *by *slots ahead *peaks *tokens")


# Structures of exchange.c.


class Exchange(ctypes.Structure):
    """`struct exchange`: a replica's index, and the memory that the replicas share."""

    _fields_: ClassVar = _declared("*memory replica replicas meetings left_by")


class CopyRows(Arguments):
    """`struct copy_rows`."""

    kind = 28
    _fields_: ClassVar = _declared("*from from_stride *places *to row_bytes *sources")


class ShareTokens(Arguments):
    """`struct share_tokens`."""

    kind = 29
    _fields_: ClassVar = _declared(
        "*exchange *ids top_k *shared_ids most_tokens first_asked asked first_local local *next *counts *tokens *to "
        "*places *pairs"
    )


class AwaitAnswers(Arguments):
    """`struct await_answers`."""

    kind = 30
    _fields_: ClassVar = _declared("*exchange")


class OnStep(Arguments):
    """`struct on_step`."""

    kind = 31
    _fields_: ClassVar = _declared("number *arguments *step")
    kept: tuple[object, ...] = ()
    """The objects to which the pointers point, kept alive."""


class ReadLimit(Arguments):
    """`struct read_limit`."""

    kind = 32
    _fields_: ClassVar = _declared("*memory bytes *sums")


class ProductLimit(Arguments):
    """`struct product_limit`."""

    kind = 33
    _fields_: ClassVar = _declared("rounds *products")


# Structures of group.c.


class Group(ctypes.Structure):
    """`struct group`: a rank's index, and the memory that the ranks share."""

    _fields_: ClassVar = _declared("*memory rank size next has_left")


class AllReduce(Arguments):
    """`struct all_reduce`."""

    kind = 27
    _fields_: ClassVar = _declared("*x columns is_float *group")
