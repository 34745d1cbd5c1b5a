// Float vectors of this processor's width in GCC's vector extensions, so that one source serves every processor.
//
// The build forbids the compiler to contract products and sums by itself: it does so in one instance of a template and
// not in the next. Where a result may depend on it, `mul_add` says what happens.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int L = 16;  // float lanes of a vector
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int L = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int L = 4;
constexpr int kRegisters = 32;
#else
constexpr int L = 4;
constexpr int kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(L * 4)));
typedef float VecU __attribute__((vector_size(L * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(L * 4)));
typedef uint64_t WideVec __attribute__((vector_size(L * 4)));

inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<VecU*>(p) = x; }
inline Vec fill(float x) { return x - Vec{}; }  // costs nothing, and -0 stays -0

// a * b + c, rounded once where the processor can and twice elsewhere, in every place alike.
inline Vec mul_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// The whole products of the lanes' lower halves; the upper ones are ignored.
inline WideVec multiply_halves(WideVec a, WideVec b) {
#if defined(__AVX512F__)
  return reinterpret_cast<WideVec>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<WideVec>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__) && !defined(__AVX__)
  return reinterpret_cast<WideVec>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
#endif
}

inline Vec load_some(const float* p, int64_t n) {  // lanes from n on are 0
  if (n >= L) return load(p);
  float lanes[L] = {};
  if (n > 0) std::memcpy(lanes, p, n * sizeof(float));
  return load(lanes);
}

inline void store_some(float* p, Vec x, int64_t n) {
  if (n >= L) return store(p, x);
  float lanes[L];
  store(lanes, x);
  if (n > 0) std::memcpy(p, lanes, n * sizeof(float));
}

// Halves as floats: the compiler's own conversion goes element by element.
inline Vec widen(const uint16_t* halves) {
#ifdef __AVX512F__
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
#else
  IntVec bits;
  for (int i = 0; i < L; ++i) bits[i] = halves[i];
  const Vec magnitude = reinterpret_cast<Vec>((bits & 0x7fff) << 13) * 0x1p112f;  // the exponents' biases differ by 112
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(magnitude) | (bits & 0x8000) << 16);
#endif
}

inline IntVec first_lanes(int64_t n) {  // all ones below n
  IntVec lane;
  for (int i = 0; i < L; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(n);
}

inline float sum_lanes(Vec x) {
  float lanes[L];
  store(lanes, x);
  for (int half = L / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline int32_t sum_lanes(IntVec x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t sum = 0;
  for (int i = 0; i < L; ++i) sum += x[i];
  return sum;
#endif
}

inline float max_lanes(Vec x) {
  float best = x[0];
  for (int i = 1; i < L; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline int32_t max_lanes(IntVec x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t best = x[0];
  for (int i = 1; i < L; ++i) best = std::max(best, x[i]);
  return best;
#endif
}

// 2^x, relative error about 1e-7, x clamped to [-100, 126] (no denormals arise); NaN stays NaN.
// exp2(0) is exactly 1.
inline Vec exp2(Vec x) {
  x = x < fill(-100.0f) ? fill(-100.0f) : x;
  x = x > fill(126.0f) ? fill(126.0f) : x;
  const Vec n = (x + 12582912.0f) - 12582912.0f;  // nearest integer
  const Vec f = x - n;
  Vec y = fill(1.52527338e-5f);
  y = mul_add(y, f, fill(1.54035304e-4f));
  y = mul_add(y, f, fill(1.33335581e-3f));
  y = mul_add(y, f, fill(9.61812911e-3f));
  y = mul_add(y, f, fill(5.55041087e-2f));
  y = mul_add(y, f, fill(2.40226507e-1f));
  y = mul_add(y, f, fill(6.93147181e-1f));
  y = mul_add(y, f, fill(1.0f));
  const IntVec bits = reinterpret_cast<IntVec>(y) + (__builtin_convertvector(n, IntVec) << 23);
  return reinterpret_cast<Vec>(bits);
}

}  // namespace
