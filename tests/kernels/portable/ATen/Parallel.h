// Stands in for torch where there is none: the same two functions, the work cut in two as two threads would.
#pragma once

#include <cstdint>

namespace at {

inline int get_num_threads() { return 2; }

template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (end <= begin) return;
  const int64_t middle = end - begin > grain ? begin + (end - begin) / 2 : end;
  f(begin, middle);
  if (middle < end) f(middle, end);
}

}  // namespace at
