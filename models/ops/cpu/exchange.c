/* Expert parallelism between replicas of one host: they exchange tokens and results through memory that all map.
 *
 * A layer takes two barriers. Before the first, each replica writes its tokens and their experts' ids to its own part of
 * the memory. Between the two, each replica reads the tokens of its own experts, and writes the experts' outputs to the
 * parts that the tokens came from. After the second, each replica adds up its outputs. No message announces a size: all
 * replicas read the same counts. Data written before one barrier is read before the next, so one buffer suffices. Only
 * the value that a replica passes to a barrier has two slots, used in turn: a replica that writes the same slot again
 * has seen all others at the barrier in between. */

#include "waiting.h"

#define ROWS_OF_TASK 16

struct table {
    ALIGNED atomic_llong left_by; /* 1 + the number of a replica that has left for good */
    struct {
        ALIGNED atomic_llong number; /* barriers that it has reached; engine/distributed/lockstep.py reads it too */
        int64_t said[2];             /* the values that it passed to the last two barriers */
    } replicas[];
};

static inline struct table *table_of(const struct exchange *exchange) { return (struct table *)exchange->memory; }

static int64_t said_by(const struct exchange *exchange, int64_t replica) {
    return table_of(exchange)->replicas[replica].said[exchange->meetings & 1];
}

/* A barrier: publish this replica's value and wait for all others. -1 if any replica has left for good, or this one. */
static int meet(struct exchange *exchange, int64_t said) {
    struct table *table = table_of(exchange);
    if (exchange->left_by) return -1;
    int64_t number = ++exchange->meetings;
    table->replicas[exchange->replica].said[number & 1] = said;
    atomic_store_explicit(&table->replicas[exchange->replica].number, number, memory_order_release);
    for (int64_t replica = 0; replica < exchange->replicas; replica++) {
        atomic_llong *theirs = &table->replicas[replica].number;
        for (int64_t round = 0; atomic_load_explicit(theirs, memory_order_acquire) < number; round++) {
            if ((exchange->left_by = atomic_load_explicit(&table->left_by, memory_order_acquire))) return -1;
            pause_for(round);
        }
    }
    return 0;
}

/* Leave for good: replicas that wait for this one, now or later, stop waiting. The first to leave is recorded. */
EXPORTED void kaon_exchange_leave(struct exchange *exchange) {
    long long none = 0;
    atomic_compare_exchange_strong(&table_of(exchange)->left_by, &none, exchange->replica + 1);
    exchange->left_by = atomic_load(&table_of(exchange)->left_by);
}

/* A barrier that returns each replica's value in `said`, by replica number. -1 if one has left. */
EXPORTED int kaon_exchange_agree(struct exchange *exchange, int64_t own, int64_t *said) {
    if (meet(exchange, own)) return -1;
    for (int64_t replica = 0; replica < exchange->replicas; replica++) said[replica] = said_by(exchange, replica);
    return 0;
}

/* Number of a replica's tokens that are not padding: at most as many as its part of the memory holds. */
static int64_t tokens_of(const struct share_tokens *op, int64_t replica) {
    return max64(0, min64(said_by(op->exchange, replica), op->most_tokens));
}

/* Sort the pairs of token and expert by expert, then by replica, then by token. */
static void sort_asked(const struct share_tokens *op) {
    int64_t replicas = op->exchange->replicas, of_replica = op->most_tokens * op->top_k, place = 0;
    memset(op->counts, 0, op->local * sizeof(int64_t));
    for (int64_t replica = 0; replica < replicas; replica++) {
        const int64_t *ids = op->shared_ids + replica * of_replica;
        for (int64_t pair = 0, pairs = tokens_of(op, replica) * op->top_k; pair < pairs; pair++) {
            uint64_t expert = (uint64_t)(ids[pair] - op->first_local);
            if (expert < (uint64_t)op->local) op->counts[expert]++;
        }
    }
    for (int64_t expert = 0; expert < op->local; expert++) op->next[expert] = place, place += op->counts[expert];
    op->pairs->num_tokens = place;
    for (int64_t replica = 0; replica < replicas; replica++) {
        const int64_t *ids = op->shared_ids + replica * of_replica;
        int64_t tokens = tokens_of(op, replica);
        for (int64_t token = 0, pair = 0; token < tokens; token++)
            for (int64_t i = 0; i < op->top_k; i++, pair++) {
                uint64_t expert = (uint64_t)(ids[pair] - op->first_local);
                if (expert >= (uint64_t)op->local) continue;
                place = op->next[expert]++;
                op->tokens[place] = replica * op->most_tokens + token;
                op->to[place] = replica * (of_replica + 1) + pair;
            }
    }
}

/* Publish the experts of this replica's tokens, whose rows are written already, and collect the pairs for its own
 * experts. -1 if a replica has left; then there are no pairs. The tokens of a dummy step have no pairs. */
EXPORTED int kaon_exchange_tokens(const struct share_tokens *op, int64_t num_tokens, int64_t is_dummy) {
    int64_t pairs = num_tokens * op->top_k, own = op->exchange->replica * op->most_tokens * op->top_k;
    int64_t first = own + op->exchange->replica, none = first + op->most_tokens * op->top_k;
    memcpy(op->shared_ids + own, op->ids, pairs * sizeof(int64_t));
    int left = meet(op->exchange, is_dummy ? 0 : num_tokens);
    if (left) {
        memset(op->counts, 0, op->local * sizeof(int64_t));
        op->pairs->num_tokens = 0;
    } else {
        sort_asked(op);
    }
    for (int64_t pair = 0; pair < pairs; pair++) {
        uint64_t expert = (uint64_t)(op->ids[pair] - op->first_asked);
        op->places[pair] = !left && !is_dummy && expert < (uint64_t)op->asked ? first + pair : none;
    }
    return left;
}

/* This replica has written its experts' outputs: wait for those of its own tokens. -1 if one has left. */
EXPORTED int kaon_exchange_await(struct exchange *exchange) { return meet(exchange, 0); }

/* One thread of each replica does this: it reads a few numbers, which takes less time than distributing them. */
void share_tokens(const void *arguments, const struct step *step, struct worker *worker) {
    const struct share_tokens *op = arguments;
    if (worker->thread == 0) kaon_exchange_tokens(op, step->num_tokens, step->is_dummy);
}

void await_answers(const void *arguments, const struct step *step, struct worker *worker) {
    const struct await_answers *op = arguments;
    (void)step;
    if (worker->thread == 0) kaon_exchange_await(op->exchange);
}

/* Tasks: ROWS_OF_TASK rows each. */
void copy_rows(const void *arguments, const struct step *step, struct worker *worker) {
    const struct copy_rows *op = arguments;
    for (int64_t row; (row = take_task(worker) * ROWS_OF_TASK) < step->num_tokens;)
        for (int64_t past = min64(step->num_tokens, row + ROWS_OF_TASK); row < past; row++)
            memcpy(op->to + (op->places ? op->places[row] : row) * op->row_bytes,
                   op->from + (op->sources ? op->sources[row] : row) * op->from_stride, op->row_bytes);
}

void on_step(const void *arguments, const struct step *step, struct worker *worker) {
    const struct on_step *op = arguments;
    (void)step;
    operators[op->number](op->arguments, op->step, worker);
}
