/* The operators by number, and how large their arguments are. */

#include "operators.h"

operator *const operators[OPERATORS] = {
    [LINEAR] = linear, [PACK] = pack, [EMBED] = embed, [RMS_NORM] = rms_norm,
    [ROPE_TABLE] = rope_table, [ROPE_STORE] = rope_store, [ATTENTION] = attention, [GATED] = gated,
    [GROUPED_LINEAR] = grouped_linear,
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
};

/* By which callers see that they mean the same arguments; 0 for an operator that is not there. */
int64_t kaon_bytes_of_arguments(int kind) { return kind < OPERATORS ? bytes_of_arguments[kind] : 0; }

#ifndef KAON_SOURCES
#define KAON_SOURCES ""
#endif

/* A hash of the files that this was built of, "" where the build gave none; see setup.py. */
const char *kaon_sources(void) { return KAON_SOURCES; }
