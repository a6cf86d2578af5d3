/* The experts' router: sigmoid scores, the best top_k by score + bias, their weights. One task a token. */
#include "native.h"
#include "simd.h"

enum { SMALL = 65536 /* multiply-adds that are not worth a second thread */ };

typedef struct {
    const float *x, *gate, *bias;
    int64_t *ids;
    float *weights;
    long width, experts, top_k;
    bool normalise;
    float scaling;
} Route;

/* x · each of four gate rows, as 8 running sums each. */
static void four_dots(const float *x, const float *const gate[4], long width, float out[4]) {
    v8 sums[4] = {v8_zero(), v8_zero(), v8_zero(), v8_zero()};
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        const v8 a = v8_load(x + i);
        UNROLL for (int e = 0; e < 4; e++) sums[e] = v8_fma(a, v8_load(gate[e] + i), sums[e]);
    }
    if (i < width) {
        const v8 a = v8_load_part(x + i, width - i);
        UNROLL for (int e = 0; e < 4; e++) sums[e] = v8_fma(a, v8_load_part(gate[e] + i, width - i), sums[e]);
    }
    v8_sums4(sums, out);
}

static void all_scores(const Route *j, const float *x, float *scores) {
    for (long e = 0; e < j->experts; e += 4) {
        const float *gate[4];
        for (long i = 0; i < 4; i++) gate[i] = j->gate + min_long(e + i, j->experts - 1) * j->width;
        four_dots(x, gate, j->width, scores + e);
    }
    for (long e = 0; e < j->experts; e += LANES) v8_store(scores + e, v8_sigmoid(v8_load(scores + e)));
}

/* The best of score + bias that is not yet taken; of equals the first. A NaN is never better, so something is always found. */
static long best_expert(const Route *j, const float *scores, const int64_t *taken, long count) {
    long best = -1;
    for (long e = 0; e < j->experts; e++) {
        bool free = true;
        for (long f = 0; f < count && free; f++) free = taken[f] != e;
        if (free && (best < 0 || scores[e] + j->bias[e] > scores[best] + j->bias[best])) best = e;
    }
    return best;
}

static void route_task(const void *job, long t) {
    const Route *j = job;
    const long padded = ceil_div(j->experts, LANES) * LANES;
    float *scores = scratch(SCRATCH_QUERIES, sizeof(float) * padded), total = 0.0f;
    memset(scores, 0, sizeof(float) * padded);
    all_scores(j, j->x + t * j->width, scores);
    int64_t *ids = j->ids + t * j->top_k;
    float *weights = j->weights + t * j->top_k;
    for (long f = 0; f < j->top_k; f++) {
        ids[f] = best_expert(j, scores, ids, f);
        weights[f] = scores[ids[f]];
        total += weights[f];
    }
    for (long f = 0; f < j->top_k; f++) weights[f] = (j->normalise ? weights[f] / (total + 1e-20f) : weights[f]) * j->scaling;
}

/* x [T, width], gate [E, width], bias [E] -> ids, weights [T, top_k], top_k <= E. */
EXPORT void baton_route(
    const float *x, const float *gate, const float *bias, int64_t *ids, float *weights, long tokens, long width, long experts, long top_k,
    bool normalise, float scaling, int threads
) {
    const Route job = {x, gate, bias, ids, weights, width, experts, top_k, normalise, scaling};
    pool_run(route_task, &job, tokens, tokens * width * experts > SMALL ? threads : 1);
}

#include "simd_end.h"
