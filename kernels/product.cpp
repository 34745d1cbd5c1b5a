// The CPU backend's linear layer: fp32 rows times a packed weight.
//
// An output is one chain of multiply-adds over the inputs, from its bias on, in their order. So its bits depend on
// its row and its weights alone: not on the rows beside it, tile sizes, threads, nor on the vectors' width (only on
// whether the processor fuses multiply-adds).
// A weight [outs, ins] is packed into panels [outs / P, ins, P], read from front to back; missing outs are zeros.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <utility>

#include "operations.h"
#include "vectors.h"

namespace {

constexpr int V = 2;  // vectors that make a panel's width
constexpr int P = V * L;
constexpr int kMaxRows = kRegisters == 32 ? 12 : 6;  // their sums, the panel's vectors and a row's number fit the registers
// Numbers of rows that gain from fetching the next panel early: fewer do nothing but read, which the processor
// foresees by itself; more compute for so long that a panel's first reading no longer counts.
constexpr int kFetchFrom = 7, kFetchTo = 24;
constexpr int kLine = 64 / sizeof(float);  // of the cache, in floats

struct Product {
  const float* x;
  int64_t x_stride;
  const float* panels;
  const float* bias;  // or null
  float* out;         // [rows, outs]
  int64_t rows, ins, outs;
};

// R rows by one panel. May fetch what lies `ahead` meanwhile, `step` floats with each input.
template <int R, bool Fetch>
void tile(const Product& p, const float* x, const float* panel, const Vec* bias, float* out, int64_t lanes, const float* ahead,
          int64_t step) {
  Vec sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = bias[v];
  const int64_t stride = p.x_stride;
  for (int64_t k = 0; k < p.ins; ++k, panel += P, ahead += step) {
    if constexpr (Fetch)
      for (int i = 0; i < P; i += kLine) __builtin_prefetch(ahead + i, 0, 2);
    Vec weights[V];
    for (int v = 0; v < V; ++v) weights[v] = load(panel + v * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = mul_add(fill(x[r * stride + k]), weights[v], sums[r][v]);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store_some(out + r * p.outs + v * L, sums[r][v], lanes - v * L);
}

template <bool Fetch, size_t... R>
constexpr auto tiles(std::index_sequence<R...>) {
  return std::array{&tile<R + 1, Fetch>...};
}
constexpr auto kTiles = tiles<false>(std::make_index_sequence<kMaxRows>{});
constexpr auto kFetchingTiles = tiles<true>(std::make_index_sequence<kMaxRows>{});

// All rows by panel `index`, in blocks of much the same height; each block fetches its share of the next panel.
void multiply_panel(const Product& p, int64_t index) {
  const int64_t first = index * P, lanes = std::min<int64_t>(P, p.outs - first);
  const int64_t blocks = (p.rows + kMaxRows - 1) / kMaxRows;
  const float *panel = p.panels + index * p.ins * P, *next = panel + p.ins * P;
  Vec bias[V] = {};
  if (p.bias)
    for (int v = 0; v < V; ++v) bias[v] = load_some(p.bias + first + v * L, lanes - v * L);
  const auto& tiles_of = p.rows >= kFetchFrom && p.rows <= kFetchTo ? kFetchingTiles : kTiles;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = p.rows * block / blocks, end = p.rows * (block + 1) / blocks;
    tiles_of[end - row - 1](p, p.x + row * p.x_stride, panel, bias, p.out + row * p.outs + first, lanes,
                            next + p.ins * P * block / blocks, P / blocks);
  }
}

}  // namespace

extern "C" {

int64_t verdraft_panel_width() { return P; }

void verdraft_linear(const float* x, int64_t x_stride, const float* panels, const float* bias, float* out, int64_t rows, int64_t ins,
                     int64_t outs) {
  if (!rows) return;
  const Product p{x, x_stride, panels, bias, out, rows, ins, outs};
  const int64_t grain = 1 + 65536 / (1 + rows * ins * P);  // tiny products stay on the caller's thread
  at::parallel_for(0, (outs + P - 1) / P, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply_panel(p, i);
  });
}

}  // extern "C"
