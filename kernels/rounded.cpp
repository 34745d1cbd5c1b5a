// The linear layer of drafters, which may be wrong: 8-bit weights by inputs that are rounded to 8 bits in the same groups
// of 32. Integers meet integers, so that a product waits for memory and for little else.
//
// A row is rounded alone, its integer sums are exact, and the groups are added in their order: an output's bits depend on
// its row and its weights alone.
// A weight [outs, ins] is packed into panels [outs / P, ins / 32, one group of P outs], read from front to back.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "operations.h"
#include "vectors.h"

namespace {

constexpr int V = 2;  // vectors that make a panel's width
constexpr int P = V * L;
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kWords = kGroup / 4;
constexpr int64_t kBytes = P * (2 + kGroup);        // of a panel's group: {scales [P] half, signed bytes [8, P, 4]}
constexpr int kMaxRows = kRegisters == 32 ? 6 : 2;  // their sums, in floats and in integers, fit the registers

#if defined(__AVX512VNNI__)
constexpr int kOffset = -128;  // undoes what raised weights add to a sum
#else
constexpr int kOffset = 0;
#endif

// A group of a row's inputs: `scale` times signed bytes, four in a word.
struct Inputs {
  float scale;
  int32_t before;  // what add_products starts from
  int32_t words[kWords];
};

struct Product {
  const Inputs* x;        // [rows, groups]
  const uint8_t* panels;  // [panels, groups, kBytes]
  const float* bias;      // or null
  float* out;             // [rows, outs]
  int64_t rows, groups, outs;
};

Inputs rounded(const float* x, int64_t count) {
  Vec values[kGroup / L], largest{};
  for (int i = 0; i < kGroup / L; ++i) {
    values[i] = load_some(x + i * L, count - i * L);
    const Vec size = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(values[i]) & 0x7fffffff);
    largest = size > largest ? size : largest;
  }
  Inputs group;
  group.scale = max_lanes(largest) / 127;
  const float inverse = group.scale > 0 ? 1 / group.scale : 0;
  int32_t bits[kGroup], sum = 0;
  for (int i = 0; i < kGroup / L; ++i) {
    const Vec integers = mul_add(values[i], fill(inverse), fill(12582912.0f));  // the integer is in the lowest bits
    std::memcpy(bits + i * L, &integers, sizeof integers);
  }
  int8_t bytes[kGroup];
  for (int i = 0; i < kGroup; ++i) sum += bytes[i] = static_cast<int8_t>(bits[i] & 0xff);
  group.before = kOffset * sum;
  std::memcpy(group.words, bytes, sizeof bytes);
  return group;
}

// sums + the products of each lane's four signed bytes with those of `x`.
inline IntVec add_products(IntVec sums, IntVec bytes, int32_t x) {
#if defined(__AVX512VNNI__)
  const __m512i raised = reinterpret_cast<__m512i>(bytes ^ static_cast<int32_t>(0x80808080));  // by 128: takes no signed ones
  return reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), raised, _mm512_set1_epi32(x)));
#elif defined(__AVX512BW__)
  const __m512i weights = reinterpret_cast<__m512i>(bytes), same = _mm512_set1_epi32(x);
  const __m512i signs = _mm512_mask_sub_epi8(same, _mm512_movepi8_mask(weights), __m512i{}, same);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(weights), signs);
  return sums + reinterpret_cast<IntVec>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i weights = reinterpret_cast<__m256i>(bytes), signs = _mm256_sign_epi8(_mm256_set1_epi32(x), weights);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), signs);
  return sums + reinterpret_cast<IntVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, reinterpret_cast<int8x16_t>(bytes), vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  for (int i = 24; i >= 0; i -= 8) sums += (bytes << i >> 24) * (static_cast<int32_t>(static_cast<uint32_t>(x) << i) >> 24);
  return sums;
#endif
}

// R rows, from `x` on, by one panel.
template <int R>
void tile(const Product& p, const Inputs* x, const uint8_t* group, const Vec* bias, float* out, int64_t lanes) {
  typedef int32_t Unaligned __attribute__((vector_size(L * 4), aligned(4), may_alias));
  Vec sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = bias[v];
  for (int64_t g = 0; g < p.groups; ++g, group += kBytes, ++x) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(group);
    const uint8_t* bytes = group + 2 * P;
    IntVec found[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) found[r][v] = IntVec{} + x[r * p.groups].before;
#pragma GCC unroll 8
    for (int w = 0; w < kWords; ++w)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const IntVec weights = *reinterpret_cast<const Unaligned*>(bytes + (w * P + v * L) * 4);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) found[r][v] = add_products(found[r][v], weights, x[r * p.groups].words[w]);
      }
    for (int v = 0; v < V; ++v) {
      const Vec scale = widen(scales + v * L);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        sums[r][v] = mul_add(__builtin_convertvector(found[r][v], Vec), scale * fill(x[r * p.groups].scale), sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store_some(out + r * p.outs + v * L, sums[r][v], lanes - v * L);
}

template <size_t... R>
constexpr auto tiles(std::index_sequence<R...>) {
  return std::array{&tile<R + 1>...};
}
constexpr auto kTiles = tiles(std::make_index_sequence<kMaxRows>{});

// All rows by panel `index`, in tiles of much the same height.
void multiply_panel(const Product& p, int64_t index) {
  const int64_t first = index * P, lanes = std::min<int64_t>(P, p.outs - first), count = (p.rows + kMaxRows - 1) / kMaxRows;
  Vec bias[V] = {};
  if (p.bias)
    for (int v = 0; v < V; ++v) bias[v] = load_some(p.bias + first + v * L, lanes - v * L);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = p.rows * i / count, end = p.rows * (i + 1) / count;
    kTiles[end - row - 1](p, p.x + row * p.groups, p.panels + index * p.groups * kBytes, bias, p.out + row * p.outs + first, lanes);
  }
}

}  // namespace

extern "C" {

// x [rows, ins] by a packed weight [outs, ins].
void verdraft_rounded_linear(const float* x, int64_t x_stride, const uint8_t* panels, const float* bias, float* out, int64_t rows,
                             int64_t ins, int64_t outs) {
  if (!rows) return;
  const int64_t groups = (ins + kGroup - 1) / kGroup;
  std::vector<Inputs> inputs(rows * groups);
  for (int64_t i = 0; i < rows * groups; ++i) {
    const int64_t row = i / groups, first = i % groups * kGroup;
    inputs[i] = rounded(x + row * x_stride + first, ins - first);
  }
  const Product p{inputs.data(), panels, bias, out, rows, groups, outs};
  const int64_t grain = 1 + 524288 / (1 + rows * ins * P);  // tiny products stay on the caller's thread
  at::parallel_for(0, (outs + P - 1) / P, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply_panel(p, i);
  });
}

}  // extern "C"
