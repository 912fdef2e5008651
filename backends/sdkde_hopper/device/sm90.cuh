// What the kernels share: barriers, bulk copies, descriptors, wgmma, exponentials. Distances are in log2 units.
//
// A tile is 64 points. Its columns lie in memory in core matrices of 8 rows of 16 bytes, as wgmma reads them without
// swizzle.

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

constexpr int TILE_COLUMNS = 64;

#define UNROLL _Pragma("unroll")
#define WGMMA_FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define WGMMA_COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WGMMA_WAIT asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory")
// Ends a group of products, and waits for their sums.
#define WGMMA_TAKE(sums) { WGMMA_COMMIT; WGMMA_WAIT; hold(sums); }

// Keeps the compiler from moving or copying an accumulator: otherwise it waits for every product by itself.
template <int N> __device__ __forceinline__ void hold(float (&d)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n));
}
// For a ring of tiles: one that a copy fills, and one that so many threads empty.
__device__ __forceinline__ void ring_init(uint32_t full, uint32_t empty, int stages, int readers) {
  for (int i = 0; i < stages; i++) {
    barrier_init(full + 8 * i, 1);
    barrier_init(empty + 8 * i, readers);
  }
}
__device__ __forceinline__ void barrier_expect(uint32_t b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
// Ends a program that waits for minutes, as it would for ever. Without that end the compiler takes the loop for one
// that the products of a warpgroup must not run across, and waits for each of them.
__device__ __forceinline__ void barrier_wait(uint32_t b, int phase) {
  uint32_t done = 0, tries = 0;
  while (true) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(b), "r"(phase) : "memory");
    if (done) return;
    if (++tries > 100000u) __trap();
  }
}
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(b) : "memory");
}

// Of an operand in shared memory: bytes between core matrices along K, and along the other dimension; where that is the
// one that is contiguous, the other way round.
__device__ __forceinline__ uint64_t descriptor(uint32_t at, int along_k, int across) {
  return (uint64_t)((at & 0x3ffff) >> 4) | ((uint64_t)(along_k >> 4) << 16) | ((uint64_t)(across >> 4) << 32);
}

__device__ __forceinline__ float2 load2(uint32_t a) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(a) : "memory");
  return x;
}

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two numbers to half precision, the nearest.
__device__ __forceinline__ uint32_t halves(float a, float b) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
// φ of two exponents to half precision, and what that leaves.
__device__ __forceinline__ uint32_t exponentials(float a, float b, uint32_t& rest) {
  const float x = exp2_(a), y = exp2_(b);
  const uint32_t near = halves(x, y);
  float x_near, y_near;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(x_near), "=f"(y_near) : "r"(near));
  rest = halves(x - x_near, y - y_near);
  return near;
}
