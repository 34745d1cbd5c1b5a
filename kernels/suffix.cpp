// The suffix index's inner loops: what spec/suffix_index.py does token by token, on the same memory and with the same
// results. That file says what the structures mean.
#include <algorithm>
#include <cstdint>

namespace {

constexpr uint64_t kBase = 0xD6E8FEB86659FD93u;
constexpr uint64_t kSpread = 0x9E3779B97F4A7C15u;
constexpr int64_t kMostCandidates = 64;
constexpr int32_t kSeparator = -1;

struct Level {
  int64_t length, shift;
  uint64_t out_factor, hash;
  int32_t *heads, *links;
};

struct Index {
  int64_t capacity, next, run_len, num_tokens, max_match, max_candidates;
  double factor, offset, min_prob, doubt;
  int32_t* ring;
  int64_t num_levels;
  Level levels[8];
};

struct Match {
  int64_t slot, age, length;
};

inline int32_t& head(const Level& level, uint64_t hash) { return level.heads[hash * kSpread >> level.shift]; }

// Of the token in a slot, with as much behind and before it as the ring holds. Slots count modulo the capacity.
inline int32_t* place(const Index& index, int64_t slot) { return index.ring + (slot + index.capacity) % index.capacity + index.capacity; }

inline int64_t agreeing(const int32_t* one, const int32_t* other, int64_t most) {
  int64_t length = 0;
  while (length < most && one[-length] == other[-length]) ++length;
  return length;
}

void append(Index& index, int32_t token, bool findable) {
  int32_t* at = place(index, index.next);
  at[0] = at[-index.capacity] = token;
  for (int64_t i = 0; i < index.num_levels; ++i) {
    Level& level = index.levels[i];
    const uint64_t gone = index.run_len >= level.length ? at[-level.length] : 0;
    level.hash = level.hash * kBase + token - gone * level.out_factor;
    if (!findable || index.run_len + 1 < level.length) continue;
    int32_t& latest = head(level, level.hash);
    level.links[index.next] = latest;
    latest = index.next + 1;
  }
  index.next = (index.next + 1) % index.capacity;
  index.num_tokens = std::min(index.num_tokens + 1, index.capacity);
  ++index.run_len;
}

// Of the last `length` tokens of the open sequence, which has as many.
uint64_t hash_of(const Index& index, int64_t length) {
  for (int64_t i = 0; i < index.num_levels; ++i)
    if (index.levels[i].length == length) return index.levels[i].hash;
  uint64_t hash = 0;
  for (const int32_t* end = place(index, index.next - 1); length-- > 0;) hash = hash * kBase + end[-length];
  return hash;
}

// The matches in the chain from `slot` on; `known` tokens that end at `end` are the context.
int64_t follow(const Index& index, int64_t least, const int32_t* links, int64_t slot, const int32_t* end, int64_t known,
               Match* matches) {
  const int64_t newest = index.next - 1;
  int64_t count = 0, last_age = 0;
  for (int64_t i = 0; i <= index.max_candidates && slot >= 0; ++i) {
    const int64_t age = (newest - slot + index.capacity) % index.capacity;
    if (age < last_age || age >= index.num_tokens) break;
    if (age > 0) {  // else it is the end of the open sequence, which nothing follows
      const int64_t length = agreeing(place(index, slot), end, std::min(known, index.num_tokens - age));
      if (length >= least && count < index.max_candidates) matches[count++] = {slot, age, length};
    }
    slot = int64_t{links[slot]} - 1, last_age = age + 1;
  }
  return count;
}

int64_t find(const Index& index, const Index& of, Match* matches) {
  const int32_t* end = place(of, of.next - 1);
  const int64_t known = std::min({index.max_match, of.run_len, of.num_tokens});
  for (int64_t i = index.num_levels; i-- > 0;) {
    const Level& level = index.levels[i];
    if (known < level.length) continue;
    const int64_t slot = int64_t{head(level, hash_of(of, level.length))} - 1;
    if (const int64_t count = follow(index, level.length, level.links, slot, end, known, matches)) return count;
  }
  return 0;
}

// What came `depth` tokens behind a match's next one; behind the newest token the sequence goes on with itself.
inline int32_t following(const Index& index, const Match& match, int64_t depth) {
  return *place(index, match.slot + 1 + depth % match.age);
}

// At one depth the token with the most votes, the most recent of equals; who wanted another one leaves `matches`.
int32_t elect(const Index& index, int64_t depth, Match* matches, int64_t& count, int64_t& votes, int64_t& all_votes) {
  int32_t wanted[kMostCandidates], best = 0;
  votes = all_votes = 0;
  for (int64_t i = 0; i < count; ++i) wanted[i] = following(index, matches[i], depth);
  for (int64_t i = 0; i < count; ++i) {
    int64_t sum = 0;
    for (int64_t j = 0; j < count; ++j) sum += wanted[j] == wanted[i] ? matches[j].length + depth : 0;
    all_votes += matches[i].length + depth;
    if (sum > votes) votes = sum, best = wanted[i];
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i)
    if (wanted[i] == best) matches[kept++] = matches[i];
  count = kept;
  return best;
}

}  // namespace

extern "C" {

void verdraft_index_extend(Index* index, const int32_t* tokens, int64_t count, int64_t findable) {
  for (int64_t i = 0; i < count; ++i) append(*index, tokens[i], findable);
}

int64_t verdraft_index_clue(const Index* index, const Index* of) {
  const int64_t newest = (index->next - 1 + index->capacity) % index->capacity;
  int64_t found = 0;
  for (int64_t i = 0; i < index->num_levels && index->levels[i].length <= std::min(of->run_len, of->num_tokens); ++i) {
    const Level& level = index->levels[i];
    int64_t slot = int64_t{head(level, hash_of(*of, level.length))} - 1;
    if (slot == newest) slot = int64_t{level.links[slot]} - 1;  // not the end of the open sequence itself
    if (slot < 0 || agreeing(place(*index, slot), place(*of, of->next - 1), level.length) < level.length) break;
    found = level.length;
  }
  return found;
}

// Returns how many tokens and path probabilities were written; `matched`: tokens of the longest match.
int64_t verdraft_index_propose(const Index* index, const Index* of, int64_t limit, int32_t* tokens, double* probs, int64_t* matched) {
  Match matches[kMostCandidates];
  int64_t count = find(*index, *of, matches), votes, all_votes, depth = 0;
  *matched = 0;
  for (int64_t i = 0; i < count; ++i) *matched = std::max(*matched, matches[i].length);
  limit = std::min(limit, static_cast<int64_t>(index->factor * *matched + index->offset));
  for (double prob = 1.0; count > 0 && depth < limit; ++depth) {
    const int32_t token = elect(*index, depth, matches, count, votes, all_votes);
    prob *= votes / (all_votes + index->doubt);
    if (token == kSeparator || prob < index->min_prob) break;
    tokens[depth] = token, probs[depth] = prob;
  }
  return depth;
}
}
