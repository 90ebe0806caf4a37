/* act(x @ gate.T) * (x @ up.T) with one weight that contains both: `gated` of the output of `linear`, without the
 * memory between. Sums are rounded to bfloat16 before they are gated, so that both ways agree bit for bit.
 *
 * With few rows, reading the weight takes the time: a thread reads some panels of gates, then theirs of the other half,
 * in the order of memory. With many, each panel is followed by its other: see many_rows.c. */

#include "operators.h"
#include "panels.h"

#define MOST_HELD 16 /* panels of gates that wait for those of the other half */

/* A thread's memory for it. */
struct gating_room {
    const struct gated_linear *op;
    const struct panel_products *products;
    enum isa isa;
    float *sums; /* `bytes_of_waiting` */
    bf16 *gates; /* [GROUP][MOST_HELD * PANEL], and for one panel the values that they gate, and the result */
    bf16 *ups, *gated;
    struct staged staged;
    int is_large; /* whether rows are many, and the output is too large to be read again from a cache */
};

static struct gating_room prepare(const struct gated_linear *op, struct worker *worker, int is_large) {
    prepare_tiles(worker->isa);
    float *sums = (float *)worker->scratch;
    bf16 *gates = (bf16 *)(worker->scratch + bytes_of_waiting()), *ups = gates + GROUP * MOST_HELD * PANEL;
    const struct panel_products *products = panel_products(worker->isa);
    return (struct gating_room){.op = op,
                                .products = products,
                                .isa = worker->isa,
                                .sums = sums,
                                .gates = gates,
                                .ups = ups,
                                .gated = ups + GROUP * PANEL,
                                .staged = {(char *)(ups + 2 * GROUP * PANEL), -1, products->staged_bytes},
                                .is_large = is_large};
}

static const bf16 *panel_at(const struct linear *op, int64_t panel) {
    return op->weight + panel * parts(op->in_features, DEPTH) * STEP;
}

static void get_bias(const struct linear *op, int64_t panel, float *bias) {
    for (int64_t i = 0; i < PANEL; i++) bias[i] = op->bias ? widen(op->bias[panel * PANEL + i]) : 0;
}

/* The product of all staged rows, GROUP at most, and the first of some panels of the weight. Returns of how many. */
static int64_t multiply(const struct gating_room *room, int64_t count, int64_t panel, int64_t panels) {
    const struct linear *op = &room->op->linear;
    return multiply_first(room->products, room->staged.rows, count, panel_at(op, panel), panels,
                          parts(op->in_features, DEPTH), look_ahead(count), room->sums);
}

/* The sums of the `made`th of those, rounded. */
static void round_made(const struct gating_room *room, int64_t count, int64_t panel, int64_t made, bf16 *out,
                       int64_t out_stride) {
    ALIGNED float bias[PANEL];
    get_bias(&room->op->linear, panel, bias);
    room->products->round(room->sums + made * count * PANEL, bias, count, 0, out, out_stride);
}

/* Up to MOST_HELD panels of gates. */
static void gate_few(const struct gating_room *room, const struct share *share, int64_t panel, int64_t panels) {
    const struct linear *op = &room->op->linear;
    int64_t half = op->out_features / PANEL / 2, stride = MOST_HELD * PANEL, rows = share->count;
    for (int64_t i = 0; i < panels;) {
        int64_t made = multiply(room, rows, panel + i, panels - i);
        for (int64_t j = 0; j < made; j++, i++) round_made(room, rows, panel + i, j, room->gates + i * PANEL, stride);
    }
    for (int64_t i = 0; i < panels;) {
        int64_t made = multiply(room, rows, half + panel + i, panels - i);
        for (int64_t j = 0; j < made; j++, i++) {
            bf16 *out = (bf16 *)op->out + share->first * op->out_stride + (panel + i) * PANEL;
            round_made(room, rows, half + panel + i, j, room->ups, PANEL);
            gate_panel(room->isa, &room->op->by, room->gates + i * PANEL, stride, room->ups, rows, room->gated);
            for (int64_t row = 0; row < rows; row++)
                memcpy(out + row * op->out_stride, room->gated + row * PANEL, PANEL * sizeof(bf16));
        }
    }
}

static void gate_share(struct gating_room *room, const struct share *share) {
    const struct linear *op = &room->op->linear;
    stage(&room->staged, op->x, op->x_stride, NULL, share->first, share->count, op->in_features);
    if (share->count <= GROUP && !room->is_large) {
        for (int64_t panel = share->panel; panel < share->past; panel += MOST_HELD)
            gate_few(room, share, panel, min64(MOST_HELD, share->past - panel));
        return;
    }
    const struct many many = {.op = op,
                              .by = &room->op->by,
                              .isa = room->isa,
                              .products = room->products,
                              .staged = &room->staged,
                              .first = share->first,
                              .count = share->count,
                              .sums = room->sums,
                              .is_large = room->is_large};
    multiply_many(&many, share->panel, share->past);
}

/* Tasks: as `struct cut` says of the gates' panels. */
void gated_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct gated_linear *op = arguments;
    int64_t rows = step->num_tokens, panels = op->linear.out_features / PANEL / 2;
    const struct cut cut = cut_dense(rows, op->linear.in_features, panels, worker->threads);
    struct gating_room room = prepare(op, worker, rows > FEW_ROWS);
    for (struct share share; take_share(&cut, worker, &share);) gate_share(&room, &share);
    if (room.is_large) settle_rounded();
}
