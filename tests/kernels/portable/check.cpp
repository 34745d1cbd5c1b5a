// Proves the C++ operations on a processor that only an emulator offers, without torch or Python: every result is close
// to double precision, and every row has the bits that it has alone. Exits with 1 at the first that is not so.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

extern "C" {
int64_t verdraft_lanes();
int64_t verdraft_run();
int64_t verdraft_panel_width();
void verdraft_linear(const float*, int64_t, const float*, const float*, float*, int64_t, int64_t, int64_t);
void verdraft_block_linear(int64_t, const float*, int64_t, const uint8_t*, const float*, float*, int64_t, int64_t, int64_t);
void verdraft_rounded_linear(int64_t, const float*, int64_t, const uint8_t*, const float*, float*, int64_t, int64_t, int64_t);
void verdraft_attend(const float*, int64_t, float*, int64_t, const int64_t*, const int32_t*, const int32_t*, const int32_t*,
                     const int32_t*, int64_t, int64_t, float);
void verdraft_write(const float*, int64_t, const float*, int64_t, const int64_t*, const int64_t*, int64_t);
void verdraft_rope(float*, int64_t, int64_t, float*, int64_t, int64_t, const float*, const float*, int64_t, int64_t);
void verdraft_rms_norm(const float*, int64_t, const float*, float*, int64_t, int64_t, float);
void verdraft_layer_norm(const float*, int64_t, const float*, const float*, float*, int64_t, int64_t, float);
void verdraft_silu_mul(const float*, int64_t, float*, int64_t, int64_t);
void verdraft_philox(int64_t, int64_t, int64_t, const uint32_t*, uint32_t*, int64_t);
}

