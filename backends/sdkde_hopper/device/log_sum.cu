// LOG_SUM: four warpgroups of 64 rows each, every φ once, for its row. A seventeenth warp fetches the columns.
//
// Exponents are raised by RAISED_BITS, so that sums of φ are in fp32's range with no running maximum, but for rows more
// than some 17 bandwidths from all columns of a part. A program that has such rows does its part again, with one.

constexpr int STAGES = 12;
constexpr int FULL = STAGES * EXPONENT_BYTES, EMPTY = FULL + 8 * STAGES, FAR = EMPTY + 8 * STAGES;
static_assert(FAR + 8 == LOG_SUM_SHARED, "shared memory");

// What a thread sums up: rows g and g + 8 of its warp's sixteen, two columns of every eight.
struct Sums {
  float top[2], total[2];
};

template <bool MAXIMUM> __device__ __forceinline__ void add(Sums& sums, const float (&S)[32]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float high = 0;
    if (MAXIMUM) {
      high = sums.top[r];
#pragma unroll
      for (int j = 0; j < 8; j++) high = fmaxf(high, fmaxf(S[4 * j + 2 * r], S[4 * j + 2 * r + 1]));
      sums.total[r] *= exp2_(sums.top[r] - high);
      sums.top[r] = high;
    }
    float even = sums.total[r], odd = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      even += exp2_(MAXIMUM ? S[4 * j + 2 * r] - high : S[4 * j + 2 * r]);
      odd += exp2_(MAXIMUM ? S[4 * j + 2 * r + 1] - high : S[4 * j + 2 * r + 1]);
    }
    sums.total[r] = even + odd;
  }
}

// Sums over ``count`` tiles; ``stage`` and ``phase`` go on from call to call.
template <bool MAXIMUM>
__device__ __forceinline__ Sums reduce(uint32_t shared, const uint32_t (&q)[3][4], int count, int& stage, int& phase) {
  Sums sums = {{MAXIMUM ? -1e30f : 0, MAXIMUM ? -1e30f : 0}, {0, 0}};
  float S[32];
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    barrier_wait(shared + FULL + 8 * stage, phase);
    const uint32_t at = __shfl_sync(0xffffffffu, shared + stage * EXPONENT_BYTES, 0);
    const uint64_t b = descriptor(at, TILE_COLUMNS * 16, 128);
    WGMMA_FENCE;
    begin_n64(S, q[0][0], q[0][1], q[0][2], q[0][3], b);
    add_n64(S, q[1][0], q[1][1], q[1][2], q[1][3], b + 128);
    add_n64(S, q[2][0], q[2][1], q[2][2], q[2][3], b);
    add_n64(S, q[0][0], q[0][1], q[0][2], q[0][3], b + 256);
    WGMMA_COMMIT;
    WGMMA_WAIT(0);
    hold(S);
    if (threadIdx.x % 32 == 0) barrier_arrive(shared + EMPTY + 8 * stage);
    add<MAXIMUM>(sums, S);
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {  // over the four threads of a row
    float high = sums.top[r];
#pragma unroll
    for (int m = 1; m < 4; m *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, m));
    float total = sums.total[r] * exp2_(sums.top[r] - high);
#pragma unroll
    for (int m = 1; m < 4; m *= 2) total += __shfl_xor_sync(0xffffffffu, total, m);
    sums.top[r] = high;
    sums.total[r] = total;
  }
  return sums;
}

// rows: as packed, whole blocks of 256; out: (parts, m, 2), maximum and sum. Every part has ``length`` tiles at most.
extern "C" __global__ void __launch_bounds__(544, 1)
log_sum(const uint32_t* rows, const uint8_t* tiles, float2* out, int m, int count, int length) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  volatile int* far = (volatile int*)(memory + FAR);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared + FULL + 8 * i, 1);
      barrier_init(shared + EMPTY + 8 * i, 16);
    }
    *far = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int blocks = (m + 255) / 256, block = blockIdx.x % blocks, part = blockIdx.x / blocks;
  const uint8_t* from = tiles + (size_t)part * length * EXPONENT_BYTES;
  count = min(length, count - part * length);
  int stage = 0, phase = 0;
  if (threadIdx.x >= 512) {
    auto fetch = [&]() {
      if (threadIdx.x == 512) {
        for (int t = 0; t < count; t++) {
          barrier_wait(shared + EMPTY + 8 * stage, phase ^ 1);
          barrier_expect(shared + FULL + 8 * stage, EXPONENT_BYTES);
          const uint8_t* tile = from + (size_t)t * EXPONENT_BYTES;
          bulk_copy(shared + stage * EXPONENT_BYTES, tile, EXPONENT_BYTES, shared + FULL + 8 * stage);
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
      __syncwarp();
    };
    fetch();
    __syncthreads();
    if (*far) fetch();
    return;
  }
  const int lane = threadIdx.x % 32, row = block * 256 + threadIdx.x / 32 * 16 + lane / 4;
  uint32_t q[3][4];
#pragma unroll
  for (int k = 0; k < 3; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) q[k][i] = rows[(size_t)(row + (i & 1) * 8) * 24 + k * 8 + (i >> 1) * 4 + lane % 4];
  }
  const Sums near = reduce<false>(shared, q, count, stage, phase);
  // What underflows is less than 2^-14 of such a sum. NaN is not at least anything.
  const float least = 64.0f * count * 0x1p-112f;
  bool is_far[2];
#pragma unroll
  for (int r = 0; r < 2; r++) is_far[r] = row + 8 * r < m && !(near.total[r] >= least);
  if (is_far[0] || is_far[1]) *far = 1;
  __syncthreads();
  Sums sums = near;
  if (*far) {
    const Sums again = reduce<true>(shared, q, count, stage, phase);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (is_far[r]) { sums.top[r] = again.top[r]; sums.total[r] = again.total[r]; }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (lane % 4 == 0 && row + 8 * r < m) out[(size_t)part * m + row + 8 * r] = make_float2(sums.top[r], sums.total[r]);
  }
}
