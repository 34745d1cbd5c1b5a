// Layers of Llama's form, one after the other in one call: the operations that the other files define, with the bits
// that they have when called one by one. A small model's step makes hundreds of them, and a call from Python costs more
// than some of them take.
#include <algorithm>

#include "operations.h"
#include "threads.h"

namespace {

constexpr int64_t kFieldsOfKV = 5;  // of a layer's pages, see attention.cpp

// A packed weight: panels of product.cpp, blocks of quantized.cpp, both with equal bits, or blocks of rounded.cpp.
struct Linear {
  int64_t rounds;         // 1: the blocks are for rounded.cpp
  int64_t bits;           // of the blocks
  const uint8_t* blocks;  // or null
  const float* panels;    // or null
  const float* bias;      // or null
  int64_t ins, outs;

  // Up to `few` rows read the blocks where there is a choice.
  void operator()(const float* x, float* out, int64_t rows, int64_t few) const {
    if (rounds)
      verdraft_rounded_linear(bits, x, ins, blocks, bias, out, rows, ins, outs);
    else if (blocks && (!panels || rows <= few))
      verdraft_block_linear(bits, x, ins, blocks, bias, out, rows, ins, outs);
    else
      verdraft_linear(x, ins, panels, bias, out, rows, ins, outs);
  }
};

struct Layer {  // as fused.py lays it out
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // those of the heads may be null
  Linear qkv, output, up, down;
};
static_assert(sizeof(Layer) == 32 * sizeof(int64_t));

void add(float* x, const float* y, int64_t rows, int64_t width) {
  for_rows(rows, width, [&](int64_t r) {
    for (int64_t i = r * width; i < (r + 1) * width; ++i) x[i] += y[i];
  });
}

// An EAGLE head's layer: its attention reads [embedding | feature], each behind a norm.
struct Drafter {
  Layer layer;                               // attention_norm is the feature's
  const float* embedding;                    // [vocab, width]
  const float *embedding_norm, *final_norm;  // the latter may be null
  int64_t adds_to_normed;                    // the layer adds to the normed feature
};

// What all layers of a pass share; cu_q to slots are base.py's Batch, cos and sin [tokens, dim / 2].
struct Pass {
  int64_t heads;
  const int32_t *cu_q, *seq_lens, *parents, *pages;
  int64_t pages_stride, sequences;
  const int64_t* slots;
  const float *cos, *sin;
  int64_t tokens;
  float eps, scale;
  int64_t few;
};

// A layer whose attention reads `normed` [tokens, qkv ins]: out = residual + what it adds [tokens, width]; out may be
// residual. scratch holds tokens * (2 * width + qkv outs + heads * dim + 1.5 * up outs) floats.
void run(const Layer& layer, const int64_t* kv, const Pass& pass, const float* normed, const float* residual, float* out, float* scratch) {
  const int64_t tokens = pass.tokens, width = layer.output.outs, heads = pass.heads, kv_heads = kv[3], dim = kv[4];
  const int64_t inner = layer.down.ins, row = layer.qkv.outs;
  float *middle = scratch, *again = middle + tokens * width, *qkv = again + tokens * width;
  float *attended = qkv + tokens * row, *gate_up = attended + tokens * heads * dim, *gated = gate_up + tokens * 2 * inner;
  float *k = qkv + heads * dim, *v = k + kv_heads * dim;

  layer.qkv(normed, qkv, tokens, pass.few);
  for (int64_t t = 0; t < tokens && layer.q_norm; ++t) {
    verdraft_rms_norm(qkv + t * row, dim, layer.q_norm, qkv + t * row, heads, dim, pass.eps);
    verdraft_rms_norm(k + t * row, dim, layer.k_norm, k + t * row, kv_heads, dim, pass.eps);
  }
  verdraft_rope(qkv, row, heads, k, row, kv_heads, pass.cos, pass.sin, dim / 2, tokens);
  verdraft_write(k, row, v, row, kv, pass.slots, tokens);
  verdraft_attend(qkv, row, attended, heads, kv, pass.cu_q, pass.seq_lens, pass.parents, pass.pages, pass.pages_stride, pass.sequences,
                  pass.scale);
  layer.output(attended, middle, tokens, pass.few);
  add(middle, residual, tokens, width);

  verdraft_rms_norm(middle, width, layer.mlp_norm, again, tokens, width, pass.eps);
  layer.up(again, gate_up, tokens, pass.few);
  verdraft_silu_mul(gate_up, 2 * inner, gated, tokens, inner);
  layer.down(gated, out, tokens, pass.few);
  add(out, middle, tokens, width);
}

}  // namespace

extern "C" {

// hidden [tokens, width] passes through `count` layers, in place. `kv` are their pages; kept[i], if it and `kept` are not
// null, gets what enters the i-th layer. scratch holds tokens * (3 * width + qkv outs + heads * dim + 1.5 * up outs) floats.
void verdraft_layers(const Layer* layers, int64_t count, const int64_t* kv, float* hidden, float* scratch, float* const* kept,
                     const Pass* pass) {
  for (const Layer* layer = layers; layer < layers + count; ++layer, kv += kFieldsOfKV) {
    const int64_t tokens = pass->tokens, width = layer->qkv.ins;
    if (kept && kept[layer - layers]) std::copy_n(hidden, tokens * width, kept[layer - layers]);
    verdraft_rms_norm(hidden, width, layer->attention_norm, scratch, tokens, width, pass->eps);
    run(*layer, kv, *pass, scratch, hidden, hidden, scratch + tokens * width);
  }
}

// One row of an EAGLE head (model/eagle.py) for each feature [tokens, width] and the id behind it: out [tokens, width].
// scratch holds tokens * (5 * width + qkv outs + heads * dim + 1.5 * up outs) floats.
void verdraft_drafter(const Drafter* drafter, const int64_t* kv, const float* features, const int64_t* ids, float* out, float* scratch,
                      const Pass* pass) {
  const Layer& layer = drafter->layer;
  const int64_t tokens = pass->tokens, width = layer.output.outs;
  float *normed = scratch, *inputs = normed + tokens * width, *rest = inputs + tokens * 2 * width;
  verdraft_rms_norm(features, width, layer.attention_norm, normed, tokens, width, pass->eps);
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = inputs + t * 2 * width;
    verdraft_rms_norm(drafter->embedding + ids[t] * width, width, drafter->embedding_norm, row, 1, width, pass->eps);
    std::copy_n(normed + t * width, width, row + width);
  }
  run(layer, kv, *pass, inputs, drafter->adds_to_normed ? normed : features, out, rest);
  if (drafter->final_norm) verdraft_rms_norm(out, width, drafter->final_norm, out, tokens, width, pass->eps);
}

}  // extern "C"
