/* Eight floats at a time, and the few functions of them that the kernels need.
 *
 * On x86-64 the code between this header and simd_end.h is compiled for AVX2 and FMA whatever the compiler's flags say;
 * abi.c is not, so that a machine without them can be told so. Elsewhere the same functions are plain C.
 *
 * Every function is lane-wise: what a lane gives does not depend on its place or on its neighbours. The horizontal sums
 * all add in one order: ((0+1)+(2+3)) + ((4+5)+(6+7)).
 */
#ifndef BATON_SIMD_H
#define BATON_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(BATON_PORTABLE)
#define BATON_AVX2 1
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#endif

#define LANES 8
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

#ifdef BATON_AVX2

typedef __m256 v8;

INLINE v8 v8_zero(void) { return _mm256_setzero_ps(); }
INLINE v8 v8_set1(float a) { return _mm256_set1_ps(a); }
INLINE v8 v8_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v8_store(float *p, v8 a) { _mm256_storeu_ps(p, a); }
/* Past the caches, to an address that is a multiple of 32; v8_stream_end before another thread may look. */
INLINE void v8_stream(float *p, v8 a) { _mm256_stream_ps(p, a); }
INLINE void v8_stream_end(void) { _mm_sfence(); }
INLINE v8 v8_add(v8 a, v8 b) { return _mm256_add_ps(a, b); }
INLINE v8 v8_sub(v8 a, v8 b) { return _mm256_sub_ps(a, b); }
INLINE v8 v8_mul(v8 a, v8 b) { return _mm256_mul_ps(a, b); }
INLINE v8 v8_div(v8 a, v8 b) { return _mm256_div_ps(a, b); }
INLINE v8 v8_fma(v8 a, v8 b, v8 c) { return _mm256_fmadd_ps(a, b, c); }
/* Where either is NaN, both give b. */
INLINE v8 v8_max(v8 a, v8 b) { return _mm256_max_ps(a, b); }
INLINE v8 v8_min(v8 a, v8 b) { return _mm256_min_ps(a, b); }
INLINE v8 v8_abs(v8 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE v8 v8_round(v8 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE __m256i v8_mask(long n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
/* The first n lanes (0 <= n < 8), the others zero; memory beyond them is not touched. */
INLINE v8 v8_load_part(const float *p, long n) { return _mm256_maskload_ps(p, v8_mask(n)); }
INLINE void v8_store_part(float *p, long n, v8 a) { _mm256_maskstore_ps(p, v8_mask(n), a); }

/* a · 2^n for integral n in [-150, 129], in two steps so that neither factor overflows. */
INLINE v8 v8_ldexp(v8 a, v8 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const __m256i bias = _mm256_set1_epi32(127);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

/* Lane i of the result is the horizontal sum of a[i]. */
INLINE v8 v8_sums8(const v8 a[8]) {
    const v8 x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    const v8 y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
INLINE void v8_sums4(const v8 a[4], float out[4]) {
    const v8 x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
INLINE float v8_sum(v8 a) {
    a = _mm256_hadd_ps(a, a);
    a = _mm256_hadd_ps(a, a);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}
INLINE float v8_highest(v8 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

#else /* plain C: vectors by the compiler's extension, lane by lane where it has no operator */

typedef float v8 __attribute__((vector_size(32)));

#define V8_LANES(expression) \
    v8 r; \
    for (int i = 0; i < LANES; i++) r[i] = (expression); \
    return r

INLINE v8 v8_zero(void) { return (v8){0}; }
INLINE v8 v8_set1(float a) { return (v8){a, a, a, a, a, a, a, a}; }
INLINE v8 v8_load(const float *p) {
    v8 r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE void v8_store(float *p, v8 a) { memcpy(p, &a, sizeof a); }
INLINE void v8_stream(float *p, v8 a) { v8_store(p, a); }
INLINE void v8_stream_end(void) {}
INLINE v8 v8_add(v8 a, v8 b) { return a + b; }
INLINE v8 v8_sub(v8 a, v8 b) { return a - b; }
INLINE v8 v8_mul(v8 a, v8 b) { return a * b; }
INLINE v8 v8_div(v8 a, v8 b) { return a / b; }
INLINE v8 v8_fma(v8 a, v8 b, v8 c) { V8_LANES(__builtin_fmaf(a[i], b[i], c[i])); }
INLINE v8 v8_max(v8 a, v8 b) { V8_LANES(a[i] > b[i] ? a[i] : b[i]); }
INLINE v8 v8_min(v8 a, v8 b) { V8_LANES(a[i] < b[i] ? a[i] : b[i]); }
INLINE v8 v8_abs(v8 a) { V8_LANES(__builtin_fabsf(a[i])); }
INLINE v8 v8_round(v8 a) { V8_LANES(__builtin_rintf(a[i])); }
INLINE v8 v8_load_part(const float *p, long n) { V8_LANES(i < n ? p[i] : 0.0f); }
INLINE void v8_store_part(float *p, long n, v8 a) {
    for (int i = 0; i < n; i++) p[i] = a[i];
}
INLINE v8 v8_ldexp(v8 a, v8 n) { V8_LANES(__builtin_ldexpf(a[i], n[i] == n[i] ? (int)n[i] : 0)); }
INLINE float v8_sum(v8 a) { return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])); }
INLINE v8 v8_sums8(const v8 a[8]) { V8_LANES(v8_sum(a[i])); }
INLINE void v8_sums4(const v8 a[4], float out[4]) {
    for (int i = 0; i < 4; i++) out[i] = v8_sum(a[i]);
}
INLINE float v8_highest(v8 a) {
    float m = a[0];
    for (int i = 1; i < LANES; i++) m = a[i] > m ? a[i] : m;
    return m;
}

#endif

/* e^x to about 1e-7 relative over the whole range: 0 below, inf above, NaN for NaN. */
INLINE v8 v8_exp(v8 x) {
    x = v8_min(v8_set1(89.0f), v8_max(v8_set1(-104.0f), x));
    const v8 n = v8_round(v8_mul(x, v8_set1(1.44269504088896341f)));
    v8 r = v8_fma(n, v8_set1(-0.693359375f), x); /* ln 2 in two pieces: the first product is exact */
    r = v8_fma(n, v8_set1(2.12194440e-4f), r);
    v8 p = v8_set1(1.9875691500e-4f); /* Cephes expf, |r| <= ln(2)/2 */
    p = v8_fma(p, r, v8_set1(1.3981999507e-3f));
    p = v8_fma(p, r, v8_set1(8.3334519073e-3f));
    p = v8_fma(p, r, v8_set1(4.1665795894e-2f));
    p = v8_fma(p, r, v8_set1(1.6666665459e-1f));
    p = v8_fma(p, r, v8_set1(5.0000001201e-1f));
    p = v8_fma(p, v8_mul(r, r), r);
    return v8_ldexp(v8_add(p, v8_set1(1.0f)), n);
}

INLINE v8 v8_sigmoid(v8 x) {
    return v8_div(v8_set1(1.0f), v8_add(v8_set1(1.0f), v8_exp(v8_sub(v8_zero(), x))));
}

INLINE v8 v8_silu(v8 x) { return v8_div(x, v8_add(v8_set1(1.0f), v8_exp(v8_sub(v8_zero(), x)))); }

/* log(1 + e^x) = max(x, 0) + log1p(u), u = e^-|x|; log1p(u) = 2 atanh(s), s = u / (2 + u) <= 1/3, as its own series. */
INLINE v8 v8_softplus(v8 x) {
    const v8 u = v8_exp(v8_sub(v8_zero(), v8_abs(x)));
    const v8 s = v8_div(u, v8_add(v8_set1(2.0f), u)), q = v8_mul(s, s);
    v8 p = v8_set1(2.0f / 15);
    p = v8_fma(p, q, v8_set1(2.0f / 13));
    p = v8_fma(p, q, v8_set1(2.0f / 11));
    p = v8_fma(p, q, v8_set1(2.0f / 9));
    p = v8_fma(p, q, v8_set1(2.0f / 7));
    p = v8_fma(p, q, v8_set1(2.0f / 5));
    p = v8_fma(p, q, v8_set1(2.0f / 3));
    p = v8_fma(p, q, v8_set1(2.0f));
    return v8_fma(p, s, v8_max(v8_zero(), x));
}

#endif
