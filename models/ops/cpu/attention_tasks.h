/* The work of a thread of attention.c: tasks, the addresses of their keys and values, and prefetches. */

#ifndef ATTENTION_TASKS_H
#define ATTENTION_TASKS_H

#include "attention.h"

#define TILES 16 /* of columns that are multiplied by keys while these are in the cache */

#define HEADS_OF_TILE (LANES / FEW_COLUMNS)
#define MOST_HEADS (PAIR * HEADS_OF_TILE) /* KV heads of a decode's task: as many as scores and weights have room for */

/* Some columns of one row, or of rows that share their first keys, and one KV head; or a row's only token and several KV
 * heads. */
struct task {
    const struct attention *op;
    int64_t kv_head, group;    /* query heads that share it */
    int64_t kv_heads;          /* from that one on, of a task that takes several: see `heads_together` */
    const int32_t *blocks;     /* of the row */
    int64_t start, query_len;  /* its tokens in the step */
    int64_t context;           /* and before it */
    const int32_t *selected;   /* blocks of keys, which are adjacent in the columns' order; NULL: all keys */
    int64_t row, rows, shared; /* how many rows share their first keys, 1 for none, and how many keys */
    int64_t first_column, tiles;
    int64_t least, past;       /* keys to which any of the columns attends */
    struct columns columns[TILES];
    struct seen *all, *split; /* [tiles], of all splits before this one, and of this one */
    char *queries;
};

/* A thread's position in the list of tasks. With selected blocks a task is one token and KV head. */
struct cursor {
    int64_t heads;                /* KV heads of a decode's task */
    int64_t row, rows, shared;    /* as of a task */
    int64_t before, of_row, tiles; /* tasks before the row's, and of it; tiles of its columns */
    int64_t kv_heads;              /* of each of its tasks */
};

/* Number of KV heads of a decode that one task takes. */
int64_t heads_together(const struct attention *op, const struct step *step, const struct worker *worker);

/* Move to the row of the task with that number, which is not before the current one; returns 0 if there are fewer. */
int reach_task(const struct attention *op, const struct step *step, int threads, long number, struct cursor *at);

/* The same, and the task. */
int find_task(const struct attention *op, const struct step *step, int threads, long number, struct cursor *at,
              struct task *task);

/* Addresses of the keys and values of a step from `first_key` on. */
void locate(const struct task *task, int64_t first_key, struct units *keys, struct units *values);

/* The two steps after the current one, among a thread's tasks. */
struct ahead {
    struct fetches soon, later;
    const struct task *task; /* of the step after these two, or NULL while it is unknown */
    int64_t first_key;
};

/* Called before a task's first step, unless its steps are known from the previous task. */
void begin_task(struct ahead *ahead, const struct task *task, int64_t first_key);

/* Called before each step: find the two next ones. `after`: the probable next task, or NULL. */
void look_further(struct ahead *ahead, const struct task *after);

/* Called after each step: prefetch the rest of the next one. */
void go_on(struct ahead *ahead);

#endif
