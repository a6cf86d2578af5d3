/* The Mamba-2 recurrence (Dao & Gu 2024, arXiv 2405.21060), token by token: the one routine behind prefill and windows.
 *
 * A task is one head of one row; its state [P, N] (16 KiB at 64 x 64) stays in the nearest cache from token to token.
 * A token costs as little arithmetic here as in a chunked scan, and its rounding depends on nothing but the tokens before.
 */
#include "native.h"
#include "simd.h"

enum { SMALL = 32768 /* multiply-adds that are not worth a second thread */, STREAM_BYTES = 1 << 20 };

/* Mirrored by MambaArguments in native_ops.py. Shapes as in kernels/contract.py. */
typedef struct {
    const float *x, *dt, *b, *c, *a, *d, *dt_bias;
    float *states, *out;
    /* Prefill rows when cu_tokens is given (has_state too, and one slot a row in slots_out), else windows of `width` tokens. */
    const int32_t *cu_tokens, *slot_in, *slots_out;
    const uint8_t *has_state;
    int64_t x_step, dt_step, b_step, c_step, state_step; /* floats from token to token, and from slot to slot */
    int64_t heads, head_width, groups, state_width, rows, tokens, width;
    float dt_low, dt_high;
} Mamba;

/* Where a head's state comes from and goes to; `kept` is a second copy, wanted only with STREAM. */
typedef struct {
    const float *from;
    float *to, *kept;
} Move;

typedef enum { STORE, STREAM, STREAM_LAST } How; /* to a cache; past the caches, with and without a copy in one */

/* `channels` rows (1 or 4) of a state at `row`: to = decay · from + step · b; y = to · c. */
INLINE void state_rows(const int channels, const How how, const Move *move, long row, long n, const float *b, const float *c, float decay, const float *step, float *y) {
    const float *from = move->from + row * n;
    float *to = move->to + row * n, *kept = how == STREAM ? move->kept + row * n : NULL;
    const v8 keep = v8_set1(decay);
    v8 gain[4], sums[4] = {v8_zero(), v8_zero(), v8_zero(), v8_zero()};
    UNROLL for (int p = 0; p < channels; p++) gain[p] = v8_set1(step[p]);
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        const v8 vb = v8_load(b + i), vc = v8_load(c + i);
        UNROLL for (int p = 0; p < channels; p++) {
            const v8 s = v8_fma(gain[p], vb, v8_mul(keep, v8_load(from + p * n + i)));
            if (how == STORE)
                v8_store(to + p * n + i, s);
            else
                v8_stream(to + p * n + i, s);
            if (how == STREAM) v8_store(kept + p * n + i, s);
            sums[p] = v8_fma(s, vc, sums[p]);
        }
    }
    const long rest = n - i;
    if (rest && how == STORE) {
        const v8 vb = v8_load_part(b + i, rest), vc = v8_load_part(c + i, rest);
        UNROLL for (int p = 0; p < channels; p++) {
            const v8 s = v8_fma(gain[p], vb, v8_mul(keep, v8_load_part(from + p * n + i, rest)));
            v8_store_part(to + p * n + i, rest, s);
            sums[p] = v8_fma(s, vc, sums[p]);
        }
    }
    float totals[4];
    v8_sums4(sums, totals);
    for (int p = 0; p < channels; p++) y[p] = totals[p];
}

/* One token of one head. x, y [P]; dt is already positive and clamped. */
INLINE void head_step(const How how, const Mamba *j, long head, const float *x, const float *b, const float *c, float dt, float decay, const Move *move, float *y) {
    const long n = j->state_width;
    const float skip = j->d[head];
    long p = 0;
    for (; p + 4 <= j->head_width; p += 4) {
        const float step[4] = {dt * x[p], dt * x[p + 1], dt * x[p + 2], dt * x[p + 3]};
        state_rows(4, how, move, p, n, b, c, decay, step, y + p);
    }
    for (; p < j->head_width; p++) {
        const float step[1] = {dt * x[p]};
        state_rows(1, how, move, p, n, b, c, decay, step, y + p);
    }
    for (p = 0; p < j->head_width; p++) y[p] = __builtin_fmaf(skip, x[p], y[p]);
}

