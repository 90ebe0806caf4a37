/* Sums and gathers of the ranks of a tensor-parallel group on one host, through memory that all of them map.
 *
 * Collectives are numbered. In each, a rank writes its part into its own buffer, publishes the number, waits for all
 * other ranks, and reads their parts: every rank computes sums in the order of ranks, so that all have the same bits.
 * There are two buffers: a rank that writes to the same one again has seen all others in the collective between, so
 * none still reads it. The number of a step's first collective follows from the step's number, and in it no data is
 * moved: it synchronises ranks that left the last step early. */

#include "operators.h"
#include "waiting.h"

#define CHUNK (256 << 10) /* bytes of a buffer: it fits in a core's L2 cache, with those of a few ranks */
#define PAGE 4096
#define BLOCK 512          /* elements that are summed at a time */
#define STEP_SHIFT 32

struct shared {
    ALIGNED atomic_llong left; /* 1 + the last step that some rank left early */
    struct {
        ALIGNED atomic_llong number; /* collectives in which it has published its part */
    } ranks[];
};

static inline struct shared *shared_of(const struct group *group) { return (struct shared *)group->memory; }

static int64_t places_offset(int64_t size) { return parts(LINE * (1 + size), PAGE) * PAGE; }

static char *place_of(const struct group *group, int64_t rank) {
    return group->memory + places_offset(group->size) + (2 * rank + (group->next & 1)) * (int64_t)CHUNK;
}

/* Bytes of memory that a number of ranks share. */
EXPORTED int64_t kaon_group_bytes(int64_t size) { return places_offset(size) + 2 * size * (int64_t)CHUNK; }

/* The following collectives belong to that step. */
EXPORTED void kaon_group_begin(struct group *group, int64_t step) {
    group->next = step << STEP_SHIFT;
    group->has_left = 0;
}

/* Make all ranks leave the step, now or when they next wait. */
EXPORTED void kaon_group_leave(struct group *group) {
    int64_t mark = (group->next >> STEP_SHIFT) + 1;
    atomic_llong *left = &shared_of(group)->left;
    long long seen = atomic_load(left);
    while (seen < mark && !atomic_compare_exchange_weak(left, &seen, mark)) {}
    group->has_left = 1;
}

/* Publish this rank's part, and wait for all others'. -1 if a rank has left the step. */
static int meet(struct group *group) {
    struct shared *shared = shared_of(group);
    int64_t number = group->next + 1, step = group->next >> STEP_SHIFT;
    atomic_store_explicit(&shared->ranks[group->rank].number, number, memory_order_release);
    for (int64_t rank = 0; rank < group->size; rank++) {
        for (int64_t round = 0; atomic_load_explicit(&shared->ranks[rank].number, memory_order_acquire) < number;
             round++) {
            if (atomic_load_explicit(&shared->left, memory_order_acquire) > step) {
                group->has_left = 1;
                return -1;
            }
            pause_for(round);
        }
    }
    return 0;
}

/* Called before a collective's part is written. */
static int enter(struct group *group) {
    if (group->has_left) return -1;
    if (group->next & (((int64_t)1 << STEP_SHIFT) - 1)) return 0;
    if (meet(group)) return -1;
    group->next++;
    return 0;
}

CLONES static void sum_floats(const struct group *group, int64_t first, int64_t count, float *to) {
    float sums[BLOCK];
    memcpy(sums, (const float *)place_of(group, 0) + first, count * sizeof(float));
    for (int64_t rank = 1; rank < group->size; rank++) {
        const float *part = (const float *)place_of(group, rank) + first;
        for (int64_t i = 0; i < count; i++) sums[i] += part[i];
    }
    memcpy(to + first, sums, count * sizeof(float));
}

CLONES static void sum_bf16(const struct group *group, int64_t first, int64_t count, bf16 *to) {
    float sums[BLOCK];
    const bf16 *own = (const bf16 *)place_of(group, 0) + first;
    for (int64_t i = 0; i < count; i++) sums[i] = widen(own[i]);
    for (int64_t rank = 1; rank < group->size; rank++) {
        const bf16 *part = (const bf16 *)place_of(group, rank) + first;
        for (int64_t i = 0; i < count; i++) sums[i] += widen(part[i]);
    }
    for (int64_t i = 0; i < count; i++) to[first + i] = narrow(sums[i]);
}

/* The sum of all ranks' `count` elements, in place: float32, or bf16 that is summed as float32 and rounded once. -1 if
 * a rank has left the step; then the elements are undefined. */
EXPORTED int kaon_group_all_reduce(struct group *group, void *x, int64_t count, int64_t is_float) {
    int64_t itemsize = is_float ? sizeof(float) : sizeof(bf16), most = CHUNK / itemsize;
    for (int64_t begin = 0; begin < count; begin += most) {
        int64_t length = min64(most, count - begin);
        char *part = (char *)x + begin * itemsize;
        if (enter(group)) return -1;
        memcpy(place_of(group, group->rank), part, length * itemsize);
        if (meet(group)) return -1;
        for (int64_t first = 0; first < length; first += BLOCK) {
            int64_t block = min64(BLOCK, length - first);
            if (is_float) sum_floats(group, first, block, (float *)part);
            else sum_bf16(group, first, block, (bf16 *)part);
        }
        group->next++;
    }
    return 0;
}

/* Concatenate all ranks' rows into `out` of rank 0; other ranks have none. -1 as above. */
EXPORTED int kaon_group_gather(struct group *group, const char *x, int64_t rows, int64_t row_bytes, char *out) {
    int64_t bytes = rows * row_bytes;
    for (int64_t begin = 0; begin < bytes; begin += CHUNK) {
        int64_t end = min64(bytes, begin + CHUNK);
        if (enter(group)) return -1;
        memcpy(place_of(group, group->rank), x + begin, end - begin);
        if (meet(group)) return -1;
        for (int64_t rank = 0; group->rank == 0 && rank < group->size; rank++) {
            const char *part = place_of(group, rank) - begin;
            for (int64_t at = begin; at < end;) {
                int64_t row = at / row_bytes, past = min64(end, (row + 1) * row_bytes);
                memcpy(out + (row * group->size + rank) * row_bytes + at % row_bytes, part + at, past - at);
                at = past;
            }
        }
        group->next++;
    }
    return 0;
}

/* One thread of each rank: the collectives of small steps are over before others could be woken for them. */
void all_reduce(const void *arguments, const struct step *step, struct worker *worker) {
    const struct all_reduce *op = arguments;
    if (worker->thread == 0) kaon_group_all_reduce(op->group, op->x, step->num_tokens * op->columns, op->is_float);
}
