// LOG_SUM and LAPLACE: WARPGROUPS of 64 rows each, every φ once, for its row. One more fetches the columns.
//
// Exponents are raised by RAISED_BITS, so that sums of φ are in fp32's range with no running maximum, but for rows more
// than some 17 bandwidths from all columns of a part. A program that has such rows does its part again, with one.

constexpr int LOGS = STAGES * TILE, FULL = LOGS + STAGES * 256, EMPTY = FULL + 8 * STAGES, FAR = EMPTY + 8 * STAGES;
static_assert(FAR + 8 == LOG_SUM_SHARED && LOG_SUM_SHARED <= 232448, "shared memory");

// What a thread sums up: rows g and g + 8 of its warp's sixteen, two columns of every eight. Σ w φ relative to
// two to ``top``, and for LAPLACE as much of w φ times φ's raised exponent.
struct Sums {
  float top[2], total[2], moment[2];
};

template <bool MAXIMUM> __device__ __forceinline__ void add(Sums& sums, const float (&S)[32], uint32_t logs) {
  auto weights = [&](int j) { return WEIGHTED ? load2(logs + j * 32) : make_float2(0, 0); };  // of two of every eight
  if (MAXIMUM) {
    float high[2] = {sums.top[0], sums.top[1]};
    UNROLL for (int j = 0; j < 8; j++) {
      const float2 w = weights(j);
      UNROLL for (int r = 0; r < 2; r++)
        high[r] = fmaxf(high[r], fmaxf(S[4 * j + 2 * r] + w.x, S[4 * j + 2 * r + 1] + w.y));
    }
    UNROLL for (int r = 0; r < 2; r++) {
      const float less = exp2_(sums.top[r] - high[r]);
      sums.total[r] *= less;
      sums.moment[r] *= less;
      sums.top[r] = high[r];
    }
  }
  float odd[2] = {0, 0};
  UNROLL for (int j = 0; j < 8; j++) {
    const float2 w = weights(j);
    UNROLL for (int r = 0; r < 2; r++) {
      float a = S[4 * j + 2 * r], b = S[4 * j + 2 * r + 1];
      if (WEIGHTED) { a += w.x; b += w.y; }
      if (MAXIMUM) { a -= sums.top[r]; b -= sums.top[r]; }
      a = exp2_(a);
      b = exp2_(b);
      sums.total[r] += a;
      odd[r] += b;
      if (LAPLACE) {
        // Of log2 φ itself: raised, a rounding error of these sums would be RAISED_BITS times as large.
        sums.moment[r] = fmaf(a, S[4 * j + 2 * r] - RAISED_BITS, sums.moment[r]);
        sums.moment[r] = fmaf(b, S[4 * j + 2 * r + 1] - RAISED_BITS, sums.moment[r]);
      }
    }
  }
  UNROLL for (int r = 0; r < 2; r++) sums.total[r] += odd[r];
}

// Sums over ``count`` tiles; ``stage`` and ``phase`` go on from call to call.
template <bool MAXIMUM>
__device__ __forceinline__ Sums reduce(uint32_t shared, const Rows& q, int count, int& stage, int& phase) {
  Sums sums = {{MAXIMUM ? -1e30f : 0, MAXIMUM ? -1e30f : 0}, {0, 0}, {0, 0}};
  float S[32];
  const int c = threadIdx.x % 4;
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    barrier_wait(shared + FULL + 8 * stage, phase);
    const uint32_t at = __shfl_sync(0xffffffffu, shared + stage * TILE, 0);
    take_exponents<false>(S, q, Columns(at));
    if (!WEIGHTED && threadIdx.x % 32 == 0) barrier_arrive(shared + EMPTY + 8 * stage);
    add<MAXIMUM>(sums, S, shared + LOGS + stage * 256 + c * 8);
    __syncwarp();
    if (WEIGHTED && threadIdx.x % 32 == 0) barrier_arrive(shared + EMPTY + 8 * stage);
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  UNROLL for (int r = 0; r < 2; r++) {  // over the four threads of a row
    float high = sums.top[r];
    UNROLL for (int m = 1; m < 4; m *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, m));
    const float less = exp2_(sums.top[r] - high);
    float total = sums.total[r] * less, moment = sums.moment[r] * less;
    UNROLL for (int m = 1; m < 4; m *= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, m);
      moment += __shfl_xor_sync(0xffffffffu, moment, m);
    }
    sums.top[r] = high;
    sums.total[r] = total;
    sums.moment[r] = moment;
  }
  return sums;
}

