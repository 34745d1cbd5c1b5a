// The CPU backend's attention over paged keys and values, fp32, called through ctypes on raw pointers.
//
// Every row is computed by the same instructions in the same order whatever rows stand beside it, so a
// result never depends on the batch, the query length, chunking or threads, bit for bit. Where a function
// is instantiated for several tile sizes, its only arithmetic is `mul_add`, the same in each of them.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "operations.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int kMaxRows = kRegisters == 32 ? 12 : 8;  // query rows that share one pass over the keys
constexpr int kFetchFrom = 7;                        // rows; fewer do nothing but read, which the processor foresees by itself
constexpr int kSums = kRegisters == 32 ? 24 : 12;    // vectors of sums that fit the registers
constexpr int kMaxDim = 256;
constexpr int kBlockGroups = 128 / L;  // a softmax block: key groups of L lanes
constexpr float kInf = std::numeric_limits<float>::infinity();

constexpr int64_t kRun = 16;  // neighbouring pages: a head's parts of them touch, so that the processor reads ahead

// K is [runs, kv_heads, kRun, dim, lanes]: a group of L keys is one vector per dimension, lanes = page_size
// rounded up to L. V is [runs, kv_heads, kRun, page_size, padded_dim], padded_dim = dim rounded up to L.
struct Layer {
  float* k;
  float* v;
  int64_t page_size, lanes, kv_heads, dim, padded_dim;

  explicit Layer(const int64_t* fields)
      : k(reinterpret_cast<float*>(fields[0])),
        v(reinterpret_cast<float*>(fields[1])),
        page_size(fields[2]),
        lanes((page_size + L - 1) / L * L),
        kv_heads(fields[3]),
        dim(fields[4]),
        padded_dim((dim + L - 1) / L * L) {}
  int64_t part(int64_t page, int64_t head) const { return (page / kRun * kv_heads + head) * kRun + page % kRun; }
  float* k_page(int64_t page, int64_t head) const { return k + part(page, head) * dim * lanes; }
  float* v_page(int64_t page, int64_t head) const { return v + part(page, head) * page_size * padded_dim; }
};

struct Group {  // at most L neighbouring keys of one page
  const float* k;
  const float* v;
  int64_t start, keys;  // position of the first, how many slots the page has here
  int64_t k_stride;     // from one dimension to the next
};

// The keys that a query sees: those at the positions below `in_place`, then `moved`, up to the query's own.
struct Path {
  int64_t limit;  // how many
  int64_t in_place = std::numeric_limits<int64_t>::max();
  std::vector<int32_t> moved;  // where keys of a tree lie whose places are not their positions

  int64_t place(int64_t position) const { return position < in_place ? position : moved[position - in_place]; }
};

struct Row {  // one (query, head): its running softmax
  int64_t limit;  // keys it may see
  const Path* path;
  float max;
  Vec sum;
  const float* q;
  float* out;
};

struct Tile {  // up to kMaxRows rows of one sequence and kv head
  int count;
  Row rows[kMaxRows];
  float q[kMaxDim * kMaxRows];                     // [dim, count], times scale * log2(e)
  Vec scores[kMaxRows * kBlockGroups];             // [count, groups]
  Vec acc[kMaxRows * kMaxDim / L];                 // [count, padded_dim]
};

// Many rows compute for so long that the group's values can be fetched meanwhile.
template <int R>
void score(Tile& t, const Layer& kv, const Group& group, int g) {
  Vec acc[R] = {};
  const float *q = t.q, *k = group.k, *v = group.v;
  for (int64_t d = 0; d < kv.dim; ++d, q += R, k += group.k_stride, v += L) {
    if constexpr (R >= kFetchFrom) __builtin_prefetch(v);
    const Vec key = load(k);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = mul_add(fill(q[r]), key, acc[r]);
  }
  for (int r = 0; r < R; ++r) t.scores[r * kBlockGroups + g] = acc[r];
}

