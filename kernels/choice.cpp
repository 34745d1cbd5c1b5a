// Which tokens may win: noise words, and of a row the few whose score and noise together may be the largest, called
// through ctypes on raw pointers.
//
// sampling.py is the law and has the last word. Where its roundings might decide what top-k, top-p and min-p keep,
// nothing is said here.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kWide = L / 2;    // lanes of a WideVec
constexpr int kChains = 3;      // of Philox, side by side: each round waits for the one before
constexpr int64_t kStep = kChains * kWide;
constexpr double kNear = 1e-9;  // far above the rounding of a score, far below the gaps that matter
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

struct Draw {
  int64_t seed, choice, position;

  // The words of kStep blocks, four tokens each.
  void words(const uint32_t* blocks, uint32_t* out) const {
    uint64_t pairs[kStep][2];
    philox_step(seed, choice, position, blocks, pairs);
    std::memcpy(out, pairs, sizeof pairs);
  }
};

// A row of n logits: in floats, and in doubles if they are not these floats. Scores are (logit - highest) / temperature.
struct Row {
  const float* near;
  const double* exact;
  int64_t n;
  double highest, temperature;

  double score(int64_t token) const { return ((exact ? exact[token] : near[token]) - highest) / temperature; }

  // Of the tokens from this one on, about; those behind the row's end are impossible.
  Vec scores(int64_t token) const {
    const float scale = std::min(1 / temperature, 1e30);
    const Vec found = (load_some(near + token, n - token) - static_cast<float>(highest)) * scale;
    return n - token < L ? (first_lanes(n - token) ? found : fill(-std::numeric_limits<float>::infinity())) : found;
  }

  // More than these differ from exact scores where they count.
  double slack() const { return 1e-5 + 1e-6 * std::abs(highest) / temperature; }
};

struct Candidate {
  int64_t token;
  double score;
  double weight;  // exp(score), and score + noise in the end

  bool operator<(const Candidate& other) const {  // is likelier
    return score > other.score || (score == other.score && token < other.token);
  }
};

typedef std::vector<Candidate> Candidates;

// The tokens whose score + noise is the largest, or so near that rounding may decide.
struct Contenders {
  double best = -kInfinity;
  Candidates found;

  void meet(int64_t token, double score, uint32_t word) {
    const double value = score - std::log(-std::log((word + 0.5) * 0x1p-32));
    if (value < best - kNear) return;
    found.push_back({token, score, value});
    best = std::max(best, value);
  }

  // Their tokens, ascending; -1 if there are more than `room`.
  int64_t write(int64_t* out, int64_t room) const {
    int64_t count = 0;
    for (const Candidate& candidate : found) {
      if (candidate.weight < best - kNear) continue;
      if (count == room) return -1;
      out[count++] = candidate.token;
    }
    std::sort(out, out + count);
    return count;
  }
};

Contenders among_all(const Row& row, const Draw& draw) {
  Contenders contenders;
  for (int64_t first = 0; first < row.n; first += 4 * kStep) {
    uint32_t blocks[kStep], words[4 * kStep];
    for (int64_t i = 0; i < kStep; ++i) blocks[i] = first / 4 + i;
    draw.words(blocks, words);
    for (int64_t i = 0; i < 4 * kStep && first + i < row.n; i += L) {
      const IntVec able = may_reach(row.scores(first + i), words + i, contenders.best);
      if (!any(able)) continue;
      for (int64_t lane = 0; lane < std::min<int64_t>(row.n - first - i, L); ++lane)
        if (able[lane]) contenders.meet(first + i + lane, row.score(first + i + lane), words[i + lane]);
    }
  }
  return contenders;
}

Contenders among(const Candidates& candidates, const Draw& draw) {
  Contenders contenders;
  const int64_t n = candidates.size();
  for (int64_t first = 0; first < n; first += kStep) {
    uint32_t blocks[kStep] = {}, words[kStep][4];
    const int64_t count = std::min(kStep, n - first);
    for (int64_t i = 0; i < count; ++i) blocks[i] = candidates[first + i].token >> 2;
    draw.words(blocks, words[0]);
    for (int64_t i = 0; i < count; ++i) {
      const Candidate& candidate = candidates[first + i];
      contenders.meet(candidate.token, candidate.score, words[i][candidate.token & 3]);
    }
  }
  return contenders;
}

// What is kept of a distribution: 0, 1 and -infinity keep everything.
struct Limits {
  int64_t top_k;
  double top_p, min_score;
};

// All tokens whose score is `least` or more, about, and what the others weigh together; the most that pays.
struct Head {
  static constexpr size_t kMost = 8192;
  const Row& row;
  double least, rest = 0;
  bool whole = true;  // no other token is possible
  Candidates found;

