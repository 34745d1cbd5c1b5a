// The CPU backend's linear layer over weights of 4 or 8 bits in groups of 32 inputs, the blocks of GGUF's Q4_1 and Q8_0.
//
// A weight is expanded to fp32 in registers and exactly: a half times a small integer fits a float, so `scale * q + minimum`
// rounds once, however it is computed. An output then is the same chain of multiply-adds as in product.cpp: from its bias
// on, over the inputs in their order. So its bits depend on its row and its weights alone, and are those that product.cpp
// finds for the expanded weights.
// A weight [outs, ins] is packed into panels [outs / P, ins / 32, one group of P outs], read from front to back.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <utility>

#include "operations.h"
#include "vectors.h"

namespace {

constexpr int V = 2;  // vectors that make a panel's width
constexpr int P = V * L;
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kMaxRows = kRegisters == 32 ? 12 : 4;  // their sums and the panel's vectors fit the registers

// The compiler's own conversions from narrower vectors go element by element.
inline Vec widen(const int8_t* bytes) {
#ifdef __AVX512F__
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
  Vec values;
  for (int i = 0; i < L; ++i) values[i] = bytes[i];
  return values;
#endif
}

inline Vec lowest_nibbles(IntVec words) {  // as floats
#ifdef __AVX512F__
  const Vec values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words), values);  // looks at no other bits
#else
  return __builtin_convertvector(words & 15, Vec);
#endif
}

// {scales [P] half, minima [P] half, words [4, P]}; a word holds eight inputs, the first in its lowest bits.
struct Int4 {
  static constexpr int64_t kBytes = P * (2 + 2 + kGroup / 2);
  Vec scale[V], minimum[V];
  const int32_t* words;

  explicit Int4(const uint8_t* bytes) : words(reinterpret_cast<const int32_t*>(bytes + 4 * P)) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(bytes);
    for (int v = 0; v < V; ++v) scale[v] = widen(halves + v * L), minimum[v] = widen(halves + P + v * L);
  }
  Vec weight(int64_t k, int v) const {
    typedef int32_t Unaligned __attribute__((vector_size(L * 4), aligned(4), may_alias));
    const IntVec word = *reinterpret_cast<const Unaligned*>(words + k / 8 * P + v * L);
    return mul_add(lowest_nibbles(word >> static_cast<int32_t>(k % 8 * 4)), scale[v], minimum[v]);
  }
};

// {scales [P] half, signed bytes [32, P]}
struct Int8 {
  static constexpr int64_t kBytes = P * (2 + kGroup);
  Vec scale[V];
  const int8_t* bytes;

  explicit Int8(const uint8_t* group) : bytes(reinterpret_cast<const int8_t*>(group + 2 * P)) {
    for (int v = 0; v < V; ++v) scale[v] = widen(reinterpret_cast<const uint16_t*>(group) + v * L);
  }
  Vec weight(int64_t k, int v) const {
    return widen(bytes + k * P + v * L) * scale[v];
  }
};

struct Product {
  const float* x;
  int64_t x_stride;
  const uint8_t* panels;
  const float* bias;  // or null
  float* out;         // [rows, outs]
  int64_t rows, ins, outs;
};

// R rows by one panel.
template <int R, class Group>
void tile(const Product& p, const float* x, const uint8_t* groups, const Vec* bias, float* out, int64_t lanes) {
  Vec sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = bias[v];
  const int64_t stride = p.x_stride;
  const auto add = [&](const Group& group, int64_t k) __attribute__((always_inline)) {
    Vec weights[V];
    for (int v = 0; v < V; ++v) weights[v] = group.weight(k, v);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = mul_add(fill(x[r * stride + k]), weights[v], sums[r][v]);
  };
  int64_t left = p.ins;
  for (; left >= kGroup; left -= kGroup, groups += Group::kBytes, x += kGroup) {
    const Group group(groups);
    for (int64_t k = 0; k < kGroup; k += 8)
#pragma GCC unroll 8
      for (int64_t i = 0; i < 8; ++i) add(group, k + i);
  }
  if (left) {
    const Group group(groups);
    for (int64_t k = 0; k < left; ++k) add(group, k);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store_some(out + r * p.outs + v * L, sums[r][v], lanes - v * L);
}

template <class Group, size_t... R>
constexpr auto tiles(std::index_sequence<R...>) {
  return std::array{&tile<R + 1, Group>...};
}
template <class Group>
constexpr auto kTiles = tiles<Group>(std::make_index_sequence<kMaxRows>{});

// All rows by panel `index`, in tiles of much the same height.
template <class Group>
void multiply_panel(const Product& p, int64_t index) {
  const int64_t first = index * P, lanes = std::min<int64_t>(P, p.outs - first);
  const int64_t count = (p.rows + kMaxRows - 1) / kMaxRows, groups = (p.ins + kGroup - 1) / kGroup;
  Vec bias[V] = {};
  if (p.bias)
    for (int v = 0; v < V; ++v) bias[v] = load_some(p.bias + first + v * L, lanes - v * L);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = p.rows * i / count, end = p.rows * (i + 1) / count;
    kTiles<Group>[end - row - 1](p, p.x + row * p.x_stride, p.panels + index * groups * Group::kBytes, bias, p.out + row * p.outs + first,
                                 lanes);
  }
}

template <class Group>
void multiply(const Product& p) {
  const int64_t grain = 1 + 65536 / (1 + p.rows * p.ins * P);  // tiny products stay on the caller's thread
  at::parallel_for(0, (p.outs + P - 1) / P, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply_panel<Group>(p, i);
  });
}

}  // namespace

extern "C" {

// `bits` is 4 or 8.
void verdraft_block_linear(int64_t bits, const float* x, int64_t x_stride, const uint8_t* panels, const float* bias, float* out,
                           int64_t rows, int64_t ins, int64_t outs) {
  if (!rows) return;
  const Product p{x, x_stride, panels, bias, out, rows, ins, outs};
  bits == 4 ? multiply<Int4>(p) : multiply<Int8>(p);
}

}  // extern "C"