// Folds a block's scores of one row into its running softmax and leaves the probabilities in their place.
__attribute__((noinline)) void fold_scores(Row& row, Vec* scores, Vec* acc, int chunks, const Group* groups, int count) {
  Vec best = fill(-kInf);
  int seen = 0;
  for (; seen < count && groups[seen].start < row.limit; ++seen) {
    const int64_t n = std::min(groups[seen].keys, row.limit - groups[seen].start);
    if (n < L) scores[seen] = first_lanes(n) ? scores[seen] : fill(-kInf);
    best = scores[seen] > best ? scores[seen] : best;
  }
  if (!seen) return;
  const float top = max_lanes(best);
  if (top > row.max) {
    const Vec shrink = exp2(fill(row.max - top));
    row.max = top;
    row.sum *= shrink;
    for (int c = 0; c < chunks; ++c) acc[c] *= shrink;
  }
  for (int g = 0; g < seen; ++g) {
    const int64_t n = std::min(groups[g].keys, row.limit - groups[g].start);
    Vec p = exp2(scores[g] - row.max);
    if (n < L) p = first_lanes(n) ? p : Vec{};  // a select, never a product: what lies there may be NaN
    scores[g] = p;
    row.sum += p;
  }
}

// acc[r][c..c+C) += p[r][g][j] * v[g][j] for the first `keys` keys of groups [begin, end), in key order.
template <int R, int C>
void weigh(const float* p, Vec* acc, int chunks, int64_t v_stride, const Group* groups, int begin, int end, int64_t keys) {
  for (int c = 0; c < chunks; c += C) {
    Vec sum[R][C];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) sum[r][i] = acc[r * chunks + c + i];
    for (int g = begin; g < end; ++g) {
      const float* v = groups[g].v + c * L;
      const int64_t n = std::min(keys, groups[g].keys);
      for (int64_t j = 0; j < n; ++j, v += v_stride) {
        Vec value[C];
        for (int i = 0; i < C; ++i) value[i] = load(v + i * L);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int i = 0; i < C; ++i) sum[r][i] = mul_add(fill(p[(r * kBlockGroups + g) * L + j]), value[i], sum[r][i]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) acc[r * chunks + c + i] = sum[r][i];
  }
}

template <int R>
void weigh_any(const float* p, Vec* acc, int chunks, int64_t stride, const Group* groups, int begin, int end, int64_t keys) {
  constexpr int kWide = R * 4 <= kSums ? 4 : R * 2 <= kSums ? 2 : 1;
  if (chunks % kWide == 0) weigh<R, kWide>(p, acc, chunks, stride, groups, begin, end, keys);
  else weigh<R, 1>(p, acc, chunks, stride, groups, begin, end, keys);
}

template <int R>
void attend_block(Tile& t, const Layer& kv, const Group* groups, int count) {
  const int chunks = kv.padded_dim / L;
  const float* p = reinterpret_cast<const float*>(t.scores);
  for (int g = 0; g < count; ++g) score<R>(t, kv, groups[g], g);
  int64_t limit = t.rows[0].limit;  // keys that every row sees
  for (int r = 0; r < R; ++r) {
    limit = std::min(limit, t.rows[r].limit);
    fold_scores(t.rows[r], t.scores + r * kBlockGroups, t.acc + r * chunks, chunks, groups, count);
  }
  int full = 0;
  while (full < count && groups[full].start + groups[full].keys <= limit) ++full;
  weigh_any<R>(p, t.acc, chunks, kv.padded_dim, groups, 0, full, L);
  for (int r = 0; r < R; ++r)
    for (int g = full; g < count && groups[g].start < t.rows[r].limit; ++g)
      weigh_any<1>(p + r * kBlockGroups * L, t.acc + r * chunks, chunks, kv.padded_dim, groups, g, g + 1,
                   t.rows[r].limit - groups[g].start);
}

template <size_t... R>
constexpr auto block_functions(std::index_sequence<R...>) {
  return std::array{&attend_block<R + 1>...};
}
constexpr auto kAttendBlock = block_functions(std::make_index_sequence<kMaxRows>{});  // of a tile's number of rows less 1

__attribute__((noinline)) void begin_tile(Tile& t, const Layer& kv, float scale) {
  for (int r = 0; r < t.count; ++r) {
    t.rows[r].max = -kInf;
    t.rows[r].sum = Vec{};
    for (int64_t d = 0; d < kv.dim; ++d) t.q[d * t.count + r] = t.rows[r].q[d] * scale;
  }
  std::fill_n(t.acc, t.count * kv.padded_dim / L, Vec{});
}

__attribute__((noinline)) void end_tile(const Tile& t, const Layer& kv) {
  for (int r = 0; r < t.count; ++r) {
    const float total = sum_lanes(t.rows[r].sum);
    const Vec* acc = t.acc + r * (kv.padded_dim / L);
    for (int64_t d = 0; d < kv.dim; d += L) store_some(t.rows[r].out + d, acc[d / L] / total, kv.dim - d);
  }
}

