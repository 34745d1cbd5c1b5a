// Work on rows, shared out to torch's own threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace {

// Rows [0, n) over torch's threads; small work stays on the caller's.
template <typename F>
void for_rows(int64_t n, int64_t floats_per_row, const F& f) {
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, floats_per_row));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

}  // namespace
