// The linear layer for inputs that are rounded to 8 bits in groups of 32, over weights of 4 or 8 bits in the same groups
// (blocks.py). Integers meet integers, so that a product of few rows waits for memory and for little else.
//
// A row is rounded alone and its integer sums are exact; then a group adds to an output, each step rounded to fp32 and the
// groups in their order:
//
//   output += sum of products * (weights' scale * inputs' scale)
//   output += weights' minimum * (inputs' scale * sum of inputs)     4 bits only
//
// Nothing else rounds and nothing is fused. So an output's bits depend on its row and its weights alone, and are the same
// on every processor and in portable.py.
// A weight [outs, ins] is packed into panels [outs / P, ins / 32, one group of P outs], read from front to back.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <memory>
#include <utility>

#include "operations.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int V = 2;  // vectors that make a panel's width
constexpr int P = V * L;
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kWords = kGroup / 4;
constexpr int kLine = 64;  // of the cache, in bytes
constexpr int kMaxRows = kRegisters == 32 ? 6 : 2;  // their sums, in floats and in integers, fit the registers

typedef int32_t Unaligned __attribute__((vector_size(L * 4), aligned(4), may_alias));

#if defined(__AVX512VNNI__)
constexpr int kRaise = 128;  // the instruction takes weights without a sign
#else
constexpr int kRaise = 0;
#endif

// A group of a row's inputs: `scale` times signed bytes, four in a word.
struct Inputs {
  float scale;
  float sum;        // scale times the sum of the bytes
  int32_t unraise;  // what undoes the raising of weights
  int32_t words[kWords];
};

struct Product {
  const Inputs* x;        // [groups, rows]
  const uint8_t* panels;  // [panels, groups, bytes]
  const float* bias;      // or null
  float* out;             // [rows, outs]
  int64_t rows, groups, outs;
};

inline void store_lowest_bytes(int32_t* words, IntVec x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#else
  uint8_t bytes[L];
  for (int i = 0; i < L; ++i) bytes[i] = static_cast<uint8_t>(x[i] & 0xff);
  std::memcpy(words, bytes, sizeof bytes);
#endif
}

// The first `count` numbers of a group; the others are zeros. A NaN or an infinity makes the scale NaN.
Inputs rounded(const float* x, int64_t count) {
  Vec values[kGroup / L];
  IntVec largest{};  // floats without their signs are in the order of their bits, NaN last
  for (int i = 0; i < kGroup / L; ++i) {
    values[i] = load_some(x + i * L, count - i * L);
    const IntVec size = reinterpret_cast<IntVec>(values[i]) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  const float limit = std::bit_cast<float>(max_lanes(largest));
  Inputs group;
  group.scale = limit / 127 + (limit - limit);  // of an infinity NaN too
  const float inverse = group.scale >= std::numeric_limits<float>::min() ? 1 / group.scale : 0;  // less would overflow
  IntVec sums{};
  for (int i = 0; i < kGroup / L; ++i) {
    const IntVec bits = reinterpret_cast<IntVec>(values[i] * inverse + 12582912.0f);  // the integer is in the lowest ones
    sums += bits << 24 >> 24;
    store_lowest_bytes(group.words + i * L / 4, bits);
  }
  const int32_t sum = sum_lanes(sums);
  group.sum = group.scale * static_cast<float>(sum);
  group.unraise = -kRaise * sum;
  return group;
}

// sums + the products of each lane's four bytes with those of `x`. Bytes from 0 to 127; with `Signed`, all signed bytes,
// raised by kRaise.
template <bool Signed>
inline IntVec add_products(IntVec sums, IntVec bytes, int32_t x) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<IntVec>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(bytes), _mm512_set1_epi32(x)));
#elif defined(__AVX512BW__)
  __m512i weights = reinterpret_cast<__m512i>(bytes), inputs = _mm512_set1_epi32(x);
  if constexpr (Signed) {
    inputs = _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(weights), __m512i{}, inputs);
    weights = _mm512_abs_epi8(weights);
  }
  const __m512i pairs = _mm512_maddubs_epi16(weights, inputs);
  return sums + reinterpret_cast<IntVec>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i weights = reinterpret_cast<__m256i>(bytes), inputs = _mm256_set1_epi32(x);
  if constexpr (Signed) {
    inputs = _mm256_sign_epi8(inputs, weights);
    weights = _mm256_abs_epi8(weights);
  }
  const __m256i pairs = _mm256_maddubs_epi16(weights, inputs);
  return sums + reinterpret_cast<IntVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, reinterpret_cast<int8x16_t>(bytes), vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  for (int i = 24; i >= 0; i -= 8) sums += (bytes << i >> 24) * (static_cast<int32_t>(static_cast<uint32_t>(x) << i) >> 24);
  return sums;
#endif
}

