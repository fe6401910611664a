// What the kernels ask of a machine: IEEE operations by name, copies, barriers, launches. No arithmetic of the model.
//
// Rules: every rounded operation is an explicit round-to-nearest intrinsic, so that no compiler flag can move a bit.
// The same source runs on the host when EMULATED is defined (emulation.h).
#ifdef EMULATED
#include "emulation.h"
#else
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#define DEVICE __device__ __forceinline__
#define KERNEL(name, Arguments, threads) extern "C" __global__ void __launch_bounds__(threads, 1) name(const Arguments a)
#define RESIDENT_KERNEL(name, Arguments, threads) KERNEL(name, Arguments, threads)  // all its blocks run at the same time
extern __shared__ __align__(128) unsigned char shared_memory[];
#define SHARED(T, name) T* name = reinterpret_cast<T*>(shared_memory)
#endif

DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub(float a, float b) { return __fadd_rn(a, -b); }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float root(float a) { return __fsqrt_rn(a); }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
DEVICE void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

#ifndef EMULATED
#if __CUDA_ARCH__ >= 900
#define LINKED 1  // clusters, bulk copies and launches that overlap their predecessor
#else
#define LINKED 0
#endif

// Values that other blocks of this launch wrote: past the first-level cache.
DEVICE float fresh(const float* p) { return __ldcg(p); }
DEVICE float4 fresh4(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }

// Weights: read once, not kept in the first-level cache.
DEVICE float4 weight4(const float* p) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}

DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory; zeros when `real` is false.
DEVICE void copy16(void* to, const void* from, bool real) {
  const int size = real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(size) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

// The next launch may start; this one may read what the previous one wrote.
DEVICE void let_next_start() {
#if LINKED
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_previous() {
#if LINKED
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if LINKED
DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Blocks of a launch count themselves off when all they write is written; the next launch waits for the full count.
DEVICE void count_off(uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE void await_count(const uint32_t* counter, uint32_t count) {
  if (threadIdx.x == 0) {
    uint32_t seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < count);
  }
  __syncthreads();
}

// A count of bytes that a bulk copy has to deliver. Opened by one thread, awaited by all after a block barrier.
struct Delivery {
  uint64_t state;
};
DEVICE void open_delivery(Delivery* d, int size) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(d)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(d)), "r"(size) : "memory");
}
DEVICE void deliver(Delivery* d, void* to, const void* from, int size) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(size), "r"(shared_address(d)) : "memory");
}
// The next count of the same barrier, after all threads of the block have seen the one before.
DEVICE void expect_delivery(Delivery* d, int size) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(d)), "r"(size) : "memory");
}
DEVICE void await_delivery(Delivery* d, uint32_t parity = 0) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(shared_address(d)), "r"(parity) : "memory");
}

// Values and the epoch they belong to in one access: who reads the epoch has the values, without any fence. Three floats
// through global memory, one from block to block inside a cluster.
DEVICE void publish(uint64_t* p, float x, float y, float z, uint32_t epoch) {
  asm volatile(
      "{\n.reg .b128 t;\n.reg .b64 a, b;\nmov.b64 a, {%1, %2};\nmov.b64 b, {%3, %4};\nmov.b128 t, {a, b};\n"
      "st.relaxed.gpu.global.b128 [%0], t;\n}" ::"l"(p), "f"(x), "f"(y), "f"(z), "r"(epoch) : "memory");
}
DEVICE void look(const uint64_t* p, uint64_t (&w)[2]) {
  asm volatile("{\n.reg .b128 t;\nld.relaxed.gpu.global.b128 t, [%2];\nmov.b128 {%0, %1}, t;\n}"
               : "=l"(w[0]), "=l"(w[1]) : "l"(p) : "memory");
}
DEVICE void tell(uint64_t* p, int rank, uint64_t word) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("st.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(there), "l"(word) : "memory");
}
DEVICE uint64_t hear(const uint64_t* p) {
  uint64_t word;
  asm volatile("ld.relaxed.cluster.shared::cta.b64 %0, [%1];" : "=l"(word) : "r"(shared_address(p)) : "memory");
  return word;
}
DEVICE void look_again(const uint64_t*, uint32_t) {}  // the host runs others meanwhile
#endif
#endif

DEVICE uint64_t word_of(float value, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | static_cast<uint32_t>(__float_as_int(value));
}
DEVICE float value_of(uint64_t word) { return __int_as_float(static_cast<int>(static_cast<uint32_t>(word))); }
DEVICE uint32_t epoch_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
