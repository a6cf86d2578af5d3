/* Matrix products with weights packed ahead, and the experts, which are many small ones.
 *
 * A weight [n, k] is stored as panels of 16 output columns, each [k][16]: a panel is read from start to end, and the next
 * one follows. An output is one chain of fused multiply-adds over k from 0 upwards, begun with 0, whatever the number of
 * rows, the tile it falls into or the thread: so a row's bits never depend on its company.
 *
 * Rows are worked on in groups of at most 6 (6 x 16 sums fill the registers). With one group a panel streams through once;
 * with more, the panel is taken in pieces that stay in the nearest cache while all groups pass, and partial sums
 * wait in the output, which costs no rounding. While the groups pass over a piece they fetch the next one, a share each, so
 * that memory and arithmetic overlap. Inputs are read where they lie: packing them too was measured, and slower.
 */
#include "native.h"
#include "simd.h"

#include <sys/mman.h>

enum {
    PANEL = 16,          /* output columns of a panel */
    MAX_GROUP = 6,       /* rows of a group */
    LINE = 64,           /* bytes of a cache line, and of one k of a panel */
    STREAM_DEPTH = 192,  /* k's of a panel piece for few groups: 12 KiB, so that the next one fits into a first-level cache too */
    BLOCK_DEPTH = 256,   /* the same for many: the next piece costs little then */
    BLOCK_GROUPS = 24,   /* groups whose piece of the input (144 KiB) stays in the second-level cache */
    STAYING = 65536,     /* floats of a whole input that stay in the second-level cache */
    MAX_RUNS = 256,      /* tasks that the panels of a product are cut into at most */
    SMALL = 16384,       /* floats that one thread had better copy alone */
    SMALL_PRODUCT = 32768, /* multiply-adds that are not worth a second thread */
    AHEAD = 40,          /* lines to fetch ahead where a panel streams through once */
};

/* How m rows are cut into groups of nearly equal size. */
typedef struct {
    long count, size, larger; /* the first `larger` groups have one row more than `size` */
} Groups;

static Groups cut_rows(long m) {
    const long count = ceil_div(m, MAX_GROUP);
    return (Groups){count, m / count, m % count};
}
static long group_start(Groups g, long i) { return i * g.size + min_long(i, g.larger); }
static long group_rows(Groups g, long i) { return g.size + (i < g.larger); }

/* ---- one tile: up to 6 rows x 16 columns ---- */

typedef struct {
    const float *a;    /* rows of the input */
    long a_step;       /* floats from row to row */
    const float *w;    /* panel piece */
    long depth;        /* its k's */
    float *c;
    long c_step;
    bool first;        /* begin with 0 instead of c */
    const char *fetch; /* what to prefetch meanwhile, and how many bytes to go on for each k */
    long fetch_step;
} Tile;

/* c[r][0..16) (+)= sum over i of a[r][i] · w[i][0..16) for r < rows, which must be a constant. */
INLINE void tile(const int rows, const Tile *t) {
    v8 low[MAX_GROUP], high[MAX_GROUP];
    const float *a = t->a, *w = t->w;
    const char *fetch = t->fetch;
    const long a_step = t->a_step, depth = t->depth, fetch_step = t->fetch_step;
    UNROLL for (int r = 0; r < rows; r++) {
        low[r] = t->first ? v8_zero() : v8_load(t->c + r * t->c_step);
        high[r] = t->first ? v8_zero() : v8_load(t->c + r * t->c_step + LANES);
    }
    for (long i = 0; i < depth; i++) {
        __builtin_prefetch(fetch + i * fetch_step);
        const v8 w0 = v8_load(w), w1 = v8_load(w + LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            const v8 x = v8_set1(a[r * a_step + i]);
            low[r] = v8_fma(x, w0, low[r]);
            high[r] = v8_fma(x, w1, high[r]);
        }
        w += PANEL;
    }
    UNROLL for (int r = 0; r < rows; r++) {
        v8_store(t->c + r * t->c_step, low[r]);
        v8_store(t->c + r * t->c_step + LANES, high[r]);
    }
}

typedef void (*tile_fn)(const Tile *t);

#define TILE(rows) \
    static void tile_##rows(const Tile *t) { tile(rows, t); }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)

