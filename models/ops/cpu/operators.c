/* The operators by number, and the sizes of their arguments. */

#include "operators.h"

operator *const operators[OPERATORS] = {
    [LINEAR] = linear, [PACK] = pack, [EMBED] = embed, [RMS_NORM] = rms_norm,
    [ROPE_TABLE] = rope_table, [ROPE_STORE] = rope_store, [ATTENTION] = attention, [GATED] = gated,
    [GROUPED_LINEAR] = grouped_linear, [GREEDY_HEAD] = greedy_head, [GREEDY_CHOICE] = greedy_choice,
    [QUANTIZED_LINEAR] = quantized_linear, [QUANTIZED_PACK] = quantized_pack, [QUANTIZED_EMBED] = quantized_embed,
    [QUANTIZED_GROUPED_LINEAR] = quantized_grouped_linear,
    [FLOAT_LINEAR] = float_linear, [ROUTE] = route,
    [SORT_PAIRS] = sort_pairs, [COMBINE] = combine, [HEADED_LINEAR] = headed_linear,
    [LATENT_STORE] = latent_store, [LATENT_ATTENTION] = latent_attention, [GATE_HEADS] = gate_heads,
    [DELTA_NET] = delta_net, [GATED_LINEAR] = gated_linear,
    [LARGEST] = largest, [DRAW] = draw,
    [ALL_REDUCE] = all_reduce,
    [COPY_ROWS] = copy_rows, [SHARE_TOKENS] = share_tokens, [AWAIT_ANSWERS] = await_answers, [ON_STEP] = on_step,
    [READ_LIMIT] = read_limit, [PRODUCT_LIMIT] = product_limit,
    [CODED_LINEAR] = coded_linear, [EXPAND_CODES] = expand_codes, [CODED_PACK] = coded_pack,
    [CODED_GROUPED_LINEAR] = coded_grouped_linear, [TAKE_DRAFTS] = take_drafts,
    [ACCEPT_DRAFTS] = accept_drafts, [POSITION_SCALES] = position_scales,
    [SHORT_CONV] = short_conv, [STATE_SPACE] = state_space, [GROUP_NORM] = group_norm, [SCALE_ROWS] = scale_rows,
    [DELTA_RULE] = delta_rule, [SELECTIVE_SCAN] = selective_scan,
    [QUANTIZED_GATED_LINEAR] = quantized_gated_linear,
    [SAMPLE_TOKENS] = sample_tokens, [ROTATE_HEADS] = rotate_heads, [SELECT_KEYS] = select_keys,
    [VERIFY_DRAFTS] = verify_drafts, [NEXT_ROUND] = next_round,
};

static const int64_t bytes_of_arguments[OPERATORS] = {
    [LINEAR] = sizeof(struct linear),
    [PACK] = sizeof(struct pack),
    [EMBED] = sizeof(struct embed),
    [RMS_NORM] = sizeof(struct rms_norm),
    [ROPE_TABLE] = sizeof(struct rope_table),
    [ROPE_STORE] = sizeof(struct rope_store),
    [ATTENTION] = sizeof(struct attention),
    [GATED] = sizeof(struct gated),
    [GROUPED_LINEAR] = sizeof(struct grouped_linear),
    [GREEDY_HEAD] = sizeof(struct greedy_head),
    [GREEDY_CHOICE] = sizeof(struct greedy_choice),
    [QUANTIZED_LINEAR] = sizeof(struct quantized_linear),
    [QUANTIZED_PACK] = sizeof(struct quantized_pack),
    [QUANTIZED_EMBED] = sizeof(struct quantized_embed),
    [QUANTIZED_GROUPED_LINEAR] = sizeof(struct quantized_grouped_linear),
    [FLOAT_LINEAR] = sizeof(struct float_linear),
    [ROUTE] = sizeof(struct route),
    [SORT_PAIRS] = sizeof(struct sort_pairs),
    [COMBINE] = sizeof(struct combine),
    [HEADED_LINEAR] = sizeof(struct headed_linear),
    [LATENT_STORE] = sizeof(struct latent_store),
    [LATENT_ATTENTION] = sizeof(struct latent_attention),
    [GATE_HEADS] = sizeof(struct gate_heads),
    [DELTA_NET] = sizeof(struct delta_net),
    [GATED_LINEAR] = sizeof(struct gated_linear),
    [LARGEST] = sizeof(struct largest),
    [DRAW] = sizeof(struct draw),
    [ALL_REDUCE] = sizeof(struct all_reduce),
    [COPY_ROWS] = sizeof(struct copy_rows),
    [SHARE_TOKENS] = sizeof(struct share_tokens),
    [AWAIT_ANSWERS] = sizeof(struct await_answers),
    [ON_STEP] = sizeof(struct on_step),
    [READ_LIMIT] = sizeof(struct read_limit),
    [PRODUCT_LIMIT] = sizeof(struct product_limit),
    [CODED_LINEAR] = sizeof(struct coded_linear),
    [EXPAND_CODES] = sizeof(struct expand_codes),
    [CODED_PACK] = sizeof(struct coded_pack),
    [CODED_GROUPED_LINEAR] = sizeof(struct coded_grouped_linear),
    [TAKE_DRAFTS] = sizeof(struct take_drafts),
    [ACCEPT_DRAFTS] = sizeof(struct accept_drafts),
    [POSITION_SCALES] = sizeof(struct position_scales),
    [SHORT_CONV] = sizeof(struct short_conv),
    [STATE_SPACE] = sizeof(struct state_space),
    [GROUP_NORM] = sizeof(struct group_norm),
    [SCALE_ROWS] = sizeof(struct scale_rows),
    [DELTA_RULE] = sizeof(struct delta_rule),
    [SELECTIVE_SCAN] = sizeof(struct selective_scan),
    [QUANTIZED_GATED_LINEAR] = sizeof(struct quantized_gated_linear),
    [SAMPLE_TOKENS] = sizeof(struct sample_tokens),
    [ROTATE_HEADS] = sizeof(struct rotate_heads),
    [SELECT_KEYS] = sizeof(struct select_keys),
    [VERIFY_DRAFTS] = sizeof(struct verify_drafts),
    [NEXT_ROUND] = sizeof(struct next_round),
};

/* By this, callers check that they have the same arguments; 0 for an unknown operator. */
EXPORTED int64_t kaon_bytes_of_arguments(int kind) { return kind < OPERATORS ? bytes_of_arguments[kind] : 0; }

#ifndef KAON_SOURCES
#define KAON_SOURCES ""
#endif

/* A hash of the source files of this build, "" if the build gave none; see setup.py. */
EXPORTED const char *kaon_sources(void) { return KAON_SOURCES; }