  Head(const Row& row, double least) : row(row), least(least) {
    const Vec none = fill(-std::numeric_limits<float>::infinity());
    Vec light{}, missing = none;
    for (int64_t token = 0; token < row.n && found.size() <= kMost; token += L) {
      const Vec scores = row.scores(token);
      const IntVec high = scores >= static_cast<float>(least);
      const Vec low = high ? none : scores;
      missing = low > missing ? low : missing;
      light += exp2(low * 1.44269504f);
      if (any(high)) push(token, high);
      if (token % (64 * L) == 0) rest += sum_lanes(light), light = Vec{};
    }
    whole = max_lanes(missing) == none[0];
    rest = whole ? 0 : rest + sum_lanes(light);
  }

  void push(int64_t token, IntVec high) {
    for (int64_t lane = 0; lane < L; ++lane)
      if (high[lane]) found.push_back({token + lane, row.score(token + lane), 0});
  }

  // False: a token that is missing may be likelier than the last of these.
  bool holds(double last) const { return whole || last > least + row.slack(); }

  bool keep_largest(int64_t count) {
    if (static_cast<size_t>(count) >= found.size()) return whole;
    std::nth_element(found.begin(), found.begin() + count - 1, found.end());
    found.resize(count);
    rest = 0;
    return holds(found.back().score);
  }

  bool keep_nucleus(double top_p) {
    double total = rest, above = 0;
    for (Candidate& candidate : found) total += candidate.weight = std::exp(candidate.score);
    const double wanted = top_p * total, near = kNear * total + 2 * row.slack() * rest;
    const auto last = reaching(wanted, above);
    if (last == found.end() || !holds(last->score) || above + last->weight - wanted <= near) return false;
    if (last != found.begin() && wanted - above <= near) return false;
    const Candidate edge = *last;
    for (const Candidate& other : found)  // what is one to exp is decided by the tokens
      if (other.score != edge.score && std::abs(other.weight - edge.weight) <= kNear * edge.weight) return false;
    found.erase(last + 1, found.end());
    return true;
  }

  // The candidate with which the weight of the likeliest ones, then before it, reaches `wanted`; `above`: without it.
  Candidates::iterator reaching(double wanted, double& above) {
    auto low = found.begin(), high = found.end();
    while (high - low > 32) {
      const auto middle = low + (high - low) / 2;
      std::nth_element(low, middle, high);
      double half = 0;
      for (auto it = low; it != middle; ++it) half += it->weight;
      if (above + half >= wanted) high = middle;
      else above += half, low = middle;
    }
    std::sort(low, high);
    while (low != high && above + low->weight < wanted) above += low++->weight;
    return low == high ? found.end() : low;
  }

  bool narrow(const Limits& limits) {
    if (limits.top_k > 0 && !keep_largest(limits.top_k)) return false;
    if (limits.top_p < 1 && !keep_nucleus(limits.top_p)) return false;
    std::erase_if(found, [&](const Candidate& candidate) { return candidate.score < limits.min_score; });
    return limits.top_k > 0 || limits.top_p < 1 || holds(limits.min_score);
  }
};

}  // namespace

extern "C" {

// Philox4x32-10 of counters (block, position, choice, 0): noise.py's words, four to a block.
void verdraft_philox(int64_t seed, int64_t choice, int64_t position, const uint32_t* blocks, uint32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t count = std::min(kStep, n - i);
    uint32_t some[kStep] = {};
    std::memcpy(some, blocks + i, count * sizeof(uint32_t));
    uint64_t words[kStep][2];
    philox_step(seed, choice, position, some, words);
    std::memcpy(out + 4 * i, words, count * sizeof(words[0]));
  }
}

// Writes the tokens, ascending, of which one has the largest score + noise of those that top-k (0: off), then top-p (1: off),
// then a least score leave; there are hardly ever two. Returns how many they are, or -1 where sampling.py had better look
// itself. `highest` is the row's largest, finite.
int64_t verdraft_contenders(int64_t seed, int64_t choice, int64_t position, const float* near, const double* exact, int64_t n,
                            double highest, double temperature, int64_t top_k, double top_p, double min_score, int64_t* out,
                            int64_t room) {
  const Draw draw{seed, choice, position};
  const Row row{near, exact, n, highest, temperature};
  const Limits limits{top_k, top_p, min_score};
  if (top_k > static_cast<int64_t>(Head::kMost)) return -1;
  if (top_k == 0 && top_p >= 1 && min_score == -kInfinity) return among_all(row, draw).write(out, room);
  // The likeliest tokens mostly settle it; where they do not, or roundings might, more of them do.
  for (double least = std::min(-8.0, top_k == 0 && top_p >= 1 ? min_score - 1 : 0.0); least > -60; least -= 3) {
    Head head(row, least);
    if (head.found.size() > Head::kMost) return -1;
    if (head.narrow(limits)) return among(head.found, draw).write(out, room);
  }
  return -1;
}

}  // extern "C"
