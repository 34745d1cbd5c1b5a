// The operations that whole layers are made of; each is described where it is defined.
#pragma once

#include <cstdint>

extern "C" {
void verdraft_linear(const float* x, int64_t x_stride, const float* panels, const float* bias, float* out, int64_t rows, int64_t ins,
                     int64_t outs);
void verdraft_block_linear(int64_t bits, const float* x, int64_t x_stride, const uint8_t* panels, const float* bias, float* out,
                           int64_t rows, int64_t ins, int64_t outs);
void verdraft_rounded_linear(int64_t bits, const float* x, int64_t x_stride, const uint8_t* panels, const float* bias, float* out,
                             int64_t rows, int64_t ins, int64_t outs);
void verdraft_rms_norm(const float* x, int64_t stride, const float* weight, float* out, int64_t rows, int64_t n, float eps);
void verdraft_rope(float* q, int64_t q_stride, int64_t heads, float* k, int64_t k_stride, int64_t kv_heads, const float* cos,
                   const float* sin, int64_t half, int64_t tokens);
void verdraft_write(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* layer, const int64_t* slots,
                    int64_t tokens);
void verdraft_attend(const float* q, int64_t q_stride, float* out, int64_t heads, const int64_t* layer, const int32_t* cu_q,
                     const int32_t* seq_lens, const int32_t* parents, const int32_t* pages, int64_t pages_stride, int64_t sequences,
                     float scale);
void verdraft_silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t n);
}
