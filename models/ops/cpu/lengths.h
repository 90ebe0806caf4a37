/* Operators whose files are compiled twice on x86: in vectors of 64 bytes for the paths with AVX-512, and, by a file that
 * defines SHORT_VECTORS, in vectors of 32 bytes for the others. A compiler keeps vectors that are longer than the registers in
 * memory, and copies them in smaller parts: Mamba-2's states then take 5 to 20 times as long.
 *
 * Only files that store no layout of LANES can be compiled so. */

#ifndef LENGTHS_H
#define LENGTHS_H

#include "operators.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define HAS_BOTH_LENGTHS 1
#ifdef SHORT_VECTORS
#ifndef KAON_SANITIZE
#undef CLONES
#define CLONES __attribute__((target_clones(LEVEL_3, "default")))
#endif
#define OPERATOR(name) void short_##name(const void *arguments, const struct step *step, struct worker *worker)
#else
/* WITH_AVX512 implies all of x86-64-v4: see isa.c. Builds for sanitizers are compiled for any processor, so that there
 * the portable path checks the long vectors, and AVX2's the short ones. */
#ifdef KAON_SANITIZE
static inline int long_vectors(enum isa isa) { return isa >= WITH_AVX512 || isa == PORTABLE; }
#else
#undef CLONES
#define CLONES __attribute__((target("arch=x86-64-v4")))
static inline int long_vectors(enum isa isa) { return isa >= WITH_AVX512; }
#endif

/* `gate_panel` in short vectors. */
void short_gate_panel(const struct activation *by, const bf16 *gates, int64_t stride, const bf16 *ups, int64_t rows,
                      bf16 *out);

#define OPERATOR(name)                                                                                     \
    operator short_##name;                                                                                 \
    static operator long_##name;                                                                           \
    void name(const void *arguments, const struct step *step, struct worker *worker) {                     \
        (long_vectors(worker->isa) ? long_##name : short_##name)(arguments, step, worker);                 \
    }                                                                                                      \
    static void long_##name(const void *arguments, const struct step *step, struct worker *worker)
#endif
#else
#define HAS_BOTH_LENGTHS 0
#define OPERATOR(name) void name(const void *arguments, const struct step *step, struct worker *worker)
#endif

#endif
