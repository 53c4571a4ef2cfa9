/* What a decoder layer computes between its products, a row at a time. */
#include <math.h>

#include "vectors.h"

/* out = w s / sqrt(mean s^2 + eps) of s = x, or of s = residual + x, which is kept in `total`. */
static void normalise(float *out, float *total, const float *x, const float *residual,
                      const float *weight, float eps, long H) {
    vec squares = all(0.0f);
    long whole = H / WIDTH * WIDTH, rest = H - whole;
    for (long i = 0; i < whole; i += WIDTH) {
        vec s = load(x + i);
        if (residual) store(total + i, s = load(residual + i) + s);
        squares += s * s;
    }
    if (rest) {
        vec s = load_some(x + whole, rest, 0.0f);
        if (residual) store_some(total + whole, s = load_some(residual + whole, rest, 0.0f) + s, rest);
        squares += s * s;
    }
    float factor = 1.0f / sqrtf(sum_of(squares) / H + eps);
    const float *s = residual ? total : x;
    for (long i = 0; i < whole; i += WIDTH) store(out + i, load(weight + i) * (load(s + i) * factor));
    for (long i = whole; i < H; i++) out[i] = weight[i] * (s[i] * factor);
}

/* Rows of H numbers, one behind the other. */
void rms_norm(float *out, float *total, const float *x, const float *residual, const float *weight,
              float eps, long rows, long H) {
#pragma omp parallel for schedule(static) if (rows * H > 8192)
    for (long r = 0; r < rows; r++)
        normalise(out + r * H, total + r * H, x + r * H, residual ? residual + r * H : 0, weight, eps, H);
}

static inline vec gated(vec g, vec u) { return g / (all(1.0f) + exponential(-g)) * u; }

/* silu(g) u; rows of the two begin `down` numbers apart. */
void swiglu(float *out, const float *gate, const float *up, long down, long rows, long I) {
#pragma omp parallel for schedule(static) if (rows * I > 4096)
    for (long r = 0; r < rows; r++) {
        const float *g = gate + r * down, *u = up + r * down;
        float *to = out + r * I;
        long whole = I / WIDTH * WIDTH, rest = I - whole;
        for (long i = 0; i < whole; i += WIDTH) store(to + i, gated(load(g + i), load(u + i)));
        if (rest)
            store_some(to + whole, gated(load_some(g + whole, rest, 0.0f),
                                         load_some(u + whole, rest, 0.0f)), rest);
    }
}

static void rotate(float *out, const float *x, const float *cos, const float *sin, long R, long D) {
    for (long i = 0; i < R / 2; i++) {
        float low = x[i], high = x[i + R / 2];
        out[i] = low * cos[i] - high * sin[i];
        out[i + R / 2] = high * cos[i + R / 2] + low * sin[i + R / 2];
    }
    for (long i = R; i < D; i++) out[i] = x[i];
}

/* Rotates heads of the rows' queries into `rotated` [B, Hq, D], and stores rotated keys and values
   at the rows' positions. Rows of q, k and v begin `down` numbers apart, their heads D or Dv; a
   cache's strides are those of its slots, tokens and heads. Returns 0, or 1, having done nothing,
   where a position is outside of the M tokens of a slot. */
int rotate_and_store(float *rotated, const float *query, const float *key, const float *value,
                      const long *down, const float *cos, const float *sin, float *keys,
                      const long *of_keys, float *values, const long *of_values,
                      const int64_t *positions, const float *query_norm, const float *key_norm,
                      float eps, long M, long B, long Hq, long Hkv, long D, long Dv, long R) {
    for (long b = 0; b < B; b++)
        if (positions[b] < 0 || positions[b] >= M) return 1;
#pragma omp parallel for schedule(static) if (B * Hq * D > 8192)
    for (long b = 0; b < B; b++) {
        float normed[D], unused[1];
        const float *c = cos + b * R, *s = sin + b * R;
        long at = positions[b];
        for (long h = 0; h < Hq; h++) {
            const float *x = query + b * down[0] + h * D;
            if (query_norm) normalise(normed, unused, x, 0, query_norm, eps, D);
            rotate(rotated + (b * Hq + h) * D, query_norm ? normed : x, c, s, R, D);
        }
        for (long h = 0; h < Hkv; h++) {
            const float *x = key + b * down[1] + h * D;
            if (key_norm) normalise(normed, unused, x, 0, key_norm, eps, D);
            float *to = keys + b * of_keys[0] + at * of_keys[1] + h * of_keys[2];
            rotate(to, key_norm ? normed : x, c, s, R, D);
            memcpy(values + b * of_values[0] + at * of_values[1] + h * of_values[2],
                   value + b * down[2] + h * Dv, Dv * sizeof(float));
        }
    }
    return 0;
}
