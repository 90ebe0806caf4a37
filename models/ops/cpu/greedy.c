/* The argmax of each row, directly from the product with the head's weight: no logit is stored.
 *
 * Logits are the sums that linear.c or quantized.c would write, so the choice is the same: the largest, the first of
 * equal ones, and a NaN before all others. Each thread stores the best of its logits; then one thread compares
 * these. */

#include <math.h>
#include <time.h>

#include "operators.h"
#include "panels.h"
#include "quantized.h"

/* A thread's best logit of each row. */
struct best_tokens {
    float *peaks;
    int64_t *tokens;
};

/* Whether `value` replaces `peak`, which came before it. A NaN is larger than any number. */
static inline int exceeds(float value, float peak) { return value > peak || (value != value && peak == peak); }

/* Logits [rows][PANEL] of the tokens from `first` on, of which there are `width`. */
CLONES static void remember(const float *logits, int64_t rows, int64_t first, int64_t width, struct best_tokens best) {
    for (int64_t row = 0; row < rows; row++, logits += PANEL) {
        float peak = best.peaks[row];
        int any = 0;
        for (int i = 0; i < PANEL; i++) any |= !(logits[i] <= peak);
        for (int64_t i = 0; any && i < width; i++)
            if (exceeds(logits[i], peak)) best.peaks[row] = peak = logits[i], best.tokens[row] = first + i;
    }
}

static void add_bias(float *logits, int64_t rows, const bf16 *bias, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i++) logits[row * PANEL + i] += widen(bias[i]);
}

void begin_greedy(const struct greedy_head *op, int64_t rows, int thread) {
    for (int64_t row = 0; row < rows; row++)
        op->peaks[thread * op->max_rows + row] = -INFINITY, op->tokens[thread * op->max_rows + row] = 0;
}

void keep_best(const struct greedy_head *op, float *logits, int64_t row, int64_t rows, int64_t token, int thread) {
    int64_t at = thread * op->max_rows + row, width = min64(PANEL, op->out_features - token);
    if (op->bias) add_bias(logits, rows, op->bias + token, width);
    remember(logits, rows, token, width, (struct best_tokens){op->peaks + at, op->tokens + at});
}

/* Tasks: blocks of rows, each with one share of the panels after the other. A thread's shares come in order. */
static void choose(const struct greedy_head *op, const struct step *step, struct worker *worker) {
    const struct panel_products *products = panel_products(worker->isa);
    int64_t rows = step->num_tokens, steps = parts(op->in_features, DEPTH), panels = parts(op->out_features, PANEL);
    int64_t block = rows_to_stage(steps * DEPTH);
    int64_t share = panels_of_task(1, steps * STEP * sizeof(bf16), panels, worker->threads);
    int64_t shares = parts(panels, share);
    struct staged staged = {worker->scratch, -1, products->staged_bytes};
    ALIGNED float logits[GROUP * PANEL];
    prepare_tiles(worker->isa);
    for (int64_t task; (task = take_task(worker)) < parts(rows, block) * shares;) {
        int64_t first = task / shares * block, panel = task % shares * share, past = min64(panels, panel + share);
        int64_t count = min64(block, rows - first);
        stage(&staged, op->x, op->x_stride, NULL, first, count, op->in_features);
        for (int64_t made = 1; panel < past; panel += made) {
            const bf16 *weight = op->weight + panel * steps * STEP;
            for (int64_t row = 0, some; row < count; row += some) {
                some = rows_of_group(count - row, count);
                made = multiply_first(products, staged.rows + row * steps * DEPTH * staged.bytes, some, weight,
                                      past - panel, steps, look_ahead(count), logits);
                for (int64_t i = 0; i < made; i++)
                    keep_best(op, logits + i * some * PANEL, first + row, some, (panel + i) * PANEL, worker->thread);
            }
        }
    }
}

void greedy_head(const void *arguments, const struct step *step, struct worker *worker) {
    const struct greedy_head *op = arguments;
    begin_greedy(op, step->num_tokens, worker->thread);
    if (op->bits == 16) choose(op, step, worker);
    else quantized_greedy_head(op, step, worker);
}

/* One task. */
void greedy_choice(const void *arguments, const struct step *step, struct worker *worker) {
    const struct greedy_choice *op = arguments;
    if (take_task(worker)) return;
    for (int thread = 0; thread < worker->threads; thread++) {
        const float *peaks = op->head->peaks + thread * op->head->max_rows;
        const int64_t *tokens = op->head->tokens + thread * op->head->max_rows;
        for (int64_t row = 0; row < step->num_tokens; row++) {
            int comes_first = tokens[row] < op->tokens[row];
            int is_larger = exceeds(peaks[row], op->peaks[row]);
            if (!thread || is_larger || (comes_first && !exceeds(op->peaks[row], peaks[row])))
                op->peaks[row] = peaks[row], op->tokens[row] = tokens[row];
        }
    }
}

