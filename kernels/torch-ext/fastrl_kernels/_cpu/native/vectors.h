/* Vectors of the width that the processor has, by the compiler's vector extensions. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif
#ifndef WIDTH /* which tests name */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));

static inline vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

static inline vec all(float x) { return x - (vec){0}; }

/* The first n < WIDTH numbers; x in the other lanes. */
static inline vec load_some(const float *p, long n, float x) {
    vec v = all(x);
    memcpy(&v, p, n * sizeof(float));
    return v;
}

static inline void store_some(float *p, vec v, long n) { memcpy(p, &v, n * sizeof(float)); }

static inline vec choose(ints where, vec a, vec b) {
    return (vec)(((ints)a & where) | ((ints)b & ~where));
}

/* The larger of two; b where a is NaN. */
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* Sums pairwise: the order is the same on every processor of this width. */
static inline float sum_of(vec v) {
    float x[WIDTH];
    memcpy(x, &v, sizeof v);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

static inline float largest_of(vec v) {
    float m = v[0];
    for (int i = 1; i < WIDTH; i++) m = v[i] > m ? v[i] : m;
    return m;
}

/* exp(x) within 1.5 ulp, 0 where it is no normal number, inf from 88.4 on, NaN of NaN: 2^n exp(r)
   for x = n log 2 + r, |r| <= log(2)/2, and a polynomial of degree 6 (minimax, as in Cephes). */
static inline vec exponential(vec x) {
    ints gone = x < all(-87.0f);
    x = choose(x > all(88.5f), all(88.5f), x); /* for which n is 128, and 2^n inf */
    vec n = choose(gone, all(0.0f), x) * all(1.44269504088896341f);
    const vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = n + magic;
    n = shifted - magic;
    vec r = x - n * all(0.693359375f);
    r = r - n * all(-2.12194440e-4f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * (r * r) + r + all(1.0f);
    ints power = ((ints)shifted - (ints)magic + 127) << 23;
    return choose(gone, all(0.0f), p * (vec)power);
}

/* Four numbers from each of rows 0, 4, 8, ..., one behind the other. */
static inline vec every_fourth(const float *const *rows, long k) {
#if WIDTH == 16 && defined(__AVX512F__)
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + k));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(rows[4] + k), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(rows[8] + k), 2);
    return (vec)_mm512_insertf32x4(v, _mm_loadu_ps(rows[12] + k), 3);
#elif WIDTH == 8 && defined(__AVX__)
    return (vec)_mm256_loadu2_m128(rows[4] + k, rows[0] + k);
#else
    float x[WIDTH];
    for (int i = 0; i < WIDTH; i += 4) memcpy(x + i, rows[i] + k, 16);
    return load(x);
#endif
}

/* In each four lanes, those of a (0 to 3) and of b (4 to 7) that are named. */
#define OF_BOTH(i) ((i) < 4 ? (i) : (i) - 4 + WIDTH)
#if WIDTH == 16
#define LANES(i, j, k, l) ((ints){i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, k + 12, l + 12})
#elif WIDTH == 8
#define LANES(i, j, k, l) ((ints){i, j, k, l, i + 4, j + 4, k + 4, l + 4})
#else
#define LANES(i, j, k, l) ((ints){i, j, k, l})
#endif
#define MIXED(a, b, i, j, k, l) __builtin_shuffle(a, b, LANES(OF_BOTH(i), OF_BOTH(j), OF_BOTH(k), OF_BOTH(l)))
