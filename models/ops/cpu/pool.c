/* The threads, and running a program on them: operators in order, each distributed over all threads, none started
 * before the previous one is done.
 *
 * The caller is thread 0. A thread that waits spins for a moment and then sleeps, so that an idle engine costs nothing
 * and a busy one does not take the API process's core.
 *
 * Another thread of the process may interrupt a program: it then ends between two operators. The thread that arrives
 * last at a barrier decides that for all, by how far it moves the phase. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "operators.h"

#define SPINS_AT_BARRIER 4000 /* 50 to 150 microseconds: others compute, and end soon */
#define SPINS_ON_ONE_CPU 200  /* after which a thread sleeps that keeps a CPU from one it waits for */
#define SPINS_WHEN_IDLE 200   /* 5 microseconds */

#define HUGE_PAGE (2 << 20)

struct program {
    const struct operation *operations;
    int64_t count;
    const struct step *step;
    int may_pause; /* whether an interruption ends it */
};

#define LAST -1 /* count of the program at which threads end */

static struct {
    int threads;
    pthread_t others[MAX_THREADS];
    unsigned started_before; /* programs, when these threads were made */
    enum isa isa;
    char *scratch[MAX_THREADS];
    struct program program;
    ALIGNED atomic_uint started; /* programs so far */
    ALIGNED atomic_uint phase;   /* barriers so far, and interruptions */
    ALIGNED atomic_int arrived;  /* threads at the current barrier */
    ALIGNED atomic_int sleeping; /* threads that may have to be woken */
    ALIGNED atomic_long next;    /* task of the current operator */
    ALIGNED atomic_int cpus[MAX_THREADS]; /* on which each thread was last seen */
    ALIGNED atomic_int is_interrupted;
    ALIGNED atomic_int activity; /* begins and ends of programs so far: odd while one runs */
} pool;

/* Whether another thread was last seen on the CPU of this one. Where other processes are busy, the system may run all
 * threads on one CPU. */
static int shares_cpu(int thread) {
    int cpu = sched_getcpu(), shares = 0;
    for (int other = 0; other < pool.threads; other++)
        shares |= other != thread && atomic_load_explicit(&pool.cpus[other], memory_order_relaxed) == cpu;
    atomic_store_explicit(&pool.cpus[thread], cpu, memory_order_relaxed);
    return shares;
}

static void wait_for_change(atomic_uint *word, unsigned seen, int spins, int thread) {
    for (int spin = 0; spin < spins; spin++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen) return;
        if (spin == SPINS_ON_ONE_CPU && shares_cpu(thread)) break;
        relax();
    }
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(word) == seen) syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleeping, 1);
}