// Key groups from `start` on, at most one block of them, up to `limit`; moves `start` behind them.
int next_block(const Layer& kv, const int32_t* pages, int64_t head, int64_t limit, int64_t& start, Group* groups) {
  int count = 0;
  while (count < kBlockGroups && start < limit) {
    const int64_t page = pages[start / kv.page_size], offset = start % kv.page_size;
    const int64_t keys = std::min<int64_t>(L, kv.page_size - offset);
    groups[count++] = {kv.k_page(page, head) + offset, kv.v_page(page, head) + offset * kv.padded_dim, start, keys, kv.lanes};
    start += keys;
  }
  return count;
}

// Replaces groups that hold moved keys of a row by copies in `scratch`, every key at its position.
void gather_moved(const Layer& kv, const int32_t* pages, int64_t head, const Path& path, Group* groups, int count,
                  std::vector<float>& scratch) {
  scratch.resize(kBlockGroups * L * (kv.dim + kv.padded_dim));
  float* k = scratch.data();
  for (Group* group = groups; group < groups + count; ++group, k += L * (kv.dim + kv.padded_dim)) {
    if (group->start + group->keys <= path.in_place) continue;
    float* v = k + L * kv.dim;
    for (int64_t i = 0; i < group->keys && group->start + i < path.limit; ++i) {
      const int64_t place = path.place(group->start + i), page = pages[place / kv.page_size], offset = place % kv.page_size;
      const float* column = kv.k_page(page, head) + offset;
      for (int64_t d = 0; d < kv.dim; ++d) k[d * L + i] = column[d * kv.lanes];
      std::copy_n(kv.v_page(page, head) + offset * kv.padded_dim, kv.padded_dim, v + i * kv.padded_dim);
    }
    group->k = k, group->v = v, group->k_stride = L;
  }
}

// The rest of one row, from `start` on: as attend_tile, whose rows share no keys there.
void attend_alone(Tile& t, int r, const Layer& kv, const int32_t* pages, int64_t head, int64_t start) {
  const int chunks = kv.padded_dim / L;
  Tile alone;
  alone.count = 1;
  alone.rows[0] = t.rows[r];
  std::copy_n(t.acc + r * chunks, chunks, alone.acc);
  for (int64_t d = 0; d < kv.dim; ++d) alone.q[d] = t.q[d * t.count + r];
  std::vector<float> scratch;
  Group groups[kBlockGroups];
  while (int count = next_block(kv, pages, head, t.rows[r].limit, start, groups)) {
    gather_moved(kv, pages, head, *t.rows[r].path, groups, count, scratch);
    attend_block<1>(alone, kv, groups, count);
  }
  t.rows[r] = alone.rows[0];
  std::copy_n(alone.acc, chunks, t.acc + r * chunks);
}

void attend_tile(Tile& t, const Layer& kv, const int32_t* pages, int64_t head, float scale) {
  begin_tile(t, kv, scale);
  int64_t limit = 0, in_place = std::numeric_limits<int64_t>::max(), start = 0, done = 0;
  for (int r = 0; r < t.count; ++r) {
    limit = std::max(limit, t.rows[r].limit);
    in_place = std::min(in_place, t.rows[r].path->in_place);
  }
  Group groups[kBlockGroups];
  while (int count = next_block(kv, pages, head, limit, start, groups)) {
    if (start > in_place) break;
    kAttendBlock[t.count - 1](t, kv, groups, count);
    done = start;
  }
  if (done < limit)
    for (int r = 0; r < t.count; ++r) attend_alone(t, r, kv, pages, head, done);
  end_tile(t, kv);
}

// What each of a sequence's queries sees, `before` keys being older than all. Without parents each sees those before it.
void trace(const int32_t* parents, int64_t queries, int64_t before, Path* paths) {
  std::vector<int32_t> path;
  for (int64_t query = 0; query < queries; ++query) {
    paths[query].limit = before + query + 1;
    if (!parents) continue;
    path.clear();
    for (int32_t i = query; i >= 0; i = parents[i]) path.push_back(i);
    std::reverse(path.begin(), path.end());
    const int64_t length = path.size();
    int64_t same = 0;
    while (same < length && path[same] == same) ++same;
    paths[query].limit = before + length;
    if (same == length) continue;
    paths[query].in_place = before + same;
    for (; same < length; ++same) paths[query].moved.push_back(before + path[same]);
  }
}

struct Task {
  int32_t sequence, head, first, count;  // rows [first, first + count) of queries x heads per kv head
};