static const tile_fn tiles[] = {NULL, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

/* ---- products: some inputs times some weights of one shape, as tasks of (product, run of panels) ---- */

/* Runs of panels, long ones first, so that threads read long streams and yet end together. */
typedef struct {
    long count, start[MAX_RUNS + 1];
} Runs;

/* Each run is 1/share of what is left, and at least one panel. */
static Runs cut_panels(long panels, long share) {
    Runs runs = {0};
    for (long next = 0; next < panels; runs.start[++runs.count] = next) {
        const long left = panels - next, fewest = ceil_div(left, MAX_RUNS - runs.count);
        next += max_long(max_long(1, left / share), fewest);
    }
    return runs;
}

typedef struct {
    const float *a; /* [rows, k] */
    long rows;
    const float *w; /* panels */
    float *out;     /* [rows, n] */
} Product;

typedef struct {
    const Product *products;
    long count, k, n;
    bool relu2;
    Runs runs;
} Products;

static void square_positive_part(float *c, long columns) {
    long j = 0;
    for (; j + LANES <= columns; j += LANES) {
        const v8 x = v8_max(v8_load(c + j), v8_zero());
        v8_store(c + j, v8_mul(x, x));
    }
    if (j < columns) {
        const v8 x = v8_max(v8_load_part(c + j, columns - j), v8_zero());
        v8_store_part(c + j, columns - j, v8_mul(x, x));
    }
}

/* The last panel may be narrower than a tile: it goes through a full-width copy. */
static void narrow_tile(tile_fn fn, Tile t, long rows, long columns) {
    float wide[MAX_GROUP * PANEL] = {0}, *c = t.c;
    const long c_step = t.c_step;
    for (long r = 0; r < rows && !t.first; r++) memcpy(wide + r * PANEL, c + r * c_step, sizeof(float) * columns);
    t.c = wide;
    t.c_step = PANEL;
    fn(&t);
    for (long r = 0; r < rows; r++) memcpy(c + r * c_step, wide + r * PANEL, sizeof(float) * columns);
}

/* k's [at, at + depth) of a panel, times the groups [from, to). The next piece to fetch lies `next` floats further on. */
static void panel_piece(const Products *j, const Product *p, Groups groups, long from, long to, long panel, long at, long depth, long next) {
    const bool last = at + depth == j->k;
    const float *w = p->w + (panel * j->k + at) * PANEL;
    const long columns = min_long(PANEL, j->n - panel * PANEL), share = LINE / (to - from);
    for (long g = from; g < to; g++) {
        const long row = group_start(groups, g), rows = group_rows(groups, g);
        const Tile t = {
            .a = p->a + row * j->k + at,
            .a_step = j->k,
            .w = w,
            .depth = depth,
            .c = p->out + row * j->n + panel * PANEL,
            .c_step = j->n,
            .first = at == 0,
            .fetch = (const char *)(w + next) + (g - from) * share * depth,
            .fetch_step = share,
        };
        if (columns == PANEL)
            tiles[rows](&t);
        else
            narrow_tile(tiles[rows], t, rows, columns);
        for (long r = 0; r < rows && last && j->relu2; r++) square_positive_part(t.c + r * j->n, columns);
    }
}

/* Panels [first, end) one after the other: the weights stream from start to end. For inputs that stay in a cache. */
static void panel_by_panel(const Products *j, const Product *p, Groups groups, long first, long end) {
    const long depth = groups.count == 1 ? j->k : STREAM_DEPTH;
    for (long panel = first; panel < end; panel++)
        for (long at = 0; at < j->k; at += depth)
            panel_piece(j, p, groups, 0, groups.count, panel, at, min_long(depth, j->k - at), (groups.count == 1 ? AHEAD : depth) * PANEL);
}

/* Some groups and k's after the others, so that their piece of the input stays in a cache while all panels pass. */
static void block_by_block(const Products *j, const Product *p, Groups groups, long first, long end) {
    const long blocks = ceil_div(groups.count, BLOCK_GROUPS);
    for (long block = 0; block < blocks; block++)
        for (long at = 0; at < j->k; at += BLOCK_DEPTH)
            for (long panel = first; panel < end; panel++)
                panel_piece(
                    j, p, groups, block * groups.count / blocks, (block + 1) * groups.count / blocks, panel, at, min_long(BLOCK_DEPTH, j->k - at), j->k * PANEL
                );
}

static void panels_task(const void *job, long task) {
    const Products *j = job;
    const Product *p = j->products + task / j->runs.count;
    const long *run = j->runs.start + task % j->runs.count;
    (p->rows * j->k <= STAYING ? panel_by_panel : block_by_block)(j, p, cut_rows(p->rows), run[0], run[1]);
}

static void run_products(const Product *products, long count, long k, long n, bool relu2, int threads) {
    long rows = 0;
    for (long i = 0; i < count; i++) rows += products[i].rows;
    if (!rows) return;
    const Products job = {products, count, k, n, relu2, cut_panels(ceil_div(n, PANEL), ceil_div(4 * threads, count + 1))};
    pool_run(panels_task, &job, count * job.runs.count, rows * k * n > SMALL_PRODUCT ? threads : 1);
}

/* ---- packing ---- */

typedef struct {
    const float *weight;
    float *panels;
    long n, k, panels_per_weight;
} PackWeight;

static void pack_weight_task(const void *job, long task) {
    const PackWeight *j = job;
    const long index = task / j->panels_per_weight, column = task % j->panels_per_weight * PANEL;
    const float *from = j->weight + (index * j->n + column) * j->k;
    float *to = j->panels + task * j->k * PANEL;
    const long columns = min_long(PANEL, j->n - column);
    for (long i = 0; i < j->k; i++)
        for (long c = 0; c < PANEL; c++) to[i * PANEL + c] = c < columns ? from[c * j->k + i] : 0.0f;
}

/* Fewer, larger pages for memory that streams: the hardware's prefetcher stops at every page's end. Only advice. */
static void advise_huge_pages(char *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const size_t huge = (size_t)2 << 20, skip = -(uintptr_t)memory % huge;
    if (bytes >= skip + huge) (void)madvise(memory + skip, (bytes - skip) / huge * huge, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

/* weight [count, n, k] -> panels [count, ceil(n/16), k, 16], zeros beyond n. */
EXPORT void baton_pack(const float *weight, float *panels, long count, long n, long k, int threads) {
    advise_huge_pages((char *)panels, sizeof(float) * count * ceil_div(n, PANEL) * k * PANEL);
    const PackWeight job = {weight, panels, n, k, ceil_div(n, PANEL)};
    pool_run(pack_weight_task, &job, count * job.panels_per_weight, threads);
}

EXPORT void baton_linear(const float *x, long m, const float *panels, long n, long k, bool relu2, float *out, int threads) {
    const Product product = {x, m, panels, out};
    run_products(&product, 1, k, n, relu2, threads);
}

/* ---- experts ---- */

typedef struct {
    long chosen, width; /* F, d_in */
    const float *x, *weights;
    const int64_t *token; /* [T·F] token of each line; lines are sorted by expert, then by token */
    const int64_t *line;  /* [T·F] line of (token, f) */
    float *inputs, *results, *out;
} Experts;

static void gather_task(const void *job, long line) {
    const Experts *j = job;
    memcpy(j->inputs + line * j->width, j->x + j->token[line] * j->width, sizeof(float) * j->width);
}

static void combine_task(const void *job, long t) {
    const Experts *j = job;
    float *out = j->out + t * j->width;
    memset(out, 0, sizeof(float) * j->width);
    for (long f = 0; f < j->chosen; f++) {
        const float *y = j->results + j->line[t * j->chosen + f] * j->width;
        const v8 weight = v8_set1(j->weights[t * j->chosen + f]);
        long i = 0;
        for (; i + LANES <= j->width; i += LANES) v8_store(out + i, v8_fma(weight, v8_load(y + i), v8_load(out + i)));
        const long rest = j->width - i;
        if (rest) v8_store_part(out + i, rest, v8_fma(weight, v8_load_part(y + i, rest), v8_load_part(out + i, rest)));
    }
}

static void sort_by_expert(const int64_t *ids, long tokens, long chosen, long experts, int64_t *token, int64_t *line, int64_t *start) {
    memset(start, 0, sizeof(int64_t) * (experts + 1));
    for (long i = 0; i < tokens * chosen; i++) start[ids[i] + 1]++;
    for (long e = 0; e < experts; e++) start[e + 1] += start[e];
    for (long i = 0; i < tokens * chosen; i++) {
        line[i] = start[ids[i]]++;
        token[line[i]] = i / chosen;
    }
    memmove(start + 1, start, sizeof(int64_t) * experts);
    start[0] = 0;
}

/* up, down: panels [E, ...] of up [E, hidden, width] and down [E, width, hidden]; ids [T, F] must lie in [0, E). */
EXPORT void baton_experts(
    const float *x, const int64_t *ids, const float *weights, const float *up, const float *down, float *out,
    long tokens, long chosen, long experts, long width, long hidden, int threads
) {
    const long lines = tokens * chosen;
    int64_t *lists = scratch(SCRATCH_LISTS, sizeof(int64_t) * (2 * lines + experts + 1) + 2 * sizeof(Product) * experts);
    int64_t *token = lists, *line = lists + lines, *start = line + lines;
    Product *ups = (Product *)(start + experts + 1), *downs = ups + experts;
    sort_by_expert(ids, tokens, chosen, experts, token, line, start);
    float *inputs = scratch(SCRATCH_INPUT, sizeof(float) * lines * width);
    float *middle = scratch(SCRATCH_HIDDEN, sizeof(float) * lines * hidden);
    float *results = scratch(SCRATCH_OUTPUT, sizeof(float) * lines * width);
    const long up_floats = ceil_div(hidden, PANEL) * width * PANEL, down_floats = ceil_div(width, PANEL) * hidden * PANEL;
    long used = 0;
    for (long e = 0; e < experts; e++) {
        const long first = start[e], count = start[e + 1] - first;
        if (!count) continue;
        ups[used] = (Product){inputs + first * width, count, up + e * up_floats, middle + first * hidden};
        downs[used++] = (Product){middle + first * hidden, count, down + e * down_floats, results + first * width};
    }
    const Experts job = {chosen, width, x, weights, token, line, inputs, results, out};
    const int copiers = lines * width > SMALL ? threads : 1;
    pool_run(gather_task, &job, lines, copiers);
    run_products(ups, used, width, hidden, true, threads);
    run_products(downs, used, hidden, width, false, threads);
    pool_run(combine_task, &job, tokens, copiers);
}

#include "simd_end.h"
