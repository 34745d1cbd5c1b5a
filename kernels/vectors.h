// Float vectors of this processor's width in GCC's vector extensions, so that one source serves every processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int L = 16;  // float lanes of a vector
#else
constexpr int L = 8;
#endif

typedef float Vec __attribute__((vector_size(L * 4)));
typedef float VecU __attribute__((vector_size(L * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(L * 4)));

inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<VecU*>(p) = x; }
inline Vec fill(float x) { return Vec{} + x; }

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

}  // namespace