namespace {

using Floats = std::vector<float>;
constexpr int kRows = 130;
std::mt19937 random_bits(0);

void require(bool fine, const char* what, int64_t a, int64_t b) {
  if (fine) return;
  std::printf("failed: %s (%ld, %ld)\n", what, static_cast<long>(a), static_cast<long>(b));
  std::exit(1);
}

Floats normal(int64_t n, float scale = 1) {
  std::normal_distribution<float> distribution(0, scale);
  Floats values(n);
  for (float& value : values) value = distribution(random_bits);
  return values;
}

bool close(double a, double b) { return std::abs(a - b) < 2e-5 * (1 + std::abs(b)); }

// f(first, count, out) computes rows; whole batches of every size must repeat the lone rows, the first of which are `expected`.
template <class F>
void check_rows(const char* what, int64_t width, const Floats& expected, const F& f) {
  Floats alone(kRows * width), batch(kRows * width);
  for (int r = 0; r < kRows; ++r) f(r, 1, &alone[r * width]);
  for (size_t i = 0; i < expected.size(); ++i) require(close(alone[i], expected[i]), what, i / width, i % width);
  for (int rows = 1; rows <= kRows; ++rows) {
    const int first = kRows - rows;
    f(first, rows, batch.data());
    require(std::equal(batch.begin(), batch.begin() + rows * width, alone.begin() + first * width), what, rows, -1);
  }
}

// What one weight [outs, ins] gives, by its definition.
Floats products(const Floats& x, const Floats& weight, const Floats& bias, int64_t ins, int64_t outs) {
  Floats expected;
  for (int r = 0; r < kRows; ++r)
    for (int64_t o = 0; o < outs; ++o) {
      double sum = bias[o];
      for (int64_t k = 0; k < ins; ++k) sum += static_cast<double>(x[r * ins + k]) * weight[o * ins + k];
      expected.push_back(sum);
    }
  return expected;
}

Floats pack(const Floats& weight, int64_t ins, int64_t outs) {
  const int64_t width = verdraft_panel_width(), panels = (outs + width - 1) / width;
  Floats packed(panels * ins * width);
  for (int64_t o = 0; o < outs; ++o)
    for (int64_t k = 0; k < ins; ++k) packed[(o / width * ins + k) * width + o % width] = weight[o * ins + k];
  return packed;
}

void check_linear(int64_t ins, int64_t outs) {
  const Floats x = normal(kRows * ins), weight = normal(outs * ins, 1 / std::sqrt(ins)), bias = normal(outs);
  const Floats packed = pack(weight, ins, outs);
  check_rows("linear", outs, products(x, weight, bias, ins, outs), [&](int64_t first, int64_t count, float* out) {
    verdraft_linear(&x[first * ins], ins, packed.data(), bias.data(), out, count, ins, outs);
  });
}

float half_value(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return half & 0x8000 ? -magnitude : magnitude;
}

// Blocks in the order of quantized.cpp; their product must have the bits of the expanded weight's.
void check_blocks(int bits, int64_t ins, int64_t outs) {
  const int64_t width = verdraft_panel_width(), panels = (outs + width - 1) / width, groups = (ins + 31) / 32;
  const int64_t bytes = width * (bits == 4 ? 4 + 16 : 2 + 32);
  std::vector<uint8_t> blocks(panels * groups * bytes);
  Floats weight(outs * ins);
  for (int64_t o = 0; o < panels * width; ++o)
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* group = &blocks[(o / width * groups + g) * bytes];
      const int64_t lane = o % width;
      uint16_t* halves = reinterpret_cast<uint16_t*>(group);
      const uint16_t scale = random_bits() % 0x2c00, minimum = random_bits() % 0x2c00 | (random_bits() & 0x8000);
      halves[lane] = scale;
      if (bits == 4) halves[width + lane] = minimum;
      for (int64_t k = 0; k < 32; ++k) {
        const int q = bits == 4 ? random_bits() % 16 : static_cast<int>(random_bits() % 255) - 127;
        if (bits == 4) reinterpret_cast<uint32_t*>(group + 4 * width)[k / 8 * width + lane] |= static_cast<uint32_t>(q) << k % 8 * 4;
        else group[2 * width + k * width + lane] = static_cast<uint8_t>(q);
        if (o < outs && g * 32 + k < ins)
          weight[o * ins + g * 32 + k] = half_value(scale) * q + (bits == 4 ? half_value(minimum) : 0.0f);
      }
    }
  const Floats x = normal(kRows * ins), bias = normal(outs), packed = pack(weight, ins, outs);
  Floats expected(kRows * outs), found(kRows * outs);
  verdraft_linear(x.data(), ins, packed.data(), bias.data(), expected.data(), kRows, ins, outs);
  verdraft_block_linear(bits, x.data(), ins, blocks.data(), bias.data(), found.data(), kRows, ins, outs);
  require(found == expected, "blocks have the bits of their weight", bits, ins);
  check_rows("blocks", outs, products(x, weight, bias, ins, outs), [&](int64_t first, int64_t count, float* out) {
    verdraft_block_linear(bits, &x[first * ins], ins, blocks.data(), bias.data(), out, count, ins, outs);
  });
}

// A group of inputs as rounded.cpp rounds it, one number after the other.
struct RoundedInputs {
  float scale;
  int q[32] = {}, sum = 0;

  RoundedInputs(const float* x, int64_t count) {
    float largest = 0;
    for (int64_t k = 0; k < count; ++k) largest = std::max(largest, std::abs(x[k]));
    scale = largest / 127;
    const float inverse = 1 / scale;
    for (int64_t k = 0; k < count; ++k) sum += q[k] = static_cast<int>(std::nearbyint(x[k] * inverse));
  }
};