static int32_t *known_token(const struct sampling *by, int64_t slot, int64_t position) {
    return by->known + slot * by->known_stride + position;
}

/* One task, on the rows for which the head has chosen tokens. Those that draft further are the first ones. */
void take_drafts(const void *arguments, const struct step *step, struct worker *worker) {
    const struct take_drafts *op = arguments;
    if (take_task(worker)) return;
    int64_t *ids = (int64_t *)op->next->input_ids, *positions = (int64_t *)op->next->positions;
    int64_t *slots = (int64_t *)op->next->slots, further = 0;
    int32_t *seq_lens = (int32_t *)op->next->seq_lens;
    for (int64_t row = 0; row < step->num_tokens; row++) {
        int is_number = isfinite(op->peaks[row]);
        op->drafts[row] = is_number ? op->chosen[row] : -1;
        if (op->counts[row] <= op->depth + 1) continue;
        positions[row] += op->depth > 0;
        int64_t position = (int32_t)positions[row];
        ids[row] = is_number ? op->chosen[row] : 0;
        if (op->by) *known_token(op->by, op->slots[row], position + op->ahead) = (int32_t)ids[row];
        seq_lens[row] = (int32_t)position + 1;
        slots[row] = step->block_tables[row * step->max_blocks + position / op->block_size] * op->block_size +
                     position % op->block_size;
        further++;
    }
    op->next->num_tokens = op->next->num_rows = further;
}

/* How many drafts a row may have after its last accepted token, which is at `position`. */
static int64_t room_of(const struct accept_drafts *op, int64_t row, int64_t position) {
    int64_t of_blocks = op->num_blocks[row] * op->block_size - position, of_context = op->max_len - position - 2;
    return max64(0, min64(op->wanted[row], min64(of_blocks, of_context)));
}

/* The last of a row's tokens, from `first` to `past`, that is not a rejected draft. */
static int64_t last_accepted(const struct step *step, const float *peaks, const int64_t *tokens, int64_t first,
                             int64_t past) {
    while (first + 1 < past && isfinite(peaks[first]) && tokens[first] == step->input_ids[first + 1]) first++;
    return first;
}

