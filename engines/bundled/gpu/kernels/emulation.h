// Runs the kernels on the host: every thread is a fibre, the blocks of a cluster run together, clusters one by one; those of
// a RESIDENT kernel, whose blocks wait for each other, all together.
//
// It knows nothing of the model. Rules: IEEE operations are the host's (build with -ffp-contract=off); shared memory starts
// as NaN; the order in which threads run can be reversed, so that a result that needs a missing barrier shows itself.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define DEVICE inline
#define LINKED 1
#define EMULATED_KERNEL(name, Arguments, together)                                                                \
  static void name(const Arguments& a);                                                                           \
  extern "C" void emulate_##name(const Arguments* a, const unsigned* grid, unsigned block, unsigned cluster,      \
                                 unsigned shared, int reversed) {                                                 \
    emulation::run([=] { name(*a); }, grid, block, cluster, shared, reversed != 0, together);                     \
  }                                                                                                               \
  static void name(const Arguments& a)
#define KERNEL(name, Arguments, threads) EMULATED_KERNEL(name, Arguments, false)
#define RESIDENT_KERNEL(name, Arguments, threads) EMULATED_KERNEL(name, Arguments, true)
#define SHARED(T, name) T* name = reinterpret_cast<T*>(emulation::current->block->shared)

struct Index {
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

// A stack and where it stopped. On x86-64 a switch is a few instructions; elsewhere ucontext does it.
#if defined(__x86_64__)
struct Context {
  void* top = nullptr;
};
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
.local emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, . - emulation_switch
)");
inline void change(Context& from, Context& to) { emulation_switch(&from.top, to.top); }
inline void prepare(Context& c, char* stack, size_t size, void (*entry)()) {
  void** p = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + size) & ~uintptr_t(15)) - 2;
  *p = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--p = nullptr;
  c.top = p;
}
#else
struct Context {
  ucontext_t state;
};
inline void change(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
inline void prepare(Context& c, char* stack, size_t size, void (*entry)()) {
  getcontext(&c.state);
  c.state.uc_stack.ss_sp = stack;
  c.state.uc_stack.ss_size = size;
  c.state.uc_link = nullptr;
  makecontext(&c.state, entry, 0);
}
#endif

constexpr uint32_t UNTOUCHED = 0x7fc12345u;  // a NaN

struct Barrier {
  unsigned arrived = 0, epoch = 0;
};
struct Block {
  Index index;
  char* shared;
  unsigned live;
  Barrier barrier;
  Block* first;  // of its cluster
  Barrier cluster;
};
struct Fibre {
  Context context;
  std::unique_ptr<char[]> stack;
  Block* block;
  unsigned thread, exchanges = 0;
  const Barrier* awaited = nullptr;  // with the epoch that has to pass
  unsigned epoch = 0;
  const uint64_t* word = nullptr;  // with the epoch its upper half has to show
  uint32_t wanted = 0;
  bool idle = false;  // it still waits for what it waited for before
  bool done = false;
};
struct Group {  // blocks that run together: a cluster, or a whole grid
  std::vector<Block> blocks;
  std::vector<Fibre> fibres;
  std::vector<uint32_t> lanes;  // two exchange slots per thread
  unsigned size = 1;            // blocks of a cluster
};

inline thread_local Fibre* current = nullptr;
inline thread_local Group* group = nullptr;
inline thread_local Context scheduler;
inline thread_local const std::function<void()>* body = nullptr;

inline void pause() { change(current->context, scheduler); }
inline void arrive(Barrier& barrier, unsigned live) {
  const unsigned epoch = barrier.epoch;
  if (++barrier.arrived == live) {
    barrier.arrived = 0;
    barrier.epoch++;
    return;
  }
  current->awaited = &barrier;
  current->epoch = epoch;
  pause();
}
inline void trampoline() {
  (*body)();
  current->done = true;
  change(current->context, scheduler);
}

// Exchange inside a warp: every lane of `mask` puts a value down, then takes one.
inline uint32_t exchange(unsigned mask, uint32_t value, unsigned lane) {
  const unsigned me = current->thread, warp = me & ~31u, size = blockDim.x;
  Fibre* fibres = current - me;
  uint32_t* slots = group->lanes.data() + (fibres - group->fibres.data()) * 2;
  const unsigned turn = ++current->exchanges;
  slots[(turn & 1) * size + me] = value;
  bool again = false;
  for (unsigned l = 0; l < 32; l++, again = false)
    while ((mask >> l & 1) && warp + l < size && !fibres[warp + l].done && fibres[warp + l].exchanges < turn) {
      current->idle = again;
      again = true;
      pause();
    }
  return slots[(turn & 1) * size + warp + lane];
}

inline void start(Fibre& f, Block* block, unsigned thread) {
  constexpr size_t STACK = 128 * 1024;
  f.block = block;
  f.thread = thread;
  f.exchanges = 0;
  f.awaited = nullptr;
  f.word = nullptr;
  f.done = false;
  if (!f.stack) f.stack.reset(new char[STACK]);
  prepare(f.context, f.stack.get(), STACK, trampoline);
}

inline void finish(bool reversed) {
  Group& c = *group;
  const size_t n = c.fibres.size();
  for (unsigned left = n; left;) {
    left = 0;
    bool moved = false;
    for (size_t i = 0; i < n; i++) {
      Fibre& f = c.fibres[reversed ? n - 1 - i : i];
      if (f.done) continue;
      left++;
      if (f.awaited && f.awaited->epoch == f.epoch) continue;
      if (f.word && uint32_t(*f.word >> 32) != f.wanted) continue;
      f.awaited = nullptr;
      f.word = nullptr;
      f.idle = false;
      current = &f;
      threadIdx = {f.thread, 0, 0};
      blockIdx = f.block->index;
      change(scheduler, f.context);
      moved |= !f.idle;
    }
    if (left && !moved) __builtin_trap();  // all wait for what nobody will write
  }
}

inline void run(const std::function<void()>& kernel, const unsigned* grid, unsigned block, unsigned size, unsigned shared,
                bool reversed, bool together) {
  const bool deep = grid[2] > 1 && size > 1 && size == grid[2];  // clusters along z, else along x
  const unsigned count = together ? grid[0] : size;              // a grid that runs together lies along x
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block, 1, 1};
  body = &kernel;
  Group c;
  group = &c;
  c.size = size;
  c.blocks.resize(count);
  c.fibres.resize(size_t(count) * block);
  c.lanes.resize(size_t(count) * block * 2);
  std::vector<uint32_t> memory(size_t(count) * (shared / 4 + 64));
  for (unsigned z = 0; z < (deep ? 1 : grid[2]); z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x += deep ? 1 : count) {
        std::fill(memory.begin(), memory.end(), UNTOUCHED);
        for (unsigned b = 0; b < count; b++) {
          auto raw = reinterpret_cast<uintptr_t>(memory.data() + size_t(b) * (shared / 4 + 64));
          const Index index = deep ? Index{x, y, b} : Index{x + b, y, z};
          char* own = reinterpret_cast<char*>((raw + 127) & ~uintptr_t(127));
          c.blocks[b] = {index, own, block, {}, &c.blocks[b - b % size], {}};
          for (unsigned t = 0; t < block; t++) start(c.fibres[size_t(b) * block + t], &c.blocks[b], t);
        }
        finish(reversed);
        for (unsigned b = 0; b < count; b++)  // nobody may write past the shared memory that was asked for
          if (memcmp(c.blocks[b].shared + shared, &UNTOUCHED, 4) != 0) __builtin_trap();
      }
}

}  // namespace emulation