static void change(atomic_uint *word, unsigned by) {
    atomic_fetch_add(word, by);
    if (atomic_load(&pool.sleeping)) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

/* Called by one thread while no other runs an operator: whether the program ends before its next one. */
static int begin_operator(const struct program *program) {
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    if (!program->may_pause || !atomic_load_explicit(&pool.is_interrupted, memory_order_relaxed)) return 0;
    atomic_store(&pool.is_interrupted, 0);
    return 1;
}

/* Whether the program ends here. A thread that leaves late sees the same phase: the next barrier waits for it. */
static int barrier(const struct program *program, int thread) {
    unsigned seen = atomic_load_explicit(&pool.phase, memory_order_relaxed);
    if (atomic_fetch_add(&pool.arrived, 1) + 1 < pool.threads) {
        wait_for_change(&pool.phase, seen, SPINS_AT_BARRIER, thread);
        return atomic_load_explicit(&pool.phase, memory_order_acquire) - seen == 2;
    }
    atomic_store_explicit(&pool.arrived, 0, memory_order_relaxed);
    int ends = begin_operator(program);
    change(&pool.phase, 1 + ends);
    return ends;
}

static int64_t run_part(int thread) {
    struct worker worker = {thread, pool.threads, pool.isa, &pool.next, pool.scratch[thread]};
    const struct program program = pool.program;
    int64_t done = 0;
    atomic_store_explicit(&pool.cpus[thread], sched_getcpu(), memory_order_relaxed);
    for (int ends = 0; done < program.count && !ends; done++) {
        const struct operation *operation = &program.operations[done];
        operators[operation->kind](operation->arguments, program.step, &worker);
        ends = pool.threads > 1 ? barrier(&program, thread) : begin_operator(&program);
    }
    release_tiles(worker.isa); /* The next caller may have changed the pool's. */
    return done;
}

/* In huge pages, so that a thread's data in its L2 cache is distributed over all of it. */
static char *make_scratch(void) {
    void *scratch;
    if (posix_memalign(&scratch, HUGE_PAGE, SCRATCH)) return NULL;
    madvise(scratch, SCRATCH, MADV_HUGEPAGE); /* where the system has them */
    return scratch;
}

#define SLICE 100000          /* nanoseconds, the least that the kernel takes */
#define KEEP_POLICY 0x08      /* SCHED_FLAG_KEEP_POLICY */

/* Let this thread run soon after it is woken, although another one occupies its CPU. From Linux 6.12 on the kernel cuts
 * the other's time to the shortest slice of those that wait; otherwise a step may wait milliseconds for the end of a
 * slice. Older kernels ignore the slice. */
static void ask_for_short_slices(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {sizeof attributes, 0, KEEP_POLICY, getpriority(PRIO_PROCESS, 0), 0, SLICE, 0, 0};
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static void *work(void *argument) {
    int thread = (int)(intptr_t)argument;
    prctl(PR_SET_NAME, "kaon-cpu");
    ask_for_short_slices();
    for (unsigned seen = pool.started_before;; seen++) {
        wait_for_change(&pool.started, seen, SPINS_WHEN_IDLE, thread);
        if (pool.program.count == LAST) return NULL;
        run_part(thread);
    }
}

static void end_threads(void) {
    pool.program.count = LAST;
    if (pool.threads > 1) change(&pool.started, 1);
    for (int thread = 0; thread < pool.threads; thread++) {
        if (thread) pthread_join(pool.others[thread], NULL);
        free(pool.scratch[thread]);
    }
    pool.threads = 0;
}

/* A process that forks keeps only the calling thread: its child runs programs alone, until it starts its own
 * threads. */
static void forget_others(void) {
    pool.threads = min64(pool.threads, 1);
    atomic_store(&pool.sleeping, 0);
}

__attribute__((constructor)) static void heed_forks(void) { pthread_atfork(NULL, NULL, forget_others); }

/* Use `count` threads, including the caller's, or the nearest possible number, and the given instruction set, which the
 * processor has, from now on. -1 if memory or threads are short; then nothing runs until another call succeeds. */
EXPORTED int kaon_start(int threads, int isa) {
    threads = max64(1, min64(threads, MAX_THREADS));
    pool.isa = isa;
    if (pool.threads == threads) return 0;
    end_threads();
    pool.started_before = atomic_load(&pool.started);
    for (; pool.threads < threads; pool.threads++) {
        int thread = pool.threads;
        if (!(pool.scratch[thread] = make_scratch())) break;
        if (thread && pthread_create(&pool.others[thread], NULL, work, (void *)(intptr_t)thread)) {
            free(pool.scratch[thread]);
            break;
        }
    }
    if (pool.threads == threads) return 0;
    end_threads();
    return -1;
}

/* How many there are, the caller's among them. */
EXPORTED int kaon_threads(void) { return pool.threads; }

/* Pin each thread except the caller's to a CPU of its own: `cpus` has one per thread. -1 if the system refuses; then
 * some may be pinned. */
EXPORTED int kaon_pin(const int64_t *cpus) {
    for (int thread = 1; thread < pool.threads; thread++) {
        cpu_set_t *set = CPU_ALLOC(cpus[thread] + 1);
        if (!set) return -1;
        size_t size = CPU_ALLOC_SIZE(cpus[thread] + 1);
        CPU_ZERO_S(size, set);
        CPU_SET_S(cpus[thread], size, set);
        int refused = pthread_setaffinity_np(pool.others[thread], size, set);
        CPU_FREE(set);
        if (refused) return -1;
    }
    return 0;
}

/* Run a program on a step; the number of operators that ran. With `may_pause` an interruption ends it before its last.
 * One caller at a time. */
EXPORTED int64_t kaon_run(const struct operation *operations, int64_t count, const struct step *step, int may_pause) {
    if (count == 0) return 0;
    pool.program = (struct program){operations, count, step, may_pause};
    atomic_fetch_add_explicit(&pool.activity, 1, memory_order_relaxed);
    if (pool.threads > 1) change(&pool.started, 1);
    int64_t done = run_part(0);
    atomic_fetch_add_explicit(&pool.activity, 1, memory_order_relaxed);
    return done;
}

/* Called in any thread: how often programs have begun and ended. */
EXPORTED int kaon_activity(void) { return atomic_load_explicit(&pool.activity, memory_order_relaxed); }

/* Called in any thread: interrupt the program that runs, or the next one, that may pause. */
EXPORTED void kaon_interrupt(void) { atomic_store(&pool.is_interrupted, 1); }

/* Called in any thread: withdraw an interruption that has ended no program so far. */
EXPORTED void kaon_withdraw_interruption(void) { atomic_store(&pool.is_interrupted, 0); }