#define HEAD_STEP(name, how) \
    static void name(const Mamba *j, long head, const float *x, const float *b, const float *c, float dt, float decay, const Move *move, float *y) { \
        head_step(how, j, head, x, b, c, dt, decay, move, y); \
    }
HEAD_STEP(store_step, STORE) HEAD_STEP(stream_step, STREAM) HEAD_STEP(stream_last_step, STREAM_LAST)

/* Step sizes clamp(softplus(dt + bias)) and decays exp(step · a) of up to 8 tokens. */
static void step_sizes(const Mamba *j, long head, long token, long count, float steps[LANES], float decays[LANES]) {
    float raw[LANES] = {0};
    for (long i = 0; i < count; i++) raw[i] = j->dt[(token + i) * j->dt_step + head];
    v8 dt = v8_softplus(v8_add(v8_load(raw), v8_set1(j->dt_bias[head])));
    dt = v8_min(v8_set1(j->dt_high), v8_max(v8_set1(j->dt_low), dt));
    v8_store(steps, dt);
    v8_store(decays, v8_exp(v8_mul(dt, v8_set1(j->a[head]))));
}

static float *state(const Mamba *j, long slot, long head) {
    return j->states + slot * j->state_step + head * j->head_width * j->state_width;
}

/* Whether a window's states go past the caches: many of them would only push out other things, and writing a line that is
 * not in a cache would first read it. The next position then goes on from a copy. */
static bool streams(const Mamba *j, const float *to) {
    const long bytes = (long)sizeof(float) * j->tokens * j->heads * j->head_width * j->state_width;
    return bytes >= STREAM_BYTES && j->state_width % LANES == 0 && (uintptr_t)to % (LANES * sizeof(float)) == 0;
}

/* One token; returns where its state can be read from next. What nobody wants (the sink) stays in scratch memory, so that
 * tasks never meet there. */
static const float *token_step(const Mamba *j, long row, long head, long t, long token, long tokens, float dt, float decay, const float *from) {
    const long group = head * j->groups / j->heads, last = t + 1 == tokens;
    const long slot = j->cu_tokens ? j->slots_out[row] : j->slots_out[row * j->width + t];
    float *kept = scratch(SCRATCH_STATE, sizeof(float) * j->head_width * j->state_width);
    const Move move = {from, slot == SINK ? kept : state(j, slot, head), kept};
    const bool stream = !j->cu_tokens && slot != SINK && streams(j, move.to);
    (!stream ? store_step : last ? stream_last_step : stream_step)(
        j, head, j->x + token * j->x_step + head * j->head_width, j->b + token * j->b_step + group * j->state_width,
        j->c + token * j->c_step + group * j->state_width, dt, decay, &move, j->out + (token * j->heads + head) * j->head_width
    );
    return stream ? move.kept : move.to;
}

static void head_task(const void *job, long task) {
    const Mamba *j = job;
    const long row = task / j->heads, head = task % j->heads;
    const long first = j->cu_tokens ? j->cu_tokens[row] : row * j->width;
    const long tokens = j->cu_tokens ? j->cu_tokens[row + 1] - first : j->width;
    const size_t bytes = sizeof(float) * j->head_width * j->state_width;
    const bool has_state = !j->has_state || j->has_state[row];
    const float *from = has_state ? state(j, j->slot_in[row], head) : memset(scratch(SCRATCH_STATE, bytes), 0, bytes);
    float steps[LANES], decays[LANES];
    for (long t = 0; t < tokens; t++) {
        if (t % LANES == 0) step_sizes(j, head, first + t, min_long(LANES, tokens - t), steps, decays);
        from = token_step(j, row, head, t, first + t, tokens, steps[t % LANES], decays[t % LANES], from);
    }
    v8_stream_end();
}

EXPORT void baton_mamba2(const Mamba *j, int threads) {
    const long work = j->tokens * j->heads * j->head_width * j->state_width;
    pool_run(head_task, j, j->rows * j->heads, work > SMALL ? threads : 1);
}

#include "simd_end.h"