inline void __syncthreads() { emulation::arrive(emulation::current->block->barrier, blockDim.x); }
inline void cluster_barrier() {
  emulation::arrive(emulation::current->block->first->cluster, emulation::group->size * blockDim.x);
}

inline int __float_as_int(float f) { int i; std::memcpy(&i, &f, 4); return i; }
inline float __int_as_float(int i) { float f; std::memcpy(&f, &i, 4); return f; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __shfl_down_sync(unsigned mask, float v, unsigned step, unsigned width) {
  const unsigned lane = threadIdx.x & 31, from = lane % width + step < width ? lane + step : lane;
  return __int_as_float(int(emulation::exchange(mask, uint32_t(__float_as_int(v)), from)));
}
inline float __shfl_sync(unsigned mask, float v, unsigned lane) {
  return __int_as_float(int(emulation::exchange(mask, uint32_t(__float_as_int(v)), lane)));
}
inline float __shfl_xor_sync(unsigned mask, float v, unsigned step) {
  return __int_as_float(int(emulation::exchange(mask, uint32_t(__float_as_int(v)), (threadIdx.x & 31) ^ step)));
}

inline int __reduce_max_sync(unsigned mask, int v) {
  for (unsigned step = 16; step; step >>= 1) v = std::max(v, int(emulation::exchange(mask, uint32_t(v), (threadIdx.x & 31) ^ step)));
  return v;
}

inline float fresh(const float* p) { return *p; }
inline float4 fresh4(const float* p) { return *reinterpret_cast<const float4*>(p); }
inline float4 weight4(const float* p) { return *reinterpret_cast<const float4*>(p); }
inline void copy16(void* to, const void* from, bool real) {
  if (real) std::memcpy(to, from, 16);
  else std::memset(to, 0, 16);
}
inline void commit_copies() {}
template <int left>
inline void wait_copies() {}
inline void count_off(uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0) ++*counter;
}
inline void await_count(const uint32_t* counter, uint32_t count) {
  if (*counter != count) __builtin_trap();  // launches run one after another here
  __syncthreads();
}
inline void let_next_start() {}
inline void wait_previous() {}
struct Delivery {
  uint64_t state;
};
inline void open_delivery(Delivery* d, int size) { d->state = uint64_t(size); }
inline void expect_delivery(Delivery* d, int size) { d->state = uint64_t(size); }
inline void deliver(Delivery* d, void* to, const void* from, int size) {
  std::memcpy(to, from, size_t(size));
  d->state -= uint64_t(size);
}
inline void await_delivery(Delivery* d, uint32_t = 0) {
  if (d->state != 0) __builtin_trap();  // more or fewer bytes were sent than announced
}
inline void publish(uint64_t* p, float x, float y, float z, uint32_t epoch) {
  auto pair = [](float low, uint32_t high) { return uint64_t(high) << 32 | uint32_t(__float_as_int(low)); };
  p[0] = pair(x, uint32_t(__float_as_int(y))), p[1] = pair(z, epoch);
}
inline void look(const uint64_t* p, uint64_t (&w)[2]) { w[0] = p[0], w[1] = p[1]; }
inline void tell(uint64_t* p, int rank, uint64_t word) {
  const emulation::Block* block = emulation::current->block;
  *reinterpret_cast<uint64_t*>(block->first[rank].shared + (reinterpret_cast<char*>(p) - block->shared)) = word;
}
inline uint64_t hear(const uint64_t* p) { return *p; }
inline void look_again(const uint64_t* p, uint32_t epoch) {
  emulation::current->word = p;
  emulation::current->wanted = epoch;
  emulation::pause();
}