__device__ __forceinline__ void fetch(
    uint32_t shared, const uint8_t* tiles, const float* logs, int count, int& stage, int& phase) {
  if (threadIdx.x == 128 * WARPGROUPS) {
#pragma unroll 1
    for (int t = 0; t < count; t++) {
      const uint32_t full = shared + FULL + 8 * stage;
      barrier_wait(shared + EMPTY + 8 * stage, phase ^ 1);
      barrier_expect(full, TILE + WEIGHTED * 256);
      bulk_copy(shared + stage * TILE, tiles + (size_t)t * TILE, TILE, full);
      if (WEIGHTED) bulk_copy(shared + LOGS + stage * 256, logs + (size_t)t * TILE_COLUMNS, 256, full);
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void consume(
    uint32_t shared, volatile int* far, const uint32_t* rows, float* out, int m, int first_row, int count) {
  const int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 * 16 + lane / 4;
  Rows q;
  load_rows(q, rows, row, lane % 4);
  int stage = 0, phase = 0;
  Sums sums = reduce<false>(shared, q, count, stage, phase);
  // What underflows is less than 2^-14 of such a sum, 2^-20 at "high". NaN is not at least anything.
  const float least = 64.0f * count * (HIGH ? 0x1p-106f : 0x1p-112f);
  bool is_far[2];
  UNROLL for (int r = 0; r < 2; r++) is_far[r] = row + 8 * r < m && !(sums.total[r] >= least);
  if (is_far[0] || is_far[1]) *far = 1;
  __syncthreads();
  if (*far) {
    const Sums again = reduce<true>(shared, q, count, stage, phase);
    UNROLL for (int r = 0; r < 2; r++) {
      if (is_far[r]) {
        sums.top[r] = again.top[r];
        sums.total[r] = again.total[r];
        sums.moment[r] = again.moment[r];
      }
    }
  }
  UNROLL for (int r = 0; r < 2; r++) {
    if (lane % 4 == 0 && row + 8 * r < m) {
      float* to = out + (size_t)(row + 8 * r) * 3;
      to[0] = sums.top[r];
      to[1] = sums.total[r];
      to[2] = sums.moment[r];
    }
  }
}

// rows: as packed, whole blocks; logs: of the columns' weights, to base two; out: (parts, m, 3), maximum, sum
// and moment. Every part has ``length`` tiles at most, of ``count``.
extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
log_sum(
    const uint32_t* rows, const uint8_t* tiles, const float* logs, float* out, int m, int count, int length) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  volatile int* far = (volatile int*)(memory + FAR);
  if (threadIdx.x == 0) {
    ring_init(shared + FULL, shared + EMPTY, STAGES, 4 * WARPGROUPS);
    *far = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  constexpr int HEIGHT = 64 * WARPGROUPS;
  const int blocks = (m + HEIGHT - 1) / HEIGHT, block = blockIdx.x % blocks, part = blockIdx.x / blocks;
  const int first = part * length;
  count = min(length, count - first);
  const uint8_t* from = tiles + (size_t)first * TILE;
  if (__shfl_sync(0xffffffffu, threadIdx.x / 128, 0) < WARPGROUPS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    out += (size_t)part * m * 3;
    consume(shared, far, rows, out, m, block * HEIGHT, count);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    int stage = 0, phase = 0;
    fetch(shared, from, logs + first * TILE_COLUMNS, count, stage, phase);
    __syncthreads();
    if (*far) fetch(shared, from, logs + first * TILE_COLUMNS, count, stage, phase);
  }
}
