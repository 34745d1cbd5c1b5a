// Layers of Llama's form, one after the other in one call: the operations that the other files define, with the bits
// that they have when called one by one. A small model's step makes hundreds of them, and a call from Python costs more
// than some of them take.
#include <algorithm>

#include "operations.h"
#include "threads.h"

namespace {

constexpr int64_t kFieldsOfKV = 5;  // of a layer's pages, see attention.cpp

// A packed weight: panels of product.cpp, blocks of quantized.cpp, or both with equal bits.
struct Linear {
  int64_t bits;           // of the blocks
  const uint8_t* blocks;  // or null
  const float* panels;    // or null
  const float* bias;      // or null
  int64_t ins, outs;

  // Up to `few` rows read the blocks where there is a choice.
  void operator()(const float* x, float* out, int64_t rows, int64_t few) const {
    if (blocks && (!panels || rows <= few))
      verdraft_block_linear(bits, x, ins, blocks, bias, out, rows, ins, outs);
    else
      verdraft_linear(x, ins, panels, bias, out, rows, ins, outs);
  }
};

struct Layer {  // as fused.py lays it out
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // those of the heads may be null
  Linear qkv, output, up, down;
};
static_assert(sizeof(Layer) == 28 * sizeof(int64_t));

void add(float* x, const float* y, int64_t rows, int64_t width) {
  for_rows(rows, width, [&](int64_t r) {
    for (int64_t i = r * width; i < (r + 1) * width; ++i) x[i] += y[i];
  });
}

}  // namespace

extern "C" {

// hidden [tokens, width] passes through `count` layers, in place. `kv` are their pages; cu_q to slots are base.py's Batch;
// cos and sin [tokens, dim / 2]; kept[i], if it and `kept` are not null, gets what enters the i-th layer. scratch holds tokens * (2 * width + qkv outs + heads * dim + 1.5 * up outs) floats.
void verdraft_layers(const Layer* layers, int64_t count, const int64_t* kv, int64_t heads, float* hidden, float* scratch,
                     const int32_t* cu_q, const int32_t* seq_lens, const int32_t* parents, const int32_t* pages, int64_t pages_stride,
                     int64_t sequences, const int64_t* slots, const float* cos, const float* sin, int64_t tokens, float eps, float scale,
                     int64_t few, float* const* kept) {
  for (const Layer* layer = layers; layer < layers + count; ++layer, kv += kFieldsOfKV) {
    const int64_t width = layer->qkv.ins, kv_heads = kv[3], dim = kv[4], inner = layer->down.ins, row = layer->qkv.outs;
    float *normed = scratch, *middle = normed + tokens * width, *qkv = middle + tokens * width;
    float *attended = qkv + tokens * row, *gate_up = attended + tokens * heads * dim, *gated = gate_up + tokens * 2 * inner;
    float *k = qkv + heads * dim, *v = k + kv_heads * dim;

    if (kept && kept[layer - layers]) std::copy_n(hidden, tokens * width, kept[layer - layers]);
    verdraft_rms_norm(hidden, width, layer->attention_norm, normed, tokens, width, eps);
    layer->qkv(normed, qkv, tokens, few);
    for (int64_t t = 0; t < tokens && layer->q_norm; ++t) {
      verdraft_rms_norm(qkv + t * row, dim, layer->q_norm, qkv + t * row, heads, dim, eps);
      verdraft_rms_norm(k + t * row, dim, layer->k_norm, k + t * row, kv_heads, dim, eps);
    }
    verdraft_rope(qkv, row, heads, k, row, kv_heads, cos, sin, dim / 2, tokens);
    verdraft_write(k, row, v, row, kv, slots, tokens);
    verdraft_attend(qkv, row, attended, heads, kv, cu_q, seq_lens, parents, pages, pages_stride, sequences, scale);
    layer->output(attended, middle, tokens, few);
    add(middle, hidden, tokens, width);

    verdraft_rms_norm(middle, width, layer->mlp_norm, normed, tokens, width, eps);
    layer->up(normed, gate_up, tokens, few);
    verdraft_silu_mul(gate_up, 2 * inner, gated, tokens, inner);
    layer->down(gated, hidden, tokens, few);
    add(hidden, middle, tokens, width);
  }
}

}  // extern "C"