/* One task. */
void accept_drafts(const void *arguments, const struct step *step, struct worker *worker) {
    const struct accept_drafts *op = arguments;
    const struct step *verified = op->verified;
    (void)step;
    if (take_task(worker)) return;
    int64_t *positions = (int64_t *)op->next->positions, most = 0, num_rows = 0;
    int32_t *tables = (int32_t *)op->next->block_tables;
    for (int64_t row = 0; row < verified->num_rows; row++) most = max64(most, op->wanted[row]);
    /* Rows with equal numbers of drafts keep their order. */
    for (int64_t count = most; count > 0; count--)
        for (int64_t row = 0; row < verified->num_rows; row++) {
            int64_t last = verified->query_starts[row], past = verified->query_starts[row + 1];
            if (op->wanted[row] < count) continue;
            last = last_accepted(verified, op->peaks, op->tokens, last, past);
            int64_t position = (int32_t)verified->positions[last];
            if (!isfinite(op->peaks[last]) || room_of(op, row, position) != count) continue;
            op->order[num_rows] = row, op->last[num_rows] = last, op->counts[num_rows] = count;
            op->slots[num_rows] = op->rows[row];
            if (op->by) *known_token(op->by, op->rows[row], position + 1) = (int32_t)op->tokens[last];
            positions[num_rows] = verified->positions[last] + 1;
            int64_t needed = min64(op->num_blocks[row], (position + count) / op->block_size + 1);
            memcpy(tables + num_rows * op->blocks, op->tables + op->rows[row] * op->blocks, needed * sizeof(int32_t));
            num_rows++;
        }
    op->next->num_tokens = op->next->num_rows = *op->num_drafting = num_rows;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *op->began = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Add a row to a step: its last known token, which lies at `position`, and its drafts, which lie `stride` apart. */
static void add_row(const struct next_round *op, struct step *to, int64_t slot, int64_t position, int64_t token,
                    const int64_t *drafts, int64_t stride, int64_t count) {
    int64_t at = (int32_t)position, start = to->num_tokens;
    const int32_t *table = op->tables + slot * op->blocks;
    for (int64_t i = 0; i <= count && token >= 0; i++, to->num_tokens++) {
        int64_t here = at + i;
        ((int64_t *)to->input_ids)[start + i] = token;
        ((int64_t *)to->positions)[start + i] = position + i;
        ((int64_t *)to->slots)[start + i] = table[here / op->block_size] * op->block_size + here % op->block_size;
        op->slots[start + i] = slot;
        *known_token(op->by, slot, here) = (int32_t)token;
        token = i < count ? drafts[i * stride] : -1;
    }
    int64_t length = at + to->num_tokens - start;
    ((int32_t *)to->seq_lens)[to->num_rows] = (int32_t)length;
    memcpy((int32_t *)to->block_tables + to->num_rows * op->blocks, table, parts(length, op->block_size) * sizeof(int32_t));
    ((int32_t *)to->query_starts)[++to->num_rows] = (int32_t)to->num_tokens;
}

/* Make `step`, whose arrays are in a buffer of `op`, that of a round. */
static void begin_round(const struct next_round *op, const struct step *step) {
    *op->step = *op->first = *step;
    op->first->input_ids = op->tokens;
}

/* One task. */
void first_round(const void *arguments, const struct step *step, struct worker *worker) {
    const struct first_round *op = arguments;
    const struct next_round *of = op->round;
    (void)step;
    if (take_task(worker) || *of->round) return;
    struct step to = of->buffers[1];
    int64_t num_rows = of->step->num_rows;
    const int64_t *drafts = op->drafts;
    to.num_tokens = to.num_rows = 0;
    for (int64_t row = 0; row < num_rows; drafts += op->counts[row++]) {
        int64_t position = op->positions[row], slot = of->rows[row];
        add_row(of, &to, slot, position, *known_token(of->by, slot, (int32_t)position), drafts, 1, op->counts[row]);
    }
    to.state_slots = of->step->state_slots, to.states_after = of->step->states_after;
    begin_round(of, &to);
}

/* The index among the rows that draft of row `row`; their number if it is not one of them. */
static int64_t drafting_index(const struct next_round *op, int64_t row) {
    int64_t index = 0;
    while (index < *op->num_drafting && op->order[index] != row) index++;
    return index;
}

/* Add a row to the next round, see `add_row`, with the drafts at `index`. Returns whether there is room for the token. */
static int add_to_round(const struct next_round *op, struct step *to, int64_t row, int64_t position, int64_t token,
                        int64_t index) {
    int64_t slot = op->rows[row], at = (int32_t)position, added = to->num_rows;
    int64_t room = min64(min64(op->num_blocks[row] * op->block_size, op->max_len), op->limits[row] - 1) - at;
    if (room < 1) return 0;
    op->rows[added] = slot, op->row_of[added] = op->row_of[row], op->wanted[added] = op->wanted[row];
    op->num_blocks[added] = op->num_blocks[row], op->limits[added] = op->limits[row];
    int64_t most = index < *op->num_drafting ? min64(op->counts[index], room - 1) : 0;
    add_row(op, to, slot, position, token, op->drafts + index, op->max_rows, most);
    return 1;
}

static int is_end(const struct next_round *op, int64_t token) {
    for (int64_t i = 0; i < op->num_ends; i++)
        if (op->ends[i] == token) return 1;
    return 0;
}

/* One task. The arrays of rows are compacted in place, which rows that were read already permit. */
void next_round(const void *arguments, const struct step *step, struct worker *worker) {
    const struct next_round *op = arguments;
    (void)step;
    if (take_task(worker)) return;
    const struct step of = *op->step;
    struct step to = op->buffers[*op->round % 2];
    int64_t *drafted = op->counted + *op->round * 2 * op->max_rows, *accepted = drafted + op->max_rows, continues = 1;
    to.num_tokens = to.num_rows = 0;
    for (int64_t row = 0; row < of.num_rows; row++) {
        int64_t first = of.query_starts[row], past = of.query_starts[row + 1], origin = op->row_of[row];
        int64_t last = last_accepted(&of, op->peaks, op->tokens, first, past), index = drafting_index(op, row);
        int64_t count = last - first + (isfinite(op->peaks[last]) != 0), *total = &op->num_accepted[origin];
        int ends = 0;
        drafted[origin] = past - first - 1, accepted[origin] = count;
        for (int64_t i = 0; i < count; i++) {
            ends |= is_end(op, op->tokens[first + i]);
            op->accepted[origin * op->capacity + (*total)++] = op->tokens[first + i];
            *known_token(op->by, op->rows[row], (int32_t)of.positions[first + i] + 1) = (int32_t)op->tokens[first + i];
        }
        int64_t length = (int32_t)of.positions[last] + 2;
        if (first + count <= last) continues = 0; /* A logit is no number: a step of its own finds out why. */
        else if (!ends && length < op->limits[row])
            continues &= add_to_round(op, &to, row, of.positions[last] + 1, op->tokens[last], index);
        if (index < *op->num_drafting) op->order[index] = -1 - origin;
    }
    for (int64_t index = 0; index < *op->num_drafting; index++) op->order[index] = -1 - op->order[index];
    *op->continues = continues && to.num_rows;
    ++*op->round;
    if (*op->continues) begin_round(op, &to);
}