// {scales [P] half, minima [P] half, words [4, P]}; a byte of the i-th word holds an input of the i-th four in its lower
// half and one of the (i + 4)-th in its upper half.
struct Int4 {
  static constexpr int64_t kBytes = P * (2 + 2 + kGroup / 2);
  static constexpr bool kSigned = false;
  const uint16_t* halves;

  explicit Int4(const uint8_t* bytes) : halves(reinterpret_cast<const uint16_t*>(bytes)) {}
  IntVec four(int w, int v) const {
    const int32_t* words = reinterpret_cast<const int32_t*>(halves + 2 * P);
    const IntVec word = *reinterpret_cast<const Unaligned*>(words + w % 4 * P + v * L);
    return (w < 4 ? word : word >> 4) & 0x0f0f0f0f;
  }
  Vec add(Vec sum, Vec found, const Inputs& x, int v) const {
    return sum + found * (widen(halves + v * L) * x.scale) + widen(halves + P + v * L) * x.sum;
  }
};

// {scales [P] half, signed bytes [8, P, 4]}
struct Int8 {
  static constexpr int64_t kBytes = P * (2 + kGroup);
  static constexpr bool kSigned = true;
  const uint16_t* halves;

  explicit Int8(const uint8_t* bytes) : halves(reinterpret_cast<const uint16_t*>(bytes)) {}
  IntVec four(int w, int v) const {
    const int32_t* words = reinterpret_cast<const int32_t*>(halves + P);
    const IntVec bytes = *reinterpret_cast<const Unaligned*>(words + w * P + v * L);
    return kRaise ? bytes ^ static_cast<int32_t>(0x80808080) : bytes;
  }
  Vec add(Vec sum, Vec found, const Inputs& x, int v) const { return sum + found * (widen(halves + v * L) * x.scale); }
};

// R rows, from `x` on, by one panel. Fetches what lies `ahead` meanwhile, `step` bytes with each group: while a second tile
// computes, nothing else would read memory.
template <int R, class Group>
void tile(const Product& p, const Inputs* x, const uint8_t* groups, const Vec* bias, float* out, int64_t lanes, const uint8_t* ahead,
          int64_t step) {
  Vec sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = bias[v];
  for (int64_t g = 0; g < p.groups; ++g, groups += Group::kBytes, x += p.rows, ahead += step) {
    const Group group(groups);
    for (int64_t i = 0; i < step; i += kLine) __builtin_prefetch(ahead + i, 0, 3);
    IntVec found[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) found[r][v] = IntVec{} + (Group::kSigned ? x[r].unraise : 0);
#pragma GCC unroll 8
    for (int w = 0; w < kWords; ++w)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const IntVec weights = group.four(w, v);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) found[r][v] = add_products<Group::kSigned>(found[r][v], weights, x[r].words[w]);
      }
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r][v] = group.add(sums[r][v], __builtin_convertvector(found[r][v], Vec), x[r], v);
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
  const int64_t first = index * P, lanes = std::min<int64_t>(P, p.outs - first), count = (p.rows + kMaxRows - 1) / kMaxRows;
  const uint8_t *panel = p.panels + index * p.groups * Group::kBytes, *next = panel + p.groups * Group::kBytes;
  const int64_t step = Group::kBytes / count;  // of the next panel, for each tile to fetch
  Vec bias[V] = {};
  if (p.bias)
    for (int v = 0; v < V; ++v) bias[v] = load_some(p.bias + first + v * L, lanes - v * L);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = p.rows * i / count, end = p.rows * (i + 1) / count;
    kTiles<Group>[end - row - 1](p, p.x + row, panel, bias, p.out + row * p.outs + first, lanes, next + p.groups * step * i, step);
  }
}

template <class Group>
void multiply(const Product& p) {
  const int64_t grain = 1 + 524288 / (1 + p.rows * p.groups * kGroup * P);  // tiny products stay on the caller's thread
  at::parallel_for(0, (p.outs + P - 1) / P, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply_panel<Group>(p, i);
  });
}

}  // namespace

extern "C" {

// x [rows, ins] by a packed weight [outs, ins]; `bits` is 4 or 8.
void verdraft_rounded_linear(int64_t bits, const float* x, int64_t x_stride, const uint8_t* panels, const float* bias, float* out,
                             int64_t rows, int64_t ins, int64_t outs) {
  if (!rows) return;
  const int64_t groups = (ins + kGroup - 1) / kGroup;
  const auto inputs = std::make_unique_for_overwrite<Inputs[]>(rows * groups);
  for_rows(rows, ins, [&](int64_t r) {
    for (int64_t g = 0; g < groups; ++g) inputs[g * rows + r] = rounded(x + r * x_stride + g * kGroup, ins - g * kGroup);
  });
  const Product p{inputs.get(), panels, bias, out, rows, groups, outs};
  bits == 4 ? multiply<Int4>(p) : multiply<Int8>(p);
}

}  // extern "C"