// Blocks in the order of rounded.cpp; every processor must find the same bits, those of the plain sum.
void check_rounded(int bits, int64_t ins, int64_t outs) {
  const int64_t width = verdraft_panel_width(), panels = (outs + width - 1) / width, groups = (ins + 31) / 32;
  const int64_t bytes = width * (bits == 4 ? 4 + 16 : 2 + 32);
  std::vector<uint8_t> packed(panels * groups * bytes);
  const Floats x = normal(kRows * ins), bias = normal(outs);
  Floats expected(kRows * outs);
  for (int64_t i = 0; i < kRows * outs; ++i) expected[i] = bias[i % outs];
  for (int64_t g = 0; g < groups; ++g) {
    std::vector<RoundedInputs> inputs;
    for (int64_t r = 0; r < kRows; ++r) inputs.emplace_back(&x[r * ins + g * 32], std::min<int64_t>(32, ins - g * 32));
    for (int64_t o = 0; o < outs; ++o) {
      uint8_t* group = &packed[(o / width * groups + g) * bytes];
      uint16_t* halves = reinterpret_cast<uint16_t*>(group);
      const int64_t lane = o % width;
      const uint16_t scale = random_bits() % 0x2c00, minimum = random_bits() % 0x2c00 | (random_bits() & 0x8000);
      halves[lane] = scale;
      if (bits == 4) halves[width + lane] = minimum;
      int weights[32];
      for (int k = 0; k < 32; ++k) {
        weights[k] = bits == 4 ? random_bits() % 16 : static_cast<int>(random_bits() % 255) - 127;
        const int64_t byte = (k / 4 % (bits == 4 ? 4 : 8) * width + lane) * 4 + k % 4;
        group[(bits == 4 ? 4 : 2) * width + byte] |= static_cast<uint8_t>(k < 16 || bits == 8 ? weights[k] : weights[k] << 4);
      }
      for (int64_t r = 0; r < kRows; ++r) {
        const RoundedInputs& own = inputs[r];
        int sum = 0;
        for (int k = 0; k < 32; ++k) sum += weights[k] * own.q[k];
        float& out = expected[r * outs + o];
        out += static_cast<float>(sum) * (half_value(scale) * own.scale);
        if (bits == 4) out += half_value(minimum) * (own.scale * static_cast<float>(own.sum));
      }
    }
  }
  Floats found(kRows * outs);
  verdraft_rounded_linear(bits, x.data(), ins, packed.data(), bias.data(), found.data(), kRows, ins, outs);
  require(found == expected, "rounded inputs give the bits of the plain sum", bits, ins);
  check_rows("rounded", outs, expected, [&](int64_t first, int64_t count, float* out) {
    verdraft_rounded_linear(bits, &x[first * ins], ins, packed.data(), bias.data(), out, count, ins, outs);
  });
}

void check_small(int64_t n) {
  const Floats x = normal(kRows * n, 3), gate_up = normal(kRows * 2 * n, 3), weight = normal(n), bias = normal(n);
  Floats rms, layer, silu;
  for (int r = 0; r < kRows; ++r) {
    double square = 0, mean = 0, variance = 0;
    for (int64_t i = 0; i < n; ++i) square += std::pow(x[r * n + i], 2) / n, mean += static_cast<double>(x[r * n + i]) / n;
    for (int64_t i = 0; i < n; ++i) variance += std::pow(x[r * n + i] - mean, 2) / n;
    for (int64_t i = 0; i < n; ++i) {
      const double gate = gate_up[r * 2 * n + i];
      rms.push_back(x[r * n + i] / std::sqrt(square + 1e-5) * weight[i]);
      layer.push_back((x[r * n + i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i]);
      silu.push_back(gate / (1 + std::exp(-gate)) * gate_up[r * 2 * n + n + i]);
    }
  }
  check_rows("rms_norm", n, rms, [&](int64_t first, int64_t count, float* out) {
    verdraft_rms_norm(&x[first * n], n, weight.data(), out, count, n, 1e-5f);
  });
  check_rows("layer_norm", n, layer, [&](int64_t first, int64_t count, float* out) {
    verdraft_layer_norm(&x[first * n], n, weight.data(), bias.data(), out, count, n, 1e-5f);
  });
  check_rows("silu_mul", n, silu, [&](int64_t first, int64_t count, float* out) {
    verdraft_silu_mul(&gate_up[first * 2 * n], 2 * n, out, count, n);
  });
}

void check_rope(int64_t half) {
  const Floats x = normal(kRows * 2 * half), angles = normal(kRows * half);
  Floats cos, sin, expected(x.size());
  for (float angle : angles) cos.push_back(std::cos(angle)), sin.push_back(std::sin(angle));
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < half; ++i) {
      const double a = x[r * 2 * half + i], b = x[(r * 2 + 1) * half + i], c = cos[r * half + i], s = sin[r * half + i];
      expected[r * 2 * half + i] = a * c - b * s, expected[(r * 2 + 1) * half + i] = b * c + a * s;
    }
  check_rows("rope", 2 * half, expected, [&](int64_t first, int64_t count, float* out) {
    std::copy_n(&x[first * 2 * half], count * 2 * half, out);
    float unused;
    verdraft_rope(out, 2 * half, 1, &unused, 0, 0, &cos[first * half], &sin[first * half], half, count);
  });
}

