/* Which instruction sets this processor runs. Each is a path of its own through the products, attention and quantised
 * rows; the rest is compiled for several processors, of which the dynamic linker picks one. */

#include "operators.h"

#if HAS_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The kernel grants a process the tiles' state on request. */
static int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* By CPUID, since clang 16's `__builtin_cpu_supports` refuses these names. */
static int has_avx_vnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

/* What x86-64-v3 has besides AVX2_SET: see `long_vectors` in lengths.h, whose files are compiled for x86-64-v4. */
static int has_movbe_and_lzcnt(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 22 & 1)) return 0;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c >> 5 & 1);
}

static int has_tiles(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (d >> 24 & 1) && (d >> 22 & 1) && (d >> 25 & 1); /* AMX-TILE, AMX-BF16, AMX-INT8 */
}

/* `kaon_runs`, which is called before the threads start, has read what these return. */
static int is_far;

int reads_one_stream(void) { return __builtin_cpu_is("amd") != 0; }

int fetches_far(void) { return is_far; }

/* From Zen 5 on. */
static int fetches_far_ahead(void) {
    unsigned a, b, c, d;
    if (!reads_one_stream() || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 15) + (a >> 20 & 255) >= 0x1a;
}

int kaon_runs(int isa) {
    __builtin_cpu_init(); /* It also asks whether the kernel saves the registers. */
    is_far = fetches_far_ahead();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2") && has_f16c();
    int avx512 = avx2 && has_movbe_and_lzcnt() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    int pairs = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    switch (isa) {
    case PORTABLE: return 1;
    case WITH_AVX2: return avx2;
    case WITH_AVX_VNNI: return avx2 && has_avx_vnni();
    case WITH_AVX512: return avx512;
    case WITH_AVX512_BF16: return pairs;
    case WITH_AMX: return pairs && has_tiles() && may_use_tiles();
    default: return 0;
    }
}
#elif HAS_NEON
#include <sys/auxv.h>

int reads_one_stream(void) { return 0; }

int fetches_far(void) { return 0; }

/* As the kernel's headers have them, which may be older than the processor. */
enum { DOT_PRODUCTS = 1 << 20 };                              /* of AT_HWCAP */
enum { INT8_MATRICES = 1 << 13, BFLOAT16_PRODUCTS = 1 << 14 }; /* of AT_HWCAP2 */

int kaon_runs(int isa) {
    int dots = (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0;
    unsigned long more = getauxval(AT_HWCAP2);
    switch (isa) {
    case PORTABLE: return 1;
    case WITH_NEON: return dots;
    case WITH_NEON_BF16: return dots && (more & BFLOAT16_PRODUCTS) && (more & INT8_MATRICES);
    default: return 0;
    }
}
#else
int reads_one_stream(void) { return 0; }

int fetches_far(void) { return 0; }

int kaon_runs(int isa) { return isa == PORTABLE; }
#endif
