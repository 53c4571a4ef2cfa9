/* A decoder layer such as Llama's, for one new token in each row: the other files' functions, one
   after the other. */
#include "functions.h"

/* Products are packed; a bias may be 0, and so may norms of heads and sinks. Without a window or
   chunks, these are as long as the span or longer. */
struct layer {
    const float *attention_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *sinks, *out, *out_bias;
    const float *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    float attention_eps, head_eps, mlp_eps, scale, cap;
    long H, Hq, Hkv, D, Dv, R, I, window, chunk;
};

/* Numbers of working memory for each row. */
long numbers_of_a_row(const struct layer *l) {
    long qkv = (l->Hq + l->Hkv) * l->D + l->Hkv * l->Dv, attended = l->Hq * l->Dv;
    long widest = l->H > attended ? l->H : attended;
    widest = widest > l->I ? widest : l->I;
    return 3 * l->H + qkv + l->Hq * l->D + attended + 3 * l->I + widest;
}

/* x becomes the output of the MLP, and `total` [B, H] the stream that it is to be added to, of x, the
   last layer's such output, and `stream` [B, H], or 0 in front of the first layer. Returns 0; 1,
   having stored nothing, where a position is outside of the M tokens of a slot; or 2 without memory
   for scores. */
int decode_layer(const struct layer *l, float *x, float *total, const float *stream, const float *cos,
                 const float *sin, float *keys, const long *of_keys, float *values,
                 const long *of_values, const int64_t *positions, const int32_t *lengths,
                 float *memory, long M, long span, long B) {
    long H = l->H, D = l->D, Dv = l->Dv, I = l->I, of_queries = l->Hq * D, of_heads = l->Hkv * D;
    long qkv_width = of_queries + of_heads + l->Hkv * Dv, down[3] = {qkv_width, qkv_width, qkv_width};
    float *normed = memory, *sum = normed + B * H, *qkv = sum + B * H, *queries = qkv + B * qkv_width;
    float *attended = queries + B * of_queries, *output = attended + B * l->Hq * Dv;
    float *gate_up = output + B * H, *gated = gate_up + 2 * B * I, *turned = gated + B * I;

    rms_norm(normed, sum, x, stream, l->attention_norm, l->attention_eps, B, H);
    linear(qkv, normed, H, l->qkv, 0, 0, l->qkv_bias, turned, B, qkv_width, H);
    if (rotate_and_store(queries, qkv, qkv + of_queries, qkv + of_queries + of_heads, down, cos, sin,
                         keys, of_keys, values, of_values, positions, l->query_norm, l->key_norm,
                         l->head_eps, M, B, l->Hq, l->Hkv, D, Dv, l->R))
        return 1;
    if (decode_attention(attended, queries, keys, of_keys, values, of_values, lengths, l->sinks,
                         l->scale, l->cap, span, l->window, l->chunk, B, l->Hq, l->Hkv, D, Dv))
        return 2;
    linear(output, attended, l->Hq * Dv, l->out, 0, 0, l->out_bias, turned, B, H, l->Hq * Dv);
    rms_norm(normed, total, output, stream ? sum : x, l->mlp_norm, l->mlp_eps, B, H);
    linear(gate_up, normed, H, l->gate_up, 0, 0, l->gate_up_bias, turned, B, 2 * I, H);
    swiglu(gated, gate_up, gate_up + I, 2 * I, B, I);
    linear(x, gated, I, l->down, 0, 0, l->down_bias, turned, B, H, I);
    return 0;
}
