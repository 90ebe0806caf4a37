/* Operators whose files are compiled twice on x86: in vectors of 64 bytes for processors with AVX-512, and, by a file that
 * defines SHORT_VECTORS, in vectors of 32 bytes for others. A compiler keeps vectors that are longer than the registers in
 * memory, and copies them in smaller parts: Mamba-2's states then take 5 to 20 times as long.
 *
 * Only files that store no layout of LANES can be compiled so. */

#ifndef LENGTHS_H
#define LENGTHS_H

#include "operators.h"

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(KAON_SANITIZE)
#define HAS_BOTH_LENGTHS 1
#undef CLONES
#ifdef SHORT_VECTORS
#define CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#define OPERATOR(name) void short_##name(const void *arguments, const struct step *step, struct worker *worker)
#else
#define CLONES __attribute__((target("arch=x86-64-v4")))

static inline int has_long_vectors(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#define OPERATOR(name)                                                                                     \
    operator short_##name;                                                                                 \
    static operator long_##name;                                                                           \
    void name(const void *arguments, const struct step *step, struct worker *worker) {                     \
        (has_long_vectors() ? long_##name : short_##name)(arguments, step, worker);                        \
    }                                                                                                      \
    static void long_##name(const void *arguments, const struct step *step, struct worker *worker)
#endif
#else
#define HAS_BOTH_LENGTHS 0
#define OPERATOR(name) void name(const void *arguments, const struct step *step, struct worker *worker)
#endif

#endif
