/* What the files offer each other; each is described where it is defined. */
#pragma once

#include <stdint.h>

void linear(float *restrict out, const float *restrict x, long stride, const float *restrict packed,
            const float *restrict weight, long down, const float *bias, float *restrict turned, long M,
            long N, long K);
void rms_norm(float *out, float *total, const float *x, const float *residual, const float *weight,
              float eps, long rows, long H);
void swiglu(float *out, const float *gate, const float *up, long down, long rows, long I);
int rotate_and_store(float *rotated, const float *query, const float *key, const float *value,
                     const long *down, const float *cos, const float *sin, float *keys,
                     const long *of_keys, float *values, const long *of_values,
                     const int64_t *positions, const float *query_norm, const float *key_norm,
                     float eps, long M, long B, long Hq, long Hkv, long D, long Dv, long R);
int decode_attention(float *out, const float *query, const float *keys, const long *of_keys,
                     const float *values, const long *of_values, const int32_t *lengths,
                     const float *sinks, float scale, float cap, long span, long window, long chunk,
                     long B, long Hq, long Hkv, long D, long Dv);