std::vector<Task> split(const int32_t* cu_q, int64_t sequences, int64_t group, int64_t kv_heads) {
  std::vector<Task> tasks;
  for (int32_t b = 0; b < sequences; ++b) {
    const int32_t rows = (cu_q[b + 1] - cu_q[b]) * group, tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int32_t head = 0; head < kv_heads; ++head)
      for (int32_t i = 0; i < tiles; ++i)
        tasks.push_back({b, head, rows * i / tiles, rows * (i + 1) / tiles - rows * i / tiles});
  }
  return tasks;
}

}  // namespace

extern "C" {

int64_t verdraft_lanes() { return L; }

int64_t verdraft_run() { return kRun; }

// q [T, heads, dim] and k, v [T, kv_heads, dim] have contiguous rows `stride` floats apart; out is contiguous.
// `layer` is {k pages, v pages, page_size, kv_heads, dim}; `parents` is null or base.py's Batch.parents.
void verdraft_attend(const float* q, int64_t q_stride, float* out, int64_t heads, const int64_t* layer, const int32_t* cu_q,
                     const int32_t* seq_lens, const int32_t* parents, const int32_t* pages, int64_t pages_stride, int64_t sequences,
                     float scale) {
  const Layer kv(layer);
  const int64_t group = heads / kv.kv_heads;
  const std::vector<Task> tasks = split(cu_q, sequences, group, kv.kv_heads);
  std::vector<Path> paths(cu_q[sequences]);
  int64_t work = 0;
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t first = cu_q[b], count = cu_q[b + 1] - first;
    trace(parents ? parents + first : nullptr, count, seq_lens[b] - count, paths.data() + first);
    work += count * seq_lens[b] * heads * kv.dim;
  }
  const auto run = [&](Tile& t, const Task& task) {
    const int64_t first = cu_q[task.sequence];
    t.count = task.count;
    for (int r = 0; r < t.count; ++r) {
      const int64_t query = (task.first + r) / group, head = task.head * group + (task.first + r) % group;
      t.rows[r].path = &paths[first + query];
      t.rows[r].limit = t.rows[r].path->limit;
      t.rows[r].q = q + (first + query) * q_stride + head * kv.dim;
      t.rows[r].out = out + ((first + query) * heads + head) * kv.dim;
    }
    attend_tile(t, kv, pages + task.sequence * pages_stride, task.head, scale * 1.44269504f);
  };
  // Threads take tasks from one counter, because sequences differ in length; the last ones see most keys and go first.
  std::atomic<int64_t> left(tasks.size());
  const int64_t workers = work < 65536 ? 1 : std::min<int64_t>(at::get_num_threads(), tasks.size());
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    Tile tile;
    for (int64_t i; (i = --left) >= 0;) run(tile, tasks[i]);
  });
}

void verdraft_write(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* layer, const int64_t* slots,
                    int64_t tokens) {
  const Layer kv(layer);
  for_rows(tokens, kv.kv_heads * kv.dim * 8, [&](int64_t t) {
    const int64_t page = slots[t] / kv.page_size, offset = slots[t] % kv.page_size;
    for (int64_t head = 0; head < kv.kv_heads; ++head) {
      const float* key = k + t * k_stride + head * kv.dim;
      float* column = kv.k_page(page, head) + offset;
      for (int64_t d = 0; d < kv.dim; ++d) column[d * kv.lanes] = key[d];
      std::memcpy(kv.v_page(page, head) + offset * kv.padded_dim, v + t * v_stride + head * kv.dim, kv.dim * sizeof(float));
    }
  });
}

// Copies the keys and values at `sources` to `targets`, as if all were read before any is written.
void verdraft_move(const int64_t* layer, const int64_t* sources, const int64_t* targets, int64_t tokens) {
  const Layer kv(layer);
  const int64_t size = kv.kv_heads * kv.dim;
  std::vector<float> k(tokens * size), v(tokens * size);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t page = sources[t] / kv.page_size, offset = sources[t] % kv.page_size;
    for (int64_t head = 0; head < kv.kv_heads; ++head) {
      const int64_t at = t * size + head * kv.dim;
      for (int64_t d = 0; d < kv.dim; ++d) k[at + d] = kv.k_page(page, head)[offset + d * kv.lanes];
      std::copy_n(kv.v_page(page, head) + offset * kv.padded_dim, kv.dim, v.data() + at);
    }
  }
  verdraft_write(k.data(), size, v.data(), size, layer, targets, tokens);
}

}  // extern "C"
