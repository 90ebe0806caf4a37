/* Shared by the operators of this directory: types, the thread pool's contract, and the structures that
 * models/ops/cpu/structures.py mirrors field by field. */

#ifndef KAON_H
#define KAON_H

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#ifdef SHORT_VECTORS /* see lengths.h */
#define LANES 8
#else
#define LANES 16  /* float32 of a vector; also rows and columns of a tile of a packed weight, as AMX has them */
#endif
#define DEPTH 32  /* bfloat16 of a vector: inputs that one step of a product multiplies */
#define PANEL 32  /* outputs that a packed weight stores together */
#define MAX_HEAD_DIM 512
#define MAX_LATENT_DIM 640
#define LINE 64   /* bytes of a cache line */

#define ALIGNED __attribute__((aligned(LINE)))

/* Functions that the loader calls: the build hides all other symbols, so that they cannot collide with other
 * libraries. */
#define EXPORTED __attribute__((visibility("default")))

/* Compiled for several processors, of which the dynamic linker selects one. Sums are written lane by lane, so that all
 * give the same result, unless a processor fuses a product with its sum, or lengths.h gives it shorter vectors: then
 * sums over the lanes have another order. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(KAON_SANITIZE)
#if __GNUC__ < 12 /* It knows levels of x86-64 only as a whole file's. */
#define LEVEL_3 "avx2"
#define LEVEL_4 "avx512f"
#else
#define LEVEL_3 "arch=x86-64-v3"
#define LEVEL_4 "arch=x86-64-v4"
#endif
#define CLONES __attribute__((target_clones(LEVEL_4, LEVEL_3, "default")))
#else
#define CLONES
#endif

/* Clang refuses arguments of 64 bytes between functions for different processors: see setup.py. */
#if defined(__x86_64__) && __GNUC__ >= 11 && !defined(__clang__)
#define HAS_X86 1
#define AVX2_SET "avx2,fma,bmi,bmi2,f16c"
#define AVX512_SET "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
#define AVX2 __attribute__((target(AVX2_SET)))
#define AVX_VNNI __attribute__((target(AVX2_SET ",avxvnni")))
#define AVX512 __attribute__((target(AVX512_SET)))
#define AVX512_BF16 __attribute__((target(AVX512_SET ",avx512bf16,avx512vbmi")))
#define AMX __attribute__((target(AVX512_SET ",avx512bf16,avx512vbmi,amx-tile,amx-bf16,amx-int8")))
#else
#define HAS_X86 0
#endif

#if defined(__aarch64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 16)
#define HAS_NEON 1
#define NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#define NEON_BF16 __attribute__((target("arch=armv8.2-a+dotprod+bf16+i8mm")))
#else
#define HAS_NEON 0
#endif

/* Instruction sets of a processor's architecture, in order of speed: each has its own code. See isa.c. */
enum isa {
    PORTABLE,
    WITH_AVX2,
    WITH_AVX_VNNI,
    WITH_AVX512,
    WITH_AVX512_BF16,
    WITH_AMX,
    WITH_NEON,
    WITH_NEON_BF16,
    ISAS
};

/* The step on which a program runs: B rows with T tokens in total, as in models/attention/backend.py. */
struct step {
    int64_t num_tokens; /* T */
    int64_t num_rows;   /* B */
    const int64_t *input_ids;      /* [T] */
    const int64_t *positions;      /* [T] */
    const int64_t *slots;          /* [T] block * block_size + offset */
    const int32_t *query_starts;   /* [B + 1] */
    const int32_t *seq_lens;       /* [B] */
    const int32_t *block_tables;   /* [B, max_blocks] */
    int64_t max_blocks;
    const int64_t *state_slots; /* [B] index of the state that each row begins with in every layer, or NULL */
    const int64_t *states_after; /* [T] index that the state after each token gets, -1: the token changes none; NULL:
                                  * the row's own */
    int64_t is_dummy; /* whether its tokens are padding, which no replica's experts compute */
};

/* One thread's part in an operator. */
struct worker {
    int thread, threads;
    enum isa isa;
    atomic_long *next; /* the operator's next task, 0 when it begins */
    char *scratch;     /* SCRATCH bytes of its own, aligned to a line */
};
#define SCRATCH (8 << 20)

static inline long take_task(struct worker *worker) {
    return atomic_fetch_add_explicit(worker->next, 1, memory_order_relaxed);
}

typedef void operator(const void *arguments, const struct step *step, struct worker *worker);

static inline float widen(bf16 value) {
    union {
        uint32_t bits;
        float value;
    } as = {(uint32_t)value << 16};
    return as.value;
}

/* To the nearest, ties to even; a NaN stays one. */
static inline bf16 narrow(float value) {
    union {
        float value;
        uint32_t bits;
    } as = {value};
    uint32_t rounded = (as.bits + 0x7fff + ((as.bits >> 16) & 1)) >> 16;
    return (bf16)((as.bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

#endif
