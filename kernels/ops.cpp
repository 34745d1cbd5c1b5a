// The CPU backend's operations on single rows, fp32, called through ctypes on raw pointers.
//
// Every row is computed by the same instructions in the same order whatever rows stand beside it.
#include <cmath>
#include <cstring>

#include "operations.h"
#include "threads.h"
#include "vectors.h"

namespace {

// Sum of f over a row: four accumulators of L lanes, folded in a fixed order.
template <typename F>
inline float reduce(int64_t n, const F& f) {
  Vec sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L)
    for (int a = 0; a < 4; ++a) sum[a] += f(i + a * L);
  for (; i < n; i += L) sum[0] += f(i);
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

__attribute__((noinline)) void rms_row(const float* x, const float* weight, float* out, int64_t n, float eps) {
  const float square = reduce(n, [&](int64_t i) { const Vec a = load_some(x + i, n - i); return a * a; });
  const float inverse = 1.0f / std::sqrt(square / n + eps);
  for (int64_t i = 0; i < n; i += L)
    store_some(out + i, load_some(x + i, n - i) * inverse * load_some(weight + i, n - i), n - i);
}

__attribute__((noinline)) void layer_row(const float* x, const float* weight, const float* bias, float* out, int64_t n, float eps) {
  const float mean = reduce(n, [&](int64_t i) { return load_some(x + i, n - i); }) / n;
  const float square = reduce(n, [&](int64_t i) {
    Vec a = load_some(x + i, n - i) - mean;
    if (n - i < L) a = first_lanes(n - i) ? a : Vec{};
    return a * a;
  });
  const float inverse = 1.0f / std::sqrt(square / n + eps);
  for (int64_t i = 0; i < n; i += L) {
    const Vec a = (load_some(x + i, n - i) - mean) * inverse;
    store_some(out + i, a * load_some(weight + i, n - i) + load_some(bias + i, n - i), n - i);
  }
}

__attribute__((noinline)) void silu_row(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += L) {
    const Vec a = load_some(gate + i, n - i);
    store_some(out + i, a / (1.0f + exp2(a * -1.44269504f)) * load_some(up + i, n - i), n - i);
  }
}

__attribute__((noinline)) void rope_head(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += L) {
    const int64_t n = half - i;
    const Vec a = load_some(x + i, n), b = load_some(x + half + i, n);
    const Vec c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(x + i, a * c - b * s, n);
    store_some(x + half + i, b * c + a * s, n);
  }
}

}  // namespace

extern "C" {

void verdraft_rope(float* q, int64_t q_stride, int64_t heads, float* k, int64_t k_stride, int64_t kv_heads, const float* cos,
                   const float* sin, int64_t half, int64_t tokens) {
  for_rows(tokens, (heads + kv_heads) * half * 4, [&](int64_t t) {
    for (int64_t h = 0; h < heads; ++h) rope_head(q + t * q_stride + h * 2 * half, cos + t * half, sin + t * half, half);
    for (int64_t h = 0; h < kv_heads; ++h) rope_head(k + t * k_stride + h * 2 * half, cos + t * half, sin + t * half, half);
  });
}

void verdraft_rms_norm(const float* x, int64_t stride, const float* weight, float* out, int64_t rows, int64_t n, float eps) {
  for_rows(rows, n * 2, [&](int64_t r) { rms_row(x + r * stride, weight, out + r * n, n, eps); });
}

void verdraft_layer_norm(const float* x, int64_t stride, const float* weight, const float* bias, float* out, int64_t rows, int64_t n,
                         float eps) {
  for_rows(rows, n * 3, [&](int64_t r) { layer_row(x + r * stride, weight, bias, out + r * n, n, eps); });
}

void verdraft_silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t n) {
  for_rows(rows, n * 4, [&](int64_t r) { silu_row(gate_up + r * stride, gate_up + r * stride + n, out + r * n, n); });
}

}  // extern "C"
