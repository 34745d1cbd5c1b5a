// The CPU backend's operations on single rows, fp32, and the noise words, called through ctypes on raw pointers.
//
// Every row is computed by the same instructions in the same order whatever rows stand beside it.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "operations.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int kWide = L / 2;    // lanes of a WideVec
constexpr int kChains = 3;      // of Philox, side by side: each round waits for the one before

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

// Only the lower half of a lane is a word of Philox; what gathers in the upper one is never read.
inline void philox_step(uint64_t seed, uint64_t choice, uint64_t position, const uint32_t* blocks, uint64_t (*words)[2]) {
  WideVec c0[kChains], c1[kChains], c2[kChains], c3[kChains] = {};
  for (int i = 0; i < kChains; ++i) {
    for (int lane = 0; lane < kWide; ++lane) c0[i][lane] = blocks[i * kWide + lane];
    c1[i] = WideVec{} + position, c2[i] = WideVec{} + choice;
  }
  uint32_t k0 = seed, k1 = seed >> 32;
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
#pragma GCC unroll 8
    for (int i = 0; i < kChains; ++i) {
      const WideVec a = multiply_halves(c0[i], WideVec{} + 0xD2511F53), b = multiply_halves(c2[i], WideVec{} + 0xCD9E8D57);
      c0[i] = b >> 32 ^ c1[i] ^ k0;
      c1[i] = b;
      c2[i] = a >> 32 ^ c3[i] ^ k1;
      c3[i] = a;
    }
  for (int i = 0; i < kChains; ++i) {
    const WideVec low = (c0[i] & 0xFFFFFFFF) | c1[i] << 32, high = (c2[i] & 0xFFFFFFFF) | c3[i] << 32;
    for (int lane = 0; lane < kWide; ++lane) words[i * kWide + lane][0] = low[lane], words[i * kWide + lane][1] = high[lane];
  }
}

// Which of L tokens may have a score + noise of `least`, by a quick bound from above. Noise is -log(-log(u)) and at most
// -log(1 - u); 1 - u is a word's distance from the last one, and a float's bits are a lower bound of its logarithm.
inline IntVec may_reach(Vec scores, const uint32_t* words, float least) {
  IntVec half;
  for (int i = 0; i < L; ++i) half[i] = ~words[i] >> 1;
  const Vec distance = __builtin_convertvector(half, Vec) * 2.0f + 0.5f;
  const Vec log2 = __builtin_convertvector(reinterpret_cast<IntVec>(distance), Vec) * 0x1p-23f - 127.0f;
  return scores + (32.0f - log2) * 0.693147182f >= least - 1e-3f;
}

inline bool any(IntVec mask) {
  int64_t parts[L / 2], all = 0;
  std::memcpy(parts, &mask, sizeof parts);
  for (int64_t part : parts) all |= part;
  return all;
}

// The tokens of a row whose score + noise is the largest, or so near that rounding may decide.
struct Contenders {
  static constexpr double kNear = 1e-9;
  const float* row;
  float highest;
  double temperature, best = -std::numeric_limits<double>::infinity();
  std::vector<std::pair<int64_t, double>> found;

  void meet(int64_t token, uint32_t word) {
    const double noise = -std::log(-std::log((word + 0.5) * 0x1p-32));
    const double value = (static_cast<double>(row[token]) - highest) / temperature + noise;
    if (value < best - kNear) return;
    found.emplace_back(token, value);
    best = std::max(best, value);
  }

  void meet_all(int64_t token, int64_t count, const uint32_t* words) {
    const float scale = std::min(1 / temperature, 1e30);
    const Vec scores = (load_some(row + token, count) - highest) * scale;
    const IntVec able = may_reach(scores, words, best);
    if (!any(able)) return;
    for (int64_t i = 0; i < std::min<int64_t>(count, L); ++i)
      if (able[i]) meet(token + i, words[i]);
  }
};

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

// Philox4x32-10 of counters (block, position, choice, 0): noise.py's words, four to a block.
void verdraft_philox(int64_t seed, int64_t choice, int64_t position, const uint32_t* blocks, uint32_t* out, int64_t n) {
  constexpr int64_t kStep = kChains * kWide;
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t count = std::min(kStep, n - i);
    uint32_t some[kStep] = {};
    std::memcpy(some, blocks + i, count * sizeof(uint32_t));
    uint64_t words[kStep][2];
    philox_step(seed, choice, position, some, words);
    std::memcpy(out + 4 * i, words, count * sizeof(words[0]));
  }
}

// Writes the tokens, ascending, of which one has the largest (row - highest) / temperature + noise, to `out`; there are
// hardly ever two. Returns how many they are, or -1 if there are more than `room`. `highest` is the row's largest, finite.
int64_t verdraft_contenders(int64_t seed, int64_t choice, int64_t position, const float* row, int64_t n, float highest,
                            double temperature, int64_t* out, int64_t room) {
  constexpr int64_t kStep = kChains * kWide;
  Contenders contenders{row, highest, temperature};
  for (int64_t first = 0; first < n; first += 4 * kStep) {
    uint32_t blocks[kStep], words[4 * kStep];
    for (int64_t i = 0; i < kStep; ++i) blocks[i] = first / 4 + i;
    uint64_t pairs[kStep][2];
    philox_step(seed, choice, position, blocks, pairs);
    std::memcpy(words, pairs, sizeof words);
    for (int64_t i = 0; i < 4 * kStep && first + i < n; i += L) contenders.meet_all(first + i, n - first - i, words + i);
  }
  int64_t count = 0;
  for (const auto& [token, value] : contenders.found) {
    if (value < contenders.best - Contenders::kNear) continue;
    if (count == room) return -1;
    out[count++] = token;
  }
  return count;
}

}  // extern "C"
