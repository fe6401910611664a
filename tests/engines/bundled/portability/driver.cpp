// Calls every kernel of kernels.cpp on data made from integers and prints a digest of each result's bits.
//
// It is compiled together with kernels.cpp, once for each machine to be compared, and needs nothing else. Each line is
// "<case> <kernel> <digest>". With the argument "hostile" the floating-point mode is wrong when the kernels are called.
#include KERNELS

#include <cstdio>
#include <string>

namespace {

uint64_t mix(uint64_t z) {  // splitmix64
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// Multiples of 2^-23 in (-1, 1), times a power of two that follows from the seed and the spread.
std::vector<float> values(uint64_t seed, size_t count, int low, int high) {
  std::vector<float> out(count);
  for (size_t i = 0; i < count; i++) {
    const uint64_t z = mix(seed * 0x9E3779B97F4A7C15u + i + 1);
    const float mantissa = float(int64_t(z >> 40) - (1 << 23)) * 0x1p-23f;
    out[i] = std::ldexp(mantissa, low + int(z % uint64_t(high - low + 1)));
  }
  return out;
}

template <class T>
uint64_t digest(const T* data, size_t count) {  // FNV-1a over the bytes, NaN as one pattern
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < count; i++) {
    T item = data[i];
    if (item != item) item = T(0x7fc00000);
    unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &item, sizeof(T));
    for (unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  }
  return hash;
}

struct Spread {
  const char* name;
  int low, high;
};
constexpr Spread SPREADS[] = {{"ordinary", 0, 0}, {"wide", -20, 20}, {"subnormal", -72, -62}};
int failures = 0;

template <class T>
void show(const std::string& name, const char* kernel, int code, const std::vector<T>& out) {
  if (code != OK) failures++;
  std::printf("%s %s %016llx%s\n", name.c_str(), kernel, (unsigned long long)digest(out.data(), out.size()),
              code == OK ? "" : " ERROR");
}

void linear_cases(const Spread& s, int threads) {
  struct { long M, N, K, width; } shapes[] = {{1, 5, 7, 3}, {3, 50, 192, 64}, {13, 97, 576, 192}, {40, 33, 1000, 256}};
  for (auto [M, N, K, width] : shapes) {
    const std::string name = std::string(s.name) + "/" + std::to_string(M) + "x" + std::to_string(N) + "x" + std::to_string(K);
    const auto x = values(1, M * K, s.low, s.high), w = values(2, N * K, s.low, s.high);
    std::vector<float> packed((N + sb_panel() - 1) / sb_panel() * sb_panel() * K + 16), out(M * N, NAN);
    float* aligned = packed.data() + (-reinterpret_cast<uintptr_t>(packed.data()) & 63) / 4;
    int code = sb_pack(w.data(), aligned, N, K, threads);
    if (code == OK) code = sb_linear(x.data(), FLOATS, aligned, nullptr, out.data(), M, N, K, width, 0, threads);
    show(name, "sb_pack sb_linear", code, out);
    show(name, "sb_linear", sb_linear(x.data(), FLOATS, aligned, nullptr, out.data(), M, N, K, width, 1, threads), out);
  }
}

// Weights that are exactly scale * code + offset, so that the kernels keep them as codes.
void coded_cases(int threads) {
  const long M = 7, N = 37, K = 96, width = 32;
  const auto x = values(3, M * K, 0, 0);
  for (int kind : {int(NIBBLES), int(BYTES)}) {
    const long most = kind == NIBBLES ? 15 : 255;
    std::vector<float> w(N * K), out(M * N, NAN);
    for (long n = 0; n < N; n++)
      for (long k = 0; k < K; k++) {
        const float scale = std::ldexp(1.0f + float(n % 7) / 8, -5 - int(n % 3));
        const long code = k % 32 == 0 ? 0 : k % 32 == 1 ? most : long(mix(n * K + k) % uint64_t(most + 1));
        w[n * K + k] = kind == NIBBLES ? std::fmaf(scale, float(code), -0.5f) : scale * float(k % 32 ? code % 255 - 127 : 127);
      }
    const long panels = (N + sb_panel() - 1) / sb_panel();
    std::vector<uint8_t> codes(panels * sb_panel() * (kind == NIBBLES ? K / 2 : K));
    std::vector<float> scales(panels * (K / CODE_ROWS) * 2 * sb_panel());
    int exact = 0, code = sb_encode(w.data(), codes.data(), scales.data(), N, K, kind, threads, &exact);
    if (!exact) failures++;
    if (code == OK) code = sb_linear(x.data(), kind, codes.data(), scales.data(), out.data(), M, N, K, width, 0, threads);
    show("codes/" + std::to_string(kind), exact ? "sb_encode exact" : "sb_encode inexact", code, out);
  }
}

void row_cases(const Spread& s, int threads) {
  const std::string name = s.name;
  for (long K : {5L, 64L, 577L}) {
    const auto x = values(4, 9 * K, s.low, s.high), gain = values(5, K, 0, 1);
    std::vector<float> out(9 * K);
    show(name + "/" + std::to_string(K), "sb_rms_norm", sb_rms_norm(x.data(), gain.data(), out.data(), 9, K, 1e-5f, threads), out);
    const auto gate_up = values(6, 9 * 2 * K, s.low / 4, s.high / 4);
    show(name + "/" + std::to_string(K), "sb_swiglu", sb_swiglu(gate_up.data(), out.data(), 9, K, threads), out);
    auto y = x;
    show(name + "/" + std::to_string(K), "sb_add_bias", sb_add_bias(y.data(), gain.data(), 9, K, threads), y);
  }
  const long experts = 13, k = 4;
  const auto logits = values(7, 9 * experts, s.low / 8, s.high / 8), outputs = values(8, 9 * k * 24, s.low, s.high);
  std::vector<int32_t> ids(9 * k);
  std::vector<float> weights(9 * k), mixed(9 * 24);
  const int code = sb_route(logits.data(), 9, experts, k, ids.data(), weights.data(), threads);
  show(name + "/ids", "sb_route", code, ids);
  show(name + "/weights", "sb_route", code, weights);
  show(name, "sb_combine", sb_combine(outputs.data(), weights.data(), mixed.data(), 9, k, 24, threads), mixed);
}

void attention_cases(const Spread& s, int threads) {
  struct { long heads, kv, dim, page, chunk, window; float scale; } shapes[] = {
      {3, 1, 64, 16, 256, 0, 0.125f}, {4, 2, 16, 8, 256, 0, 0.25f}, {5, 1, 24, 5, 16, 0, 0.204124145f},
      {3, 1, 64, 16, 256, 290, 0.125f}, {6, 2, 12, 1, 32, 21, 0.288675135f}};
  for (auto [heads, kv, dim, page, chunk, window, scale] : shapes) {
    const std::string name = std::string(s.name) + "/" + std::to_string(heads) + "," + std::to_string(dim) + "," +
                             std::to_string(page) + "," + std::to_string(window);
    const long T = 300, pages = (T + page - 1) / page, columns = (heads + 2 * kv) * dim;
    auto qkv = values(9, T * columns, s.low / 4, s.high / 4);
    const auto angles = values(10, T * dim, 0, 0), gains = values(11, 2 * dim, 0, 1);
    std::vector<float> keys(pages * kv * dim * page, NAN), stored(keys.size(), NAN), out(T * heads * dim, NAN);
    std::vector<int32_t> table(pages), sequence(T, 0), position(T);
    for (long p = 0; p < pages; p++) table[p] = int32_t((p * 7 + 3) % pages);  // 7 divides none of the counts of pages
    for (long t = 0; t < T; t++) position[t] = int32_t(t);
    show(name, "sb_norm_heads",
         sb_norm_heads(qkv.data(), gains.data(), gains.data() + dim, T, heads, kv, dim, 1e-6f, threads), qkv);
    const int code = sb_rope_store(qkv.data(), angles.data(), keys.data(), stored.data(), table.data(), pages,
                                   sequence.data(), position.data(), T, heads, kv, dim, page, threads);
    show(name, "sb_rope_store", code, qkv);
    show(name + "/keys", "sb_rope_store", code, keys);
    show(name, "sb_attend",
         sb_attend(qkv.data(), keys.data(), stored.data(), table.data(), pages, sequence.data(), position.data(), out.data(),
                   T, heads, kv, dim, page, scale, chunk, window, threads), out);
  }
}

void sampling_cases(int threads) {
  const long n = 5000, W = 3;
  auto logits = values(12, W * n, -1, 4);
  for (long i = 0; i < n; i += 37) logits[i] = i % 2 ? 0.0f : -0.0f;  // ties, and both zeros
  std::vector<float> out(W * n);
  show("logits", "sb_log_softmax", sb_log_softmax(logits.data(), out.data(), W, n, threads), out);
  for (long k : {1L, 50L, 700L}) {
    std::vector<int32_t> ids(W * k);
    show("logits/" + std::to_string(k), "sb_top_k", sb_top_k(logits.data(), W, n, k, ids.data()), ids);
  }
  std::vector<int32_t> drawn;
  int code = OK;
  for (int i = 0; i < 60; i++) {
    int32_t id = -1;
    const float u = float(mix(i) >> 40) * 0x1p-24f, p = i % 3 ? 0.9f : 1.0f, least = i % 5 ? 0.0f : 0.05f;
    code |= sb_draw(logits.data() + i % W * n, n, 0.5f + 0.125f * float(i % 9), i % 4 * 25, p, least, u, &id);
    drawn.push_back(id);
  }
  show("logits", "sb_draw", code, drawn);
  long row = 7;
  logits[n + 5] = INFINITY;
  code = sb_check_finite(logits.data(), W, n, &row);
  show("logits", "sb_check_finite", code, std::vector<int32_t>{int32_t(row)});
}

void function_cases(int threads) {
  std::vector<float> x;
  for (uint64_t b = 0; b < (1ull << 32); b += 40009) x.push_back(std::bit_cast<float>(uint32_t(b)));  // all of float32
  std::vector<float> out(x.size());
  show("all", "sb_exp", sb_exp(x.data(), out.data(), long(x.size()), threads), out);
  show("all", "sb_log", sb_log(x.data(), out.data(), long(x.size()), threads), out);
}

void spoil_mode() {  // flush subnormals to zero and round upwards
#if defined(__x86_64__)
  _mm_setcsr(0x1f80 | 0x8040 | 0x4000);
#elif defined(__aarch64__)
  uint64_t mode = 1ull << 24 | 1ull << 22;
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

}  // namespace

int main(int count, char** arguments) {
  const bool hostile = count > 1 && std::string(arguments[1]) == "hostile";
  for (int threads : {1, 2}) {
    std::printf("threads %d\n", threads);
    if (hostile) spoil_mode();  // what this file itself computes is exact in every mode
    for (const Spread& s : SPREADS) linear_cases(s, threads), row_cases(s, threads), attention_cases(s, threads);
    coded_cases(threads), sampling_cases(threads), function_cases(threads);
  }
  std::printf("threads seen %s\n", sb_threads_seen() >= 2 ? "2" : "1");
  return failures ? 1 : 0;
}
