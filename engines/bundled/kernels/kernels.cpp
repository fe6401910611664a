// The float32 kernels of docs/numerics.md, behind a plain C ABI. One source for AVX-512, AVX2 and any other machine.
//
// Rules: every output is one fixed expression of its own row; threads and tiles only choose who computes it. Every
// fused multiply-add is written out and contraction is off. The floating-point environment is set and checked in
// every thread that works. Functions return OK or the code of an error; nothing throws across the ABI.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

enum Code : int { OK = 0, BAD_ENVIRONMENT = 1, NO_MEMORY = 2, BAD_ARGUMENT = 3 };

// ---- floating-point environment -------------------------------------------------------------------------------------
// Round to nearest even, subnormals kept. Set on entry, restored on exit, and checked by what arithmetic really does.

class Environment {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  void set() { _mm_setcsr(0x1f80); }
  void restore() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved = read();
  static uint64_t read() { uint64_t v; asm volatile("mrs %0, fpcr" : "=r"(v)); return v; }
  static void write(uint64_t v) { asm volatile("msr fpcr, %0" : : "r"(v)); }
  void set() { write(0); }
  void restore() { write(saved); }
#else
  fenv_t saved;
  void set() { fegetenv(&saved); fesetround(FE_TONEAREST); }
  void restore() { fesetenv(&saved); }
#endif

 public:
  Environment() { set(); }
  ~Environment() { restore(); }
  Environment(const Environment&) = delete;

  static bool good() {
    volatile float normal = 0x1p-126f, half = 0.5f, one = 1.0f, tie = 0x1p-24f, above = 0x1.8p-24f;
    volatile float subnormal = normal * half, back = subnormal + subnormal, down = one + tie, up = one + above;
    volatile float low = -one - tie;
    return subnormal != 0.0f && back == normal && down == 1.0f && up > 1.0f && low == -1.0f;
  }
};

// ---- threads ----------------------------------------------------------------------------------------------------------
// A pool that hands out independent tasks. Waiting spins for some microseconds and then sleeps, so that a busy
// neighbour costs little. A thread that wakes too late finds no task left; nobody waits for it.

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class T>
T wait_while(const std::atomic<T>& value, T old) {
  for (int i = 0; i < 600; i++, relax())
    if (T now = value.load(); now != old) return now;
  value.wait(old);
  return value.load();
}

class Pool {
  using Body = void (*)(const void*, long);
  std::mutex gate;  // one job at a time
  std::atomic<unsigned> epoch{0};
  std::atomic<bool> open{false};
  std::atomic<int> active{0}, code{OK}, used{0}, most{0};
  std::atomic<long> next{0};
  long total = 0;
  int wanted = 1, started = 1;
  Body body = nullptr;
  const void* context = nullptr;

  void work() noexcept {
    Environment environment;
    if (!Environment::good()) { code = BAD_ENVIRONMENT; return; }
    bool any = false;
    try {
      for (long i; (i = next.fetch_add(1)) < total; any = true) body(context, i);
    } catch (const std::bad_alloc&) {
      code = NO_MEMORY;
    }
    if (any) used.fetch_add(1);
  }

  void serve(int index) {
    for (unsigned seen = 0;;) {
      seen = wait_while(epoch, seen);
      active.fetch_add(1);
      if (open.load() && index < wanted) work();
      if (active.fetch_sub(1) == 1) active.notify_all();
    }
  }

  void dispatch(long tasks, Body task, const void* argument) {
    total = tasks, body = task, context = argument, next = 0, used = 0;
    if (wanted > 1) open = true, epoch.fetch_add(1), epoch.notify_all();
    work();
    open = false;
    for (int n; (n = active.load()) != 0;) wait_while(active, n);
    if (used.load() > most.load()) most = used.load();
  }

  // Starts what is missing and lets every thread take one task, so that threads_seen() tells who can work.
  void start() {
    try {
      for (; started < wanted; started++) std::thread([this, i = started] { serve(i); }).detach();
    } catch (...) {  // fewer threads than asked for give the same bits; threads_seen() tells
    }
    struct Muster { std::atomic<int> here{0}; int all; } muster{{}, started};
    dispatch(started, [](const void* argument, long) {
      Muster& m = *static_cast<Muster*>(const_cast<void*>(argument));
      m.here.fetch_add(1);
      for (int i = 0; i < 20000 && m.here.load() < m.all; i++) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }, &muster);
  }

 public:
  template <class F>
  int run(long tasks, int threads, const F& task) {
    std::lock_guard<std::mutex> lock(gate);
    code = OK, wanted = std::max(threads, 1);
    if (started < wanted) start();
    wanted = int(std::min<long>(wanted, std::max<long>(tasks, 1)));
    dispatch(tasks, [](const void* f, long i) { (*static_cast<const F*>(f))(i); }, &task);
    return code.load();
  }
  int threads_seen() const { return most.load(); }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: its threads outlive static destructors
  return *instance;
}

// ---- vectors ------------------------------------------------------------------------------------------------------------

template <int N>
struct Lanes { typedef float type __attribute__((vector_size(4 * N))); };
template <int N>
using Vec = typename Lanes<N>::type;

template <class T>
inline T load(const float* p) { T v; std::memcpy(&v, p, sizeof v); return v; }
template <class T>
inline void store(float* p, T v) { std::memcpy(p, &v, sizeof v); }
template <class T>
constexpr int lanes() { return int(sizeof(T) / 4); }

