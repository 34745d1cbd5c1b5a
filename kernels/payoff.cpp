// The payoff predictor's network, for the few drafts of one step: spec/predictor.py says what it computes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace {

struct Layer {
  const float *weight, *bias;  // [ins, outs], [outs]; outs is a multiple of every processor's vector
  int64_t ins, outs;
};

// `N` vectors of outputs at once: each sum waits for the one before.
template <int N>
int64_t columns(const Layer& layer, const float* x, int64_t from, float* out) {
  for (; from + N * L <= layer.outs; from += N * L) {
    Vec sums[N];
    for (int n = 0; n < N; ++n) sums[n] = load(layer.bias + from + n * L);
    for (int64_t i = 0; i < layer.ins; ++i)
      for (int n = 0; n < N; ++n) sums[n] = mul_add(fill(x[i]), load(layer.weight + i * layer.outs + from + n * L), sums[n]);
    for (int n = 0; n < N; ++n) store(out + from + n * L, sums[n]);
  }
  return from;
}

}  // namespace

extern "C" {

// Of `rows` rows of features: the mean accepted tokens, and the chances of 1 .. `lengths` of them. `unit`: tokens.
void verdraft_payoff(const Layer* layers, int64_t num_layers, const float* features, int64_t rows, int64_t lengths, double unit,
                     float* mean, float* survival) {
  std::vector<float> x, out;
  for (int64_t row = 0; row < rows; ++row, features += layers->ins, survival += lengths) {
    x.assign(features, features + layers->ins);
    for (int64_t i = 0; i < num_layers; ++i, x.swap(out)) {
      if (i > 0)
        for (float& value : x) value = std::max(value, 0.0f);
      out.resize(layers[i].outs);
      columns<1>(layers[i], x.data(), columns<8>(layers[i], x.data(), 0, out.data()), out.data());
    }
    mean[row] = std::max(0.0f, x[0] * static_cast<float>(unit));
    float chance = 1.0f;
    for (int64_t i = 0; i < lengths; ++i) survival[i] = chance *= 1.0f / (1.0f + std::exp(-x[i + 1]));
  }
}
}
