/* The operators by number. */

#include "operators.h"

operator *const operators[OPERATORS] = {
    [LINEAR] = linear, [PACK] = pack, [EMBED] = embed, [RMS_NORM] = rms_norm,
    [ROPE_TABLE] = rope_table, [ROPE_STORE] = rope_store, [ATTENTION] = attention, [GATED] = gated,
    [GROUPED_LINEAR] = grouped_linear,
};