// kRows queries at the end of one context whose other slots are NaN, in pages from the last to the first.
void check_attention(int64_t context, int64_t page_size, int64_t heads, int64_t kv_heads, int64_t dim) {
  const int64_t lanes = verdraft_lanes(), pages = (context + page_size - 1) / page_size, group = heads / kv_heads;
  const int64_t keys = (page_size + lanes - 1) / lanes * lanes, padded = (dim + lanes - 1) / lanes * lanes;
  const int64_t room = (pages + verdraft_run() - 1) / verdraft_run() * verdraft_run() * kv_heads;
  Floats k_pages(room * dim * keys, std::nanf("")), v_pages(room * page_size * padded, std::nanf(""));
  const int64_t layer[] = {reinterpret_cast<int64_t>(k_pages.data()), reinterpret_cast<int64_t>(v_pages.data()), page_size, kv_heads, dim};
  const Floats q = normal(kRows * heads * dim), k = normal(context * kv_heads * dim), v = normal(context * kv_heads * dim);
  std::vector<int32_t> table(pages);
  std::vector<int64_t> slots(context);
  for (int64_t i = 0; i < pages; ++i) table[i] = pages - 1 - i;
  for (int64_t i = 0; i < context; ++i) slots[i] = table[i / page_size] * page_size + i % page_size;
  verdraft_write(k.data(), kv_heads * dim, v.data(), kv_heads * dim, layer, slots.data(), context);
  Floats expected;
  for (int r = 0; r < kRows; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      double total = 0;
      std::vector<double> sums(dim);
      for (int64_t i = 0; i <= context - kRows + r; ++i) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) score += static_cast<double>(q[(r * heads + h) * dim + d]) * k[(i * kv_heads + h / group) * dim + d];
        total += score = std::exp(score * 0.1f);
        for (int64_t d = 0; d < dim; ++d) sums[d] += score * v[(i * kv_heads + h / group) * dim + d];
      }
      for (double sum : sums) expected.push_back(sum / total);
    }
  check_rows("attend", heads * dim, expected, [&](int64_t first, int64_t count, float* out) {
    const int32_t cu_q[] = {0, static_cast<int32_t>(count)}, length = context - kRows + first + count;
    verdraft_attend(&q[first * heads * dim], heads * dim, out, heads, layer, cu_q, &length, nullptr, table.data(), pages, 1, 0.1f);
  });
}

void check_philox() {  // Random123's known answer
  const uint32_t block = 0, expected[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  uint32_t words[4];
  verdraft_philox(0, 0, 0, &block, words, 1);
  require(std::equal(words, words + 4, expected), "philox", 0, 0);
}

}  // namespace

int main() {
  for (auto [ins, outs] : {std::pair{576, 96}, {33, 65}, {7, 13}, {1, 1}, {100, 1}}) {
    check_linear(ins, outs);
    check_blocks(4, ins, outs);
    check_blocks(8, ins, outs);
    check_rounded(4, ins, outs);
    check_rounded(8, ins, outs);
  }
  for (int64_t n : {8, 40, 577}) check_small(n);
  for (int64_t half : {4, 20, 32}) check_rope(half);
  check_attention(200, 16, 3, 1, 64);
  check_attention(150, 20, 2, 2, 40);
  check_attention(131, 1, 3, 1, 8);
  check_philox();
  std::printf("every row close and its own, vectors of %ld floats\n", static_cast<long>(verdraft_lanes()));
}