template <class T>
inline T splat(float a) { T v; for (int j = 0; j < lanes<T>(); j++) v[j] = a; return v; }
template <class T>
inline T fma(T a, T b, T c) { T v; for (int j = 0; j < lanes<T>(); j++) v[j] = std::fmaf(a[j], b[j], c[j]); return v; }
template <>
inline float splat<float>(float a) { return a; }
template <>
inline float fma<float>(float a, float b, float c) { return std::fmaf(a, b, c); }

#if defined(__AVX512F__)
template <> inline Vec<16> splat<Vec<16>>(float a) { return (Vec<16>)_mm512_set1_ps(a); }
template <> inline Vec<16> fma<Vec<16>>(Vec<16> a, Vec<16> b, Vec<16> c) {
  return (Vec<16>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#endif
#if defined(__FMA__)
template <> inline Vec<8> splat<Vec<8>>(float a) { return (Vec<8>)_mm256_set1_ps(a); }
template <> inline Vec<8> fma<Vec<8>>(Vec<8> a, Vec<8> b, Vec<8> c) {
  return (Vec<8>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
template <> inline Vec<4> splat<Vec<4>>(float a) { return (Vec<4>)_mm_set1_ps(a); }
template <> inline Vec<4> fma<Vec<4>>(Vec<4> a, Vec<4> b, Vec<4> c) {
  return (Vec<4>)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
}
#elif defined(__aarch64__)
template <> inline Vec<4> fma<Vec<4>>(Vec<4> a, Vec<4> b, Vec<4> c) {
  return (Vec<4>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#endif

// Width of a vector, vectors per weight panel, rows per register block: they choose speed, never bits.
#if defined(__AVX512F__)
constexpr int VL = 16, PANEL_VECTORS = 3, BLOCK_ROWS = 9;
#elif defined(__FMA__)
constexpr int VL = 8, PANEL_VECTORS = 2, BLOCK_ROWS = 6;
#else
constexpr int VL = 4, PANEL_VECTORS = 4, BLOCK_ROWS = 4;
#endif
using V = Vec<VL>;
constexpr long PANEL = VL * PANEL_VECTORS;  // columns of a weight panel
constexpr int MOST_BLOCKS = 4;              // row blocks that share a chunk of weights
constexpr int LEVELS = 63;                  // of the tree T: enough for any count of chunks

// ---- functions ------------------------------------------------------------------------------------------------------------

inline float exp1(float x) {
  float c = x > 88.0f ? 88.0f : x;
  c = c < -87.0f ? -87.0f : c;
  float n = std::fmaf(c, 1.44269504f, 12582912.0f);
  const uint32_t i = std::bit_cast<uint32_t>(n);
  n -= 12582912.0f;
  float r = std::fmaf(n, -0.693359375f, c);
  r = std::fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fmaf(p, r, 1.3981999507e-3f);
  p = std::fmaf(p, r, 8.3334519073e-3f);
  p = std::fmaf(p, r, 4.1665795894e-2f);
  p = std::fmaf(p, r, 1.6666665459e-1f);
  p = std::fmaf(p, r, 5.0000001201e-1f);
  p = std::fmaf(p, r * r, r) + 1.0f;
  const float e = p * std::bit_cast<float>((i + 127u) << 23);
  return x < -87.0f ? 0.0f : e;
}

inline float log1(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -INFINITY : NAN;
  if (x == INFINITY) return x;
  int32_t shift = 126;
  if (x < 0x1p-126f) x *= 0x1p24f, shift += 24;
  const int32_t b = std::bit_cast<int32_t>(x);
  int32_t e = (b >> 23) - shift;
  float m = std::bit_cast<float>((b & 0x007fffff) | 0x3f000000);
  if (m < 0.707106781186547524f) {
    e -= 1;
    m = m + m - 1.0f;
  } else {
    m = m - 1.0f;
  }
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = std::fmaf(p, m, -1.1514610310e-1f);
  p = std::fmaf(p, m, 1.1676998740e-1f);
  p = std::fmaf(p, m, -1.2420140846e-1f);
  p = std::fmaf(p, m, 1.4249322787e-1f);
  p = std::fmaf(p, m, -1.6668057665e-1f);
  p = std::fmaf(p, m, 2.0000714765e-1f);
  p = std::fmaf(p, m, -2.4999993993e-1f);
  p = std::fmaf(p, m, 3.3333331174e-1f);
  float y = m * z;
  y = y * p;
  const float f = float(e);
  y = std::fmaf(f, -2.12194440e-4f, y);
  y = std::fmaf(-0.5f, z, y);
  return std::fmaf(f, 0.693359375f, m + y);
}

// 16 lanes folded by halves: lane i += lane i + 8, then 4, 2, 1.
inline float fold(float* a) {
  for (int s = 8; s; s >>= 1)
    for (int j = 0; j < s; j++) a[j] += a[j + s];
  return a[0];
}

// Maximum of values without NaN; exact, so any order will do. Returns the value of some maximal element.
inline float maximum(const float* x, long n) {
  float m[16];
  std::fill(m, m + 16, -INFINITY);
  long i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; j++) m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
  for (; i < n; i++) m[0] = x[i] > m[0] ? x[i] : m[0];
  return *std::max_element(m, m + 16);
}

// The tree T over chunk sums that arrive in order, as a binary counter: equal subtrees merge at once, the rest from
// the right. Sums are vectors of `size` floats.
class Tree {
  std::vector<float> sums;
  long size, count = 0;
  int depth = 0;

  void merge() {
    float *left = at(depth - 2), *right = at(depth - 1);
    for (long i = 0; i < size; i++) left[i] = left[i] + right[i];
    depth--;
  }

 public:
  Tree(long size, long chunks) : sums(size_t(size) * (std::bit_width(uint64_t(chunks)) + 2)), size(size) {}
  float* at(int level) { return sums.data() + level * size; }
  float* open() { return at(depth); }  // where the next chunk sum is to be written
  void push() {
    depth++;
    for (long t = count++; t & 1; t >>= 1) merge();
  }
  const float* close() {
    while (depth > 1) merge();
    return at(0);
  }
};

// ---- weights --------------------------------------------------------------------------------------------------------------
// A panel holds PANEL columns (outputs), row k after row k. Weights that came out of a 4-bit or 8-bit block format are
// kept as codes when that is exact: for every 32 rows a scale and an offset per column, with fma(scale, code, offset)
// equal to the float32 weight in every bit. The codes are only a shorter way to store the same weights.

constexpr long CODE_ROWS = 32;
enum Kind : int { FLOATS = 0, NIBBLES = 4, BYTES = 8 };

struct Weights {
  Kind kind;
  const void* data;     // [panel][K][PANEL] floats or bytes, or [panel][K / 2][PANEL] bytes: row k low, k + 1 high
  const float* scales;  // [panel][K / 32][scale, offset][PANEL]
  long K;
};

typedef int32_t Words __attribute__((vector_size(4 * VL)));
#if defined(__AVX512F__)
inline Words widen(const uint8_t* p) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline V to_floats(Words q) { return (V)_mm512_cvtepi32_ps((__m512i)q); }
#elif defined(__AVX2__)
inline Words widen(const uint8_t* p) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline V to_floats(Words q) { return (V)_mm256_cvtepi32_ps((__m256i)q); }
#else
inline Words widen(const uint8_t* p) { Words q; for (int j = 0; j < VL; j++) q[j] = p[j]; return q; }
inline V to_floats(Words q) { return __builtin_convertvector(q, V); }
#endif

template <Kind kind>
struct Panel {
  const uint8_t* codes;
  const float* scales;

  Panel(const Weights& w, long p)
      : codes(static_cast<const uint8_t*>(w.data) + p * PANEL * (kind == NIBBLES ? w.K / 2 : w.K)),
        scales(w.scales + p * PANEL * 2 * (w.K / CODE_ROWS)) {}
  V at(long k, int h) const {
    Words q = widen(codes + (kind == NIBBLES ? k / 2 : k) * PANEL + h * VL);
    if (kind == NIBBLES) q = q >> int(4 * (k & 1)) & 15;
    const float* s = scales + k / CODE_ROWS * 2 * PANEL + h * VL;
    return fma<V>(load<V>(s), to_floats(q), load<V>(s + PANEL));
  }
  void prefetch(long k) const { __builtin_prefetch(codes + (kind == NIBBLES ? k / 2 : k) * PANEL + 2048); }
};

template <>
struct Panel<FLOATS> {
  const float* data;

  Panel(const Weights& w, long p) : data(static_cast<const float*>(w.data) + p * PANEL * w.K) {}
  explicit Panel(const float* data) : data(data) {}
  V at(long k, int h) const { return load<V>(data + k * PANEL + h * VL); }
  void prefetch(long k) const {
    for (int h = 0; h < PANEL_VECTORS; h++) __builtin_prefetch(data + (k + 16) * PANEL + h * VL);
  }
};

template <Kind kind>
void expand(const Panel<kind>& panel, long K, float* out) {
  for (long k = 0; k < K; k++)
    for (int h = 0; h < PANEL_VECTORS; h++) store(out + k * PANEL + h * VL, panel.at(k, h));
}

// The float nearest to x among those of 11 significant bits, as half precision has.
inline float half_bits(float x) {
  const uint32_t b = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((b + 0xfffu + (b >> 13 & 1u)) & ~0x1fffu);
}

// Codes of 32 weights of one column, or false: then no scale of that format gives back every bit.
bool encode(const float* w, Kind kind, float& scale, float& offset, uint8_t* codes) {
  float low = w[0], high = w[0];
  for (int i = 1; i < CODE_ROWS; i++) low = std::min(low, w[i]), high = std::max(high, w[i]);
  const float most = kind == NIBBLES ? 15.0f : 255.0f;
  scale = half_bits(kind == NIBBLES ? (high - low) / most : std::max(-low, high) / 127.0f);
  offset = kind == NIBBLES ? low : -128.0f * scale;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  uint32_t wrong = 0;
  for (int i = 0; i < CODE_ROWS; i++) {
    const float q = std::min(most, std::max(0.0f, std::nearbyint((w[i] - offset) * inverse)));
    codes[i] = uint8_t(int(q));
    wrong |= std::bit_cast<uint32_t>(std::fmaf(scale, q, offset)) ^ std::bit_cast<uint32_t>(w[i]);
  }
  return !wrong;
}

// One panel of an (N, K) matrix as codes; false when it is not exact. `columns` may be short of PANEL.
bool encode_panel(const float* weight, long columns, long K, Kind kind, uint8_t* data, float* scales) {
  for (long j = 0; j < columns; j++)
    for (long b = 0; b < K / CODE_ROWS; b++) {
      uint8_t codes[CODE_ROWS];
      float* s = scales + b * 2 * PANEL + j;
      if (!encode(weight + j * K + b * CODE_ROWS, kind, s[0], s[PANEL], codes)) return false;
      uint8_t* to = data + b * CODE_ROWS * PANEL / (kind == NIBBLES ? 2 : 1) + j;
      for (int i = 0; i < CODE_ROWS; i++) {
        if (kind == BYTES) to[i * PANEL] = codes[i];
        else if (i % 2 == 0) to[i / 2 * PANEL] = uint8_t(codes[i] | codes[i + 1] << 4);
      }
    }
  return true;
}

// ---- linear -----------------------------------------------------------------------------------------------------------------

// `blocks` times R rows of x times one panel. Chains run inside chunks of `width`; chunk sums go through the tree T.
// All blocks take their turn at a chunk before the next one, so that its weights come from the nearest cache.
template <int R, Kind kind>
void block(const float* x, Panel<kind> panel, long K, long width, float* out, long ldo, long columns, bool add,
           int blocks) {
  constexpr int NV = PANEL_VECTORS;
  V stack[MOST_BLOCKS][LEVELS][R][NV];
  int depth = 0;
  for (long k0 = 0, chunk = 0; k0 < K; k0 += width, chunk++) {
    const long k1 = std::min(k0 + width, K);
    for (int b = 0; b < blocks; b++) {
      const float* rows = x + b * R * K;
      V a[R][NV];
      for (int i = 0; i < R; i++)
        for (int h = 0; h < NV; h++) a[i][h] = splat<V>(0.0f);
      for (long k = k0; k < k1; k++) {
        V v[NV];
#pragma GCC unroll 4
        for (int h = 0; h < NV; h++) v[h] = panel.at(k, h);
        panel.prefetch(k);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
          const V s = splat<V>(rows[i * K + k]);
#pragma GCC unroll 4
          for (int h = 0; h < NV; h++) a[i][h] = fma<V>(s, v[h], a[i][h]);
        }
      }
      int level = depth;
      for (long t = chunk; t & 1; t >>= 1) {
        level--;
        for (int i = 0; i < R; i++)
          for (int h = 0; h < NV; h++) a[i][h] = stack[b][level][i][h] + a[i][h];
      }
      for (int i = 0; i < R; i++)
        for (int h = 0; h < NV; h++) stack[b][level][i][h] = a[i][h];
    }
    depth = std::popcount(uint64_t(chunk + 1));  // what the merges of this chunk leave
  }
  for (int b = 0; b < blocks; b++)
    for (int i = 0; i < R; i++) {
      float row[PANEL], *o = out + (b * R + i) * ldo;
      for (int h = 0; h < NV; h++) {
        V sum = stack[b][depth - 1][i][h];
        for (int level = depth - 2; level >= 0; level--) sum = stack[b][level][i][h] + sum;
        store(row + h * VL, sum);
      }
      if (add)
        for (long j = 0; j < columns; j++) row[j] = o[j] + row[j];
      std::copy(row, row + columns, o);
    }
}

template <Kind kind>
using Block = void (*)(const float*, Panel<kind>, long, long, float*, long, long, bool, int);
template <Kind kind, int... R>
Block<kind> block_of(long rows, std::integer_sequence<int, R...>) {
  constexpr Block<kind> table[] = {block<R + 1, kind>...};
  return table[rows - 1];
}

constexpr int CODED_ROWS = 4;  // up to here reading codes beats making floats of them first

struct Product {
  const float* x;
  Weights weights;
  float* out;
  long M, N, width;
  bool add;

  template <Kind kind>
  void rows(Panel<kind> panel, long p, long m0, long m1) const {
    constexpr int MOST = kind == FLOATS ? BLOCK_ROWS : CODED_ROWS;
    const long count = m1 - m0, fewest = (count + MOST - 1) / MOST, height = (count + fewest - 1) / fewest;
    for (long m = m0; m < m1;) {
      const long left = m1 - m, tall = std::min(height, left);
      const int blocks = int(std::min<long>(MOST_BLOCKS, left / tall));
      block_of<kind>(tall, std::make_integer_sequence<int, MOST>())(
          x + m * weights.K, panel, weights.K, width, out + m * N + p * PANEL, N, std::min(PANEL, N - p * PANEL), add,
          blocks);
      m += tall * blocks;
    }
  }

  // Few rows read the codes directly; many rows share one panel of floats made from them.
  template <Kind kind>
  void coded(long p, long m0, long m1) const {
    const Panel<kind> panel(weights, p);
    if (m1 - m0 <= CODED_ROWS) return rows(panel, p, m0, m1);
    thread_local std::vector<float> floats;
    floats.resize(weights.K * PANEL + VL);
    float* aligned = floats.data() + (-reinterpret_cast<uintptr_t>(floats.data()) & (4 * VL - 1)) / 4;
    expand(panel, weights.K, aligned);
    rows(Panel<FLOATS>(aligned), p, m0, m1);
  }

  void panel(long p, long m0, long m1) const {
    if (weights.kind == FLOATS) rows(Panel<FLOATS>(weights, p), p, m0, m1);
    if (weights.kind == NIBBLES) coded<NIBBLES>(p, m0, m1);
    if (weights.kind == BYTES) coded<BYTES>(p, m0, m1);
  }
};

int linear(const Product& product, int threads) {
  const long M = product.M, panels = (product.N + PANEL - 1) / PANEL;
  const long most = (M + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const long bands = std::min(most, std::max((M + 64 * BLOCK_ROWS - 1) / (64 * BLOCK_ROWS), 4 * threads / panels));
  const long height = bands ? (most + bands - 1) / bands * BLOCK_ROWS : 0;  // rows of a task
  const long group = std::max(1L, panels * bands / (8L * threads));         // panels of a task
  const long groups = (panels + group - 1) / group;
  return pool().run(groups * bands, threads, [&](long task) {
    const long m0 = task / groups * height, m1 = std::min(m0 + height, M);
    for (long p = task % groups * group, last = std::min(p + group, panels); p < last && m0 < m1; p++)
      product.panel(p, m0, m1);
  });
}

// ---- attention ------------------------------------------------------------------------------------------------------------------

struct Cache {
  const float *keys, *values;  // [page][kv head][dim][slot] and [page][kv head][slot][dim]
  const int32_t* table;        // pages of this sequence
  long page_size, kv_heads, head, dim;

  const float* key(long position) const {
    return keys + (table[position / page_size] * kv_heads + head) * dim * page_size + position % page_size;
  }
  const float* value(long position) const {
    return values + ((table[position / page_size] * kv_heads + head) * page_size + position % page_size) * dim;
  }
};

// Scores of G heads against lanes<T>() * U keys: chains over the head dimension.
template <class T, int G, int U>
void score(const float* q, const Cache& c, long position, float* out, long ldo) {
  const float* k[U];
  for (int u = 0; u < U; u++) k[u] = c.key(position + u * lanes<T>());
  T a[G][U];
  for (int g = 0; g < G; g++)
    for (int u = 0; u < U; u++) a[g][u] = splat<T>(0.0f);
  for (long d = 0; d < c.dim; d++) {
    T v[U];
    for (int u = 0; u < U; u++) v[u] = load<T>(k[u] + d * c.page_size);
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      const T s = splat<T>(q[g * c.dim + d]);
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) a[g][u] = fma<T>(s, v[u], a[g][u]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int u = 0; u < U; u++) store(out + g * ldo + position + u * lanes<T>(), a[g][u]);
}

// All scores of keys begin..length, in vectors that divide a page, so that no vector reads past one. `begin` is a
// multiple of 16.
template <class T, int G>
void scores(const float* q, const Cache& c, long begin, long length, float* out, long ldo) {
  constexpr int U = 4, W = lanes<T>();
  long p = begin;
  for (; p + U * W <= length; p += U * W) score<T, G, U>(q, c, p, out, ldo);
  for (; p < length; p += W) score<T, G, 1>(q, c, p, out, ldo);
}

// P V over keys [begin, end): chains over keys in order, lanes are dimensions [0, lanes<T>() * U).
template <class T, int G, int U>
void combine(const float* p, long ldp, const Cache& c, long begin, long end, long dim0, float* out) {
  T a[G][U];
  for (int g = 0; g < G; g++)
    for (int u = 0; u < U; u++) a[g][u] = splat<T>(0.0f);
  for (long t = begin; t < end;) {
    const long stop = std::min(end, t - t % c.page_size + c.page_size);
    const float* v = c.value(t) + dim0;
    for (; t < stop; t++, v += c.dim) {
      T w[U];
      for (int u = 0; u < U; u++) w[u] = load<T>(v + u * lanes<T>());
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const T s = splat<T>(p[g * ldp + t]);
#pragma GCC unroll 4
        for (int u = 0; u < U; u++) a[g][u] = fma<T>(s, w[u], a[g][u]);
      }
    }
  }
  for (int g = 0; g < G; g++)
    for (int u = 0; u < U; u++) store(out + g * c.dim + dim0 + u * lanes<T>(), a[g][u]);
}

template <class T, int G>
void combine_all(const float* p, long ldp, const Cache& c, long begin, long end, float* out) {
  constexpr int U = 4, W = lanes<T>();
  long d = 0;
  for (; d + U * W <= c.dim; d += U * W) combine<T, G, U>(p, ldp, c, begin, end, d, out);
  for (; d < c.dim; d += W) combine<T, G, 1>(p, ldp, c, begin, end, d, out);
}

// Calls f with the widest vector type whose width divides n.
template <class F>
void with_width(long n, const F& f) {
  if (VL >= 16 && n % 16 == 0) return f(Vec<(VL >= 16 ? 16 : VL)>{});
  if (VL >= 8 && n % 8 == 0) return f(Vec<(VL >= 8 ? 8 : VL)>{});
  if (n % 4 == 0) return f(Vec<4>{});
  return f(float{});
}

// The keys first..length that a token sees, and the chunks by absolute position that hold them.
struct Span {
  long first, length, key_chunk;

  long aligned() const { return first / 16 * 16; }            // scores start here; those below `first` do not count
  long padded() const { return (length + 15) / 16 * 16; }
  long chunk() const { return first / key_chunk * key_chunk; }  // start of the first chunk
  long chunks() const { return (length - chunk() + key_chunk - 1) / key_chunk; }
};

// Scores become exp(score - maximum); returns nothing but fills the chunk sums' tree.
void exponentials(float* row, const Span& span, Tree& sums) {
  std::fill(row + span.aligned(), row + span.first, -INFINITY);
  std::fill(row + span.length, row + span.padded(), -INFINITY);
  const float m = maximum(row + span.first, span.length - span.first);
  for (long begin = span.chunk(); begin < span.length; begin += span.key_chunk) {
    float a[16] = {0};
    for (long t = std::max(begin, span.aligned()), end = std::min(begin + span.key_chunk, span.padded()); t < end; t += 16)
      for (int j = 0; j < 16; j++) {
        row[t + j] = exp1(row[t + j] - m);
        a[j] += row[t + j];
      }
    *sums.open() = fold(a);
    sums.push();
  }
}

// G query heads of one token that share a KV head.
template <int G>
void attend_group(const float* query, const Cache& c, float scale, const Span& span, float* out) {
  const long padded = span.padded();
  const auto p = std::make_unique_for_overwrite<float[]>(G * padded);  // what lies before the window is never touched
  std::vector<float> q(G * c.dim);
  for (long i = 0; i < G * c.dim; i++) q[i] = query[i] * scale;
  with_width(c.page_size, [&]<class T>(T) { scores<T, G>(q.data(), c, span.aligned(), span.length, p.get(), padded); });
  float total[G];
  for (int g = 0; g < G; g++) {
    Tree sums(1, span.chunks());
    exponentials(p.get() + g * padded, span, sums);
    total[g] = *sums.close();
  }
  Tree outputs(G * c.dim, span.chunks());
  for (long begin = span.chunk(); begin < span.length; begin += span.key_chunk, outputs.push())
    with_width(c.dim, [&]<class T>(T) {
      combine_all<T, G>(p.get(), padded, c, std::max(begin, span.first), std::min(begin + span.key_chunk, span.length),
                        outputs.open());
    });
  const float* o = outputs.close();
  for (int g = 0; g < G; g++)
    for (long d = 0; d < c.dim; d++) out[g * c.dim + d] = o[g * c.dim + d] / total[g];
}

void attend_heads(const float* q, const Cache& c, long heads, float scale, const Span& span, float* out) {
  for (; heads >= 4; heads -= 4, q += 4 * c.dim, out += 4 * c.dim) attend_group<4>(q, c, scale, span, out);
  if (heads == 3) attend_group<3>(q, c, scale, span, out);
  if (heads == 2) attend_group<2>(q, c, scale, span, out);
  if (heads == 1) attend_group<1>(q, c, scale, span, out);
}

// ---- sampling -------------------------------------------------------------------------------------------------------------------

struct Candidate {
  uint32_t key;  // ascending key is descending value; -0.0 equals 0.0
  int32_t id;
};

inline uint32_t descending_key(float x) {
  const uint32_t b = std::bit_cast<uint32_t>(x + 0.0f);
  return b & 0x80000000u ? b : ~b & 0x7fffffffu;
}

inline float value_of(uint32_t key) { return std::bit_cast<float>(key & 0x80000000u ? key : ~key & 0x7fffffffu); }

// Stable by key, so equal values stay in ascending order of id. Three passes of 11 bits, counted in one.
void radix_sort(std::vector<Candidate>& items) {
  constexpr int DIGITS = 2048;
  static_assert(sizeof(Candidate) == 8);
  std::vector<uint32_t> start(3 * DIGITS);
  thread_local std::vector<Candidate> other;  // kept: fresh pages of memory cost more than the sort
  other.resize(items.size());
  for (const Candidate& c : items)
    for (int pass = 0; pass < 3; pass++) start[pass * DIGITS + (c.key >> 11 * pass & (DIGITS - 1))]++;
  for (int pass = 0; pass < 3; pass++) {
    uint32_t* at = start.data() + pass * DIGITS;
    for (uint32_t i = 0, sum = 0, n; i < DIGITS; i++, sum += n) n = at[i], at[i] = sum;
    for (const Candidate& c : items) other[at[c.key >> 11 * pass & (DIGITS - 1)]++] = c;
    items.swap(other);
  }
}

void top_few(const float* x, long n, long k, int32_t* ids) {
  std::vector<float> value(k + 1);
  long held = 0;
  for (long i = 0; i < n; i++) {
    if (held == k && !(x[i] > value[k - 1])) continue;
    long j = held < k ? held++ : k - 1;
    for (; j > 0 && x[i] > value[j - 1]; j--) value[j] = value[j - 1], ids[j] = ids[j - 1];
    value[j] = x[i], ids[j] = int32_t(i);
  }
}

void top_many(const float* x, long n, long k, int32_t* ids) {
  std::vector<Candidate> items(n);
  for (long i = 0; i < n; i++) items[i] = {descending_key(x[i]), int32_t(i)};
  radix_sort(items);
  for (long i = 0; i < k; i++) ids[i] = items[i].id;
}

struct Weighed {
  float weight;
  int32_t id;
};

// Unmasked ids of weight above zero, sorted; at most k of them when k is above 0.
std::vector<Weighed>& candidates(const float* x, long n, float temperature, long k) {
  thread_local std::vector<Candidate> items;
  thread_local std::vector<Weighed> out;
  const float m = maximum(x, n);
  items.resize(n);
  size_t count = 0;
  for (long i = 0; i < n; i++) {
    items[count] = {descending_key(x[i]), int32_t(i)};
    count += !((x[i] - m) / temperature < -87.0f);
  }
  items.resize(count);
  radix_sort(items);
  if (k > 0 && k < long(items.size())) items.resize(k);
  out.resize(items.size());
  for (size_t i = 0; i < out.size(); i++) out[i] = {exp1((value_of(items[i].key) - m) / temperature), items[i].id};
  return out;
}

float sum_in_order(const std::vector<Weighed>& items) {
  float c = 0.0f;
  for (const Weighed& w : items) c += w.weight;
  return c;
}

void keep_top_p(std::vector<Weighed>& items, float p) {
  const float enough = p * sum_in_order(items);
  float c = 0.0f;
  size_t kept = 0;
  while (kept < items.size() && (kept == 0 || !(c >= enough))) c += items[kept++].weight;
  items.resize(kept);
}

int32_t draw(const float* x, long n, float temperature, long k, float p, float min_p, float u) {
  std::vector<Weighed>& items = candidates(x, n, temperature, k);
  const float least = min_p * items[0].weight;
  if (p < 1.0f) keep_top_p(items, p);
  std::erase_if(items, [=](const Weighed& w) { return !(w.weight >= least); });
  const float target = u * sum_in_order(items);
  float c = 0.0f;
  for (const Weighed& w : items)
    if ((c += w.weight) > target) return w.id;
  return items.back().id;
}

void log_softmax_row(const float* x, float* out, long n) {
  constexpr long CHUNK = 768;
  const float m = maximum(x, n);
  Tree sums(1, (n + CHUNK - 1) / CHUNK);
  for (long begin = 0; begin < n; begin += CHUNK, sums.push()) {
    float a[16] = {0};
    const long end = std::min(begin + CHUNK, n);
    long i = begin;
    for (; i + 16 <= end; i += 16)
      for (int j = 0; j < 16; j++) a[j] += exp1(x[i + j] - m);
    for (int j = 0; i + j < end; j++) a[j] += exp1(x[i + j] - m);
    *sums.open() = fold(a);
  }
  const float l = log1(*sums.close());
  for (long i = 0; i < n; i++) out[i] = (x[i] - m) - l;
}

bool finite(const float* x, long n) {
  uint32_t bad = 0;
  for (long i = 0; i < n; i++) bad |= (std::bit_cast<uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u;
  return !bad;
}

void rms_norm_row(const float* x, const float* gain, float* out, long n, float eps) {
  float a[16] = {0};
  long k = 0;
  for (; k + 16 <= n; k += 16)
    for (int j = 0; j < 16; j++) a[j] = std::fmaf(x[k + j], x[k + j], a[j]);
  for (int j = 0; k + j < n; j++) a[j] = std::fmaf(x[k + j], x[k + j], a[j]);
  const float root = std::sqrt(fold(a) / float(n) + eps);
  for (long i = 0; i < n; i++) out[i] = (x[i] / root) * gain[i];
}

void rotate(float* head, const float* cosine, const float* sine, long half) {
  for (long j = 0; j < half; j++) {
    const float a = head[j], b = head[j + half];
    head[j] = a * cosine[j] - b * sine[j];
    head[j + half] = b * cosine[j] + a * sine[j];
  }
}

// The k experts of one row, ascending by id, and their weights, renormalised. The softmax' sum runs in 16 lanes.
void route_row(const float* x, long n, long k, float* p, int32_t* ids, float* weights) {
  const float m = maximum(x, n);
  float a[16] = {0}, sum = 0.0f;
  for (long i = 0; i < n; i++) a[i % 16] += p[i] = exp1(x[i] - m);
  const float total = fold(a);
  for (long i = 0; i < n; i++) p[i] /= total;
  top_few(p, n, k, ids);
  std::sort(ids, ids + k);
  for (long s = 0; s < k; s++) sum += p[ids[s]];
  for (long s = 0; s < k; s++) weights[s] = p[ids[s]] / sum;
}

// Elementwise work in tasks of enough elements to be worth a thread.
template <class F>
int elementwise(long n, int threads, const F& f) {
  constexpr long TASK = 8192;
  return pool().run((n + TASK - 1) / TASK, threads, [&](long task) {
    for (long i = task * TASK, end = std::min(i + TASK, n); i < end; i++) f(i);
  });
}

}  // namespace

// ---- ABI ----------------------------------------------------------------------------------------------------------------------------

extern "C" {

long sb_panel() { return PANEL; }
int sb_threads_seen() { return pool().threads_seen(); }

int sb_pack(const float* weight, float* out, long N, long K, int threads) {
  return pool().run((N + PANEL - 1) / PANEL, threads, [=](long p) {
    const long columns = std::min(PANEL, N - p * PANEL);
    float* panel = out + p * K * PANEL;
    if (columns < PANEL) std::fill(panel, panel + K * PANEL, 0.0f);
    for (long k0 = 0; k0 < K; k0 += 16)
      for (long j = 0; j < columns; j++)
        for (long k = k0, k1 = std::min(k0 + 16, K); k < k1; k++) panel[k * PANEL + j] = weight[(p * PANEL + j) * K + k];
  });
}

// `data` and `scales` are zero-filled by the caller. *exact tells whether the codes give back every weight.
int sb_encode(const float* weight, uint8_t* data, float* scales, long N, long K, int kind, int threads, int* exact) {
  if ((kind != NIBBLES && kind != BYTES) || K % CODE_ROWS) return BAD_ARGUMENT;
  std::atomic<bool> good{true};
  const int code = pool().run((N + PANEL - 1) / PANEL, threads, [&](long p) {
    uint8_t* codes = data + p * PANEL * (kind == NIBBLES ? K / 2 : K);
    const long columns = std::min(PANEL, N - p * PANEL);
    if (good && !encode_panel(weight + p * PANEL * K, columns, K, Kind(kind), codes, scales + p * PANEL * 2 * (K / CODE_ROWS)))
      good = false;
  });
  *exact = good;
  return code;
}

int sb_linear(const float* x, int kind, const void* data, const float* scales, float* out, long M, long N, long K,
              long width, int add, int threads) {
  if (M < 0 || N < 1 || K < 1 || width < 1) return BAD_ARGUMENT;
  return linear({x, {Kind(kind), data, scales, K}, out, M, N, width, add != 0}, threads);
}

int sb_rms_norm(const float* x, const float* gain, float* out, long M, long K, float eps, int threads) {
  const long rows = std::max(1L, 16384 / std::max(1L, K));
  return pool().run((M + rows - 1) / rows, threads, [=](long task) {
    for (long m = task * rows; m < std::min((task + 1) * rows, M); m++) rms_norm_row(x + m * K, gain, out + m * K, K, eps);
  });
}

int sb_swiglu(const float* gate_up, float* out, long M, long I, int threads) {
  const long rows = std::max(1L, 8192 / std::max(1L, I));
  return pool().run((M + rows - 1) / rows, threads, [=](long task) {
    for (long m = task * rows; m < std::min((task + 1) * rows, M); m++) {
      const float *g = gate_up + m * 2 * I, *u = g + I;
      for (long i = 0; i < I; i++) out[m * I + i] = (g[i] / (1.0f + exp1(-g[i]))) * u[i];
    }
  });
}

int sb_add_bias(float* y, const float* bias, long M, long N, int threads) {
  const long rows = std::max(1L, 16384 / std::max(1L, N));
  return pool().run((M + rows - 1) / rows, threads, [=](long task) {
    for (long m = task * rows; m < std::min((task + 1) * rows, M); m++)
      for (long n = 0; n < N; n++) y[m * N + n] = y[m * N + n] + bias[n];
  });
}

// RMSNorm of each query and key head in place: `heads` with q_gain, then `kv_heads` with k_gain.
int sb_norm_heads(float* qkv, const float* q_gain, const float* k_gain, long M, long heads, long kv_heads, long dim,
                  float eps, int threads) {
  constexpr long TASK = 4;
  return pool().run((M + TASK - 1) / TASK, threads, [=](long task) {
    for (long m = task * TASK; m < std::min((task + 1) * TASK, M); m++)
      for (long h = 0; h < heads + kv_heads; h++) {
        float* head = qkv + (m * (heads + 2 * kv_heads) + h) * dim;
        rms_norm_row(head, h < heads ? q_gain : k_gain, head, dim, eps);
      }
  });
}

int sb_rope_store(float* qkv, const float* cos_sin, float* keys, float* values, const int32_t* table, long pages,
                  const int32_t* sequence, const int32_t* position, long M, long heads, long kv_heads, long dim,
                  long page_size, int threads) {
  constexpr long TASK = 16;
  const long ld = (heads + 2 * kv_heads) * dim, half = dim / 2;
  return pool().run((M + TASK - 1) / TASK, threads, [=](long task) {
    for (long m = task * TASK; m < std::min((task + 1) * TASK, M); m++) {
      const float* angles = cos_sin + position[m] * dim;
      float* row = qkv + m * ld;
      for (long h = 0; h < heads + kv_heads; h++) rotate(row + h * dim, angles, angles + half, half);
      const long page = table[sequence[m] * pages + position[m] / page_size], slot = position[m] % page_size;
      for (long h = 0; h < kv_heads; h++) {
        const float *k = row + (heads + h) * dim, *v = k + kv_heads * dim;
        float* to = keys + (page * kv_heads + h) * dim * page_size + slot;
        for (long d = 0; d < dim; d++) to[d * page_size] = k[d];
        std::copy(v, v + dim, values + ((page * kv_heads + h) * page_size + slot) * dim);
      }
    }
  });
}

int sb_attend(const float* qkv, const float* keys, const float* values, const int32_t* table, long pages,
              const int32_t* sequence, const int32_t* position, float* out, long M, long heads, long kv_heads, long dim,
              long page_size, float scale, long key_chunk, long window, int threads) {
  if (key_chunk < 16 || key_chunk % 16 || heads % kv_heads || window < 0) return BAD_ARGUMENT;
  const long group = heads / kv_heads, ld = (heads + 2 * kv_heads) * dim;
  return pool().run(M * kv_heads, threads, [=](long task) {
    const long m = M - 1 - task / kv_heads, h = task % kv_heads;  // the longest rows first
    const Cache cache{keys, values, table + sequence[m] * pages, page_size, kv_heads, h, dim};
    const long length = position[m] + 1L, first = window && window < length ? length - window : 0;
    attend_heads(qkv + m * ld + h * group * dim, cache, group, scale, {first, length, key_chunk},
                 out + (m * heads + h * group) * dim);
  });
}

int sb_route(const float* logits, long M, long n, long k, int32_t* ids, float* weights, int threads) {
  if (k < 1 || k > n) return BAD_ARGUMENT;
  return pool().run(M, threads, [=](long m) {
    std::vector<float> p(n);
    route_row(logits + m * n, n, k, p.data(), ids + m * k, weights + m * k);
  });
}

// out (M, N): a chain of fma over the k outputs of a row, in order, from +0.0.
int sb_combine(const float* outputs, const float* weights, float* out, long M, long k, long N, int threads) {
  return pool().run(M, threads, [=](long m) {
    const float *y = outputs + m * k * N, *w = weights + m * k;
    float* o = out + m * N;
    std::fill(o, o + N, 0.0f);
    for (long s = 0; s < k; s++)
      for (long i = 0; i < N; i++) o[i] = std::fmaf(w[s], y[s * N + i], o[i]);
  });
}

int sb_exp(const float* x, float* out, long n, int threads) {
  return elementwise(n, threads, [=](long i) { out[i] = exp1(x[i]); });
}

int sb_log(const float* x, float* out, long n, int threads) {
  return elementwise(n, threads, [=](long i) { out[i] = log1(x[i]); });
}

int sb_log_softmax(const float* logits, float* out, long W, long n, int threads) {
  return pool().run(W, threads, [=](long m) { log_softmax_row(logits + m * n, out + m * n, n); });
}

int sb_check_finite(const float* logits, long W, long n, long* row) {
  *row = -1;
  for (long m = 0; m < W && *row < 0; m++)
    if (!finite(logits + m * n, n)) *row = m;
  return OK;
}

int sb_top_k(const float* logits, long W, long n, long k, int32_t* ids) {
  if (k < 0 || k > n) return BAD_ARGUMENT;
  return pool().run(k > 0 ? W : 0, 1, [=](long m) {
    if (k <= 64) top_few(logits + m * n, n, k, ids + m * k);
    else top_many(logits + m * n, n, k, ids + m * k);
  });
}

int sb_draw(const float* logits, long n, float temperature, long k, float p, float min_p, float u, int32_t* id) {
  return pool().run(1, 1, [=](long) { *id = draw(logits, n, temperature, k, p, min_p, u); });
}

}  // extern "C"
