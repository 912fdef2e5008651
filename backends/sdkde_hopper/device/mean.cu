// MEAN of the points themselves, every tile of φ computed once, for its rows and for its columns. Deterministic.
//
// A unit is 256 rows and up to TILES tiles of columns, a multiple of four. A program runs consecutive units, sorted by
// their columns. Four warpgroups of 64 rows each take exponentials and sum over columns, in registers, as long as a
// unit lasts. They leave φ in shared memory, where a fifth warpgroup reads it for the transposed product, 64 columns
// by 256 rows, and adds that to the columns' sums, in shared memory as long as the columns stay the same. The fifth
// also fetches: columns in a ring, rows as what φᵀ is multiplied by.
//
// φ is two pieces: half precision, the nearest, and what that leaves. For the rows the second piece is in half
// precision too; for the columns it is in three significant bits (e5m2), by half the traffic, and multiplied by the
// points in two pieces of four (e4m3). A byte's place along K is free, so rows g and g + 8 of 16, which one
// thread holds, are beside each other. In bytes the one is in two pieces, its second beside it.

constexpr int RING = 4;  // of tiles of columns, as many as there are in a group
constexpr int PHI_BUFFERS = 2;

constexpr int SUM_BYTES = GROUPS * 128 * 16, ONES_BYTES = 32 * 8;  // of a tile: 4 floats a thread, and the ones
constexpr int ONES = TILES * SUM_BYTES;
constexpr int PHI = ONES + TILES * ONES_BYTES, PHI_BYTES = 256 * TILE_COLUMNS * 2;
constexpr int REST = PHI + PHI_BUFFERS * PHI_BYTES, REST_BYTES = 256 * TILE_COLUMNS;
constexpr int ROWS = REST + REST_BYTES, ROWS_BYTES = 4 * VALUE_BYTES;
constexpr int BYTES = ROWS + ROWS_BYTES, BYTES_BYTES = 4 * BYTE_TILE;
constexpr int COLUMNS = BYTES + BYTES_BYTES;
constexpr int FULL = COLUMNS + RING * TILE_BYTES, EMPTY = FULL + 8 * RING;
constexpr int PHI_FULL = EMPTY + 8 * RING, PHI_EMPTY = PHI_FULL + 8 * PHI_BUFFERS;
constexpr int REST_EMPTY = PHI_EMPTY + 8 * PHI_BUFFERS;
constexpr int ROWS_FULL = REST_EMPTY + 8, BYTES_FULL = ROWS_FULL + 8;
constexpr int SHARED = BYTES_FULL + 8;
static_assert(SHARED == MEAN_SHARED && SHARED <= 232448, "shared memory");

// Where a thread's sums of a product with hi | one, free | lo are: of hi first, of one, of lo.
constexpr int ONE = WIDTH / 2, LO = ONE + 4;
constexpr int POINTS = 2 * VALUES;  // from sixteen points to the next as values, or 32 in bytes: in a descriptor's units

// What a program does: {rows' block, columns' super, flags, slot of the columns' sums}. Flags: 1 symmetric, 2 the
// first with these columns, 4 the last, first tile << 8, end << 16. Blocks and supers count from an offset, round in a
// circle.
struct Units {
  const int4* list;
  int begin, end, block_offset, super_offset, blocks, supers;
  __device__ __forceinline__ int4 operator[](int i) const {
    int4 unit = list[i];
    unit.x += block_offset;
    if (unit.x >= blocks) unit.x -= blocks;
    unit.y += super_offset;
    if (unit.y >= supers) unit.y -= supers;
    return unit;
  }
};

__device__ __forceinline__ void store4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store4_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// What is left in rows g and g + 8, two columns each, to bytes (e5m2: the upper half of half precision, rounded): of
// the first column both rows, then of the second.
__device__ __forceinline__ uint32_t residuals(uint32_t g, uint32_t g8) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, 0x7351;" : "=r"(r) : "r"(g + 0x00800080u), "r"(g8 + 0x00800080u));
  return r;
}

__device__ __forceinline__ void consume(uint32_t shared, const uint32_t* rows, const Units& units, float* out_rows) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t phi_at = shared + PHI + ((warp * 2 + ((lane / 8) & 1)) * 8 + (lane / 16)) * 128 + (lane % 8) * 16;
  const uint32_t rest_at = shared + REST + (warp * 8 + lane / 8) * 128 + (lane % 8) * 16;
  const uint32_t ring = __shfl_sync(0xffffffffu, shared + COLUMNS, 0);
  // Exponents; sums by φ's first piece over a group of tiles, and over a unit: a Tensor Core truncates what it adds
  // to, so these are added up apart; sums by the second piece, for which that is nothing.
  float S[32], O[VALUES / 2], M[ONE + 2], R[LO];
  uint32_t P[16], L[16], q[3][2 * GROUPS];
  int phase = 0;
  bool begun = false;
  int4 unit = units[units.begin];
  auto load_rows = [&]() {
    const uint32_t* from = rows + (size_t)(unit.x * 256 + warp * 16 + g) * (EXPONENTS / 2) + c;
#pragma unroll
    for (int k = 0; k < 3; k++) {
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; i++)
        q[k][i] = from[(i & 1) * (8 * EXPONENTS / 2) + k * (WIDTH / 2) + (i >> 1) * 4];
    }
  };
  load_rows();
#pragma unroll 1
  for (int u = units.begin; u < units.end; u++) {
    const int flags = __shfl_sync(0xffffffffu, unit.z, 0);
    if (u + 1 < units.end) unit = units[u + 1];  // ahead
#pragma unroll
    for (int i = 0; i < VALUES / 2; i++) O[i] = 0;
#pragma unroll
    for (int i = 0; i < ONE + 2; i++) M[i] = 0;
#pragma unroll
    for (int i = 0; i < LO; i++) R[i] = 0;
#pragma unroll 1
    for (int groups = ((flags >> 16) - ((flags >> 8) & 255)) / RING; groups > 0; groups--) {
#pragma unroll
      for (int k = 0; k < RING; k++) {
        const uint32_t tile = ring + k * TILE_BYTES;
        const uint64_t b = descriptor(tile, TILE_COLUMNS * 16, 128);
        const uint64_t v = descriptor(tile + EXPONENT_BYTES, VALUES * 16, 128);
        barrier_wait(shared + FULL + 8 * k, phase);
        WGMMA_WAIT(0);  // the last tile's sums
        hold(O);
        hold(R);
        if (k == 0) {  // hi and lo together; of the ones a thread has two rows'
#pragma unroll
          for (int i = 0; i < ONE; i++) { M[i] += O[i] + O[LO + i]; O[i] = O[LO + i] = 0; }
          M[ONE] += O[ONE]; M[ONE + 1] += O[ONE + 2];
          O[ONE] = O[ONE + 1] = O[ONE + 2] = O[ONE + 3] = 0;
          hold(O);
        }
        if (lane == 0 && (k > 0 || begun)) barrier_arrive(shared + EMPTY + 8 * ((k + RING - 1) % RING));
        begun = true;
        WGMMA_FENCE;
        // hi·hi and the constants first, which cancel exactly; then lo·hi, hi·lo, lo·lo.
#if WIDTH == 16
        begin_n64(S, q[0][0], q[0][1], q[0][2], q[0][3], b);
        add_n64(S, q[1][0], q[1][1], q[1][2], q[1][3], b + 128);
        add_n64(S, q[2][0], q[2][1], q[2][2], q[2][3], b);
        add_n64(S, q[0][0], q[0][1], q[0][2], q[0][3], b + 256);
        add_n64(S, q[2][0], q[2][1], q[2][2], q[2][3], b + 256);
#else  // two pieces in one product: hi and constants by hi and constants, lo and hi by hi and lo, none and lo by lo
        begin_n64(S, q[0][0], q[0][1], q[1][0], q[1][1], b);
        add_n64(S, q[2][0], q[2][1], q[0][0], q[0][1], descriptor(tile, 2 * TILE_COLUMNS * 16, 128));
        add_n64(S, 0, 0, q[2][0], q[2][1], b + 64);
#endif
        WGMMA_COMMIT;
        WGMMA_WAIT(0);
        hold(S);
        hold(O);
        hold(R);
        if (k == RING - 1 && groups == 1) load_rows();  // the next unit's
#pragma unroll
        for (int p = 0; p < 16; p++) P[p] = exponentials(S[2 * p], S[2 * p + 1], L[p]);
        hold(O);
        hold(R);
        WGMMA_FENCE;
#pragma unroll  // by hi and one alone
        for (int i = 0; i < 4; i++) add_hi(R, L[4 * i], L[4 * i + 1], L[4 * i + 2], L[4 * i + 3], v + POINTS * i);
#pragma unroll
        for (int i = 0; i < 4; i++) add_values(O, P[4 * i], P[4 * i + 1], P[4 * i + 2], P[4 * i + 3], v + POINTS * i);
        WGMMA_COMMIT;
        if (flags & 1) {
          barrier_wait(shared + PHI_EMPTY + 8 * (k & 1), (k >> 1) ^ 1);
          barrier_wait(shared + REST_EMPTY, (k & 1) ^ 1);
#pragma unroll
          for (int i = 0; i < 4; i++)
            store4(phi_at + (k & 1) * PHI_BYTES + 256 * i, P[4 * i], P[4 * i + 1], P[4 * i + 2], P[4 * i + 3]);
#pragma unroll
          for (int i = 0; i < 2; i++)
            store4_transposed(rest_at + 512 * i, residuals(L[8 * i], L[8 * i + 1]),
                              residuals(L[8 * i + 2], L[8 * i + 3]), residuals(L[8 * i + 4], L[8 * i + 5]),
                              residuals(L[8 * i + 6], L[8 * i + 7]));
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          if (lane == 0) barrier_arrive(shared + PHI_FULL + 8 * (k & 1));
        }
      }
      phase ^= 1;
    }
    WGMMA_WAIT(0);
    hold(O);
    hold(R);
    auto sum = [&](int j) { return (M[j] + R[j]) + (O[j] + O[LO + j]); };
    float* to = out_rows + ((size_t)u * 256 + warp * 16 + g) * SUMS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int k = 0; k < GROUPS; k++)
        *(float2*)(to + 8 * SUMS * i + 8 * k + 2 * c) = make_float2(sum(4 * k + 2 * i), sum(4 * k + 2 * i + 1));
      if (c == 0) to[8 * SUMS * i + WIDTH] = O[ONE + 2 * i] + (R[ONE + 2 * i] + M[ONE + i]);
    }
  }
}

// Fetches columns in the order of the units; by one thread.
struct Fetcher {
  int unit, tile, end;
  const uint8_t* from;
  __device__ __forceinline__ void begin(const uint8_t* tiles, const Units& units) {
    const int4 next = units[unit];
    tile = (next.z >> 8) & 255;
    end = next.z >> 16;
    from = tiles + (size_t)next.y * (TILES * TILE_BYTES);
  }
  __device__ __forceinline__ void fetch(uint32_t shared, int slot, const uint8_t* tiles, const Units& units) {
    if (unit >= units.end) return;
    barrier_expect(shared + FULL + 8 * slot, TILE_BYTES);
    bulk_copy(shared + COLUMNS + slot * TILE_BYTES, from + tile * TILE_BYTES, TILE_BYTES, shared + FULL + 8 * slot);
    if (++tile == end && ++unit < units.end) begin(tiles, units);
  }
};

// What φᵀ is multiplied by: the rows of the next symmetric unit from the u-th on.
__device__ __forceinline__ int next_symmetric(const Units& units, int u) {
  while (u < units.end && !(units.list[u].z & 1)) u++;
  return u;
}
__device__ __forceinline__ void fetch_bytes(uint32_t shared, const uint8_t* bytes, const Units& units, int u) {
  if (u >= units.end) return;
  barrier_expect(shared + BYTES_FULL, BYTES_BYTES);
  bulk_copy(shared + BYTES, bytes + (size_t)units[u].x * BYTES_BYTES, BYTES_BYTES, shared + BYTES_FULL);
}
__device__ __forceinline__ void fetch_rows(uint32_t shared, const uint8_t* tiles, const Units& units, int u) {
  if (u >= units.end) return;
  const uint8_t* from = tiles + (size_t)units[u].x * (4 * TILE_BYTES) + EXPONENT_BYTES;
  barrier_expect(shared + ROWS_FULL, ROWS_BYTES);
  for (int w = 0; w < 4; w++)
    bulk_copy(shared + ROWS + w * VALUE_BYTES, from + w * TILE_BYTES, VALUE_BYTES, shared + ROWS_FULL);
}

__device__ __forceinline__ void transpose(
    uint32_t shared, const uint8_t* tiles, const uint8_t* bytes, const Units& units, float* out_columns) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - 16, lane = threadIdx.x % 32;
  const int g = lane / 4, c = lane % 4;
  const uint32_t mine = shared + (threadIdx.x % 128) * 16, ones = shared + ONES + (warp * 8 + g) * 8;
  float C[VALUES / 2];
#pragma unroll
  for (int i = 0; i < VALUES / 2; i++) C[i] = 0;
  Fetcher columns = {units.begin};
  columns.begin(tiles, units);
  if (threadIdx.x % 128 == 0) {
    for (int i = 0; i < RING; i++) columns.fetch(shared, i, tiles, units);
    const int u = next_symmetric(units, units.begin);
    fetch_bytes(shared, bytes, units, u);
    fetch_rows(shared, tiles, units, u);
  }
  int phase = 0, tile = 0;  // of the rows; how many tiles there were
#pragma unroll 1
  for (int u = units.begin; u < units.end; u++) {
    const int flags = __shfl_sync(0xffffffffu, units.list[u].z, 0);
    if (flags & 2) {
      const float4 zero = make_float4(0, 0, 0, 0);
#pragma unroll 1
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int k = 0; k < GROUPS; k++) save4(mine + t * SUM_BYTES + 2048 * k, zero);
        if (c == 0) save2(ones + t * ONES_BYTES, make_float2(0, 0));
      }
    }
    if (flags & 1) {
      barrier_wait(shared + BYTES_FULL, phase);
      barrier_wait(shared + ROWS_FULL, phase);
      phase ^= 1;
    }
#pragma unroll 1
    for (int t = (flags >> 8) & 255; t < flags >> 16; t++, tile++) {
      if (warp == 0 && tile > 0) {
        barrier_wait(shared + EMPTY + 8 * ((tile - 1) % RING), ((tile - 1) / RING) & 1);
        if (lane == 0) columns.fetch(shared, (tile - 1) % RING, tiles, units);
      }
      if (flags & 1) {
        const int b = t & 1;
        const bool last = t + 1 == flags >> 16;
        barrier_wait(shared + PHI_FULL + 8 * b, (t >> 1) & 1);
        uint32_t base = shared;
        asm volatile("" : "+r"(base));  // else all descriptors are kept, and registers are few
        const uint64_t v = descriptor(base + ROWS, VALUES * 16, 128);
        const uint64_t v_bytes = descriptor(base + BYTES, VALUES * 16, 128);
        const uint64_t rest = descriptor(base + REST, 1024, 128);
        hold(C);
        WGMMA_FENCE;
        begin_bytes(C, rest, v_bytes);
#pragma unroll
        for (int w = 1; w < 8; w++) add_bytes(C, rest + w * 128, v_bytes + POINTS * w);
        WGMMA_COMMIT;
        WGMMA_WAIT(0);
        hold(C);
        if (lane == 0) barrier_arrive(shared + REST_EMPTY);
        if (last) {
          asm volatile("bar.sync 1, 128;" ::: "memory");
          if (threadIdx.x % 128 == 0) fetch_bytes(shared, bytes, units, next_symmetric(units, u + 1));
        }
        const uint64_t phi = descriptor(base + PHI + b * PHI_BYTES, 1024, 128);
        hold(C);
        WGMMA_FENCE;
#pragma unroll
        for (int w = 0; w < 16; w++) add_transposed(C, phi + w * 128, v + POINTS * w);
        WGMMA_COMMIT;
        WGMMA_WAIT(0);
        hold(C);
        if (lane == 0) barrier_arrive(shared + PHI_EMPTY + 8 * b);
        if (last) {
          asm volatile("bar.sync 1, 128;" ::: "memory");
          if (threadIdx.x % 128 == 0) fetch_rows(shared, tiles, units, next_symmetric(units, u + 1));
        }
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
          const uint32_t at = mine + t * SUM_BYTES + 2048 * k;
          const float* hi = C + 4 * k;
          float4 x = load4(at);
          x.x += hi[0] + hi[LO]; x.y += hi[1] + hi[LO + 1]; x.z += hi[2] + hi[LO + 2]; x.w += hi[3] + hi[LO + 3];
          save4(at, x);
        }
        if (c == 0) {
          const float2 o = load2(ones + t * ONES_BYTES);
          save2(ones + t * ONES_BYTES, make_float2(o.x + (C[ONE] + C[ONE + 1]), o.y + (C[ONE + 2] + C[ONE + 3])));
        }
      }
    }
    if (flags & 4) {
      float* to = out_columns + ((size_t)units.list[u].w * (64 * TILES) + warp * 16 + g) * SUMS;
#pragma unroll 1
      for (int t = 0; t < TILES; t++) {
        float* here = to + t * (64 * SUMS);
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
          const float4 x = load4(mine + t * SUM_BYTES + 2048 * k);
          *(float2*)(here + 8 * k + 2 * c) = make_float2(x.x, x.y);
          *(float2*)(here + 8 * SUMS + 8 * k + 2 * c) = make_float2(x.z, x.w);
        }
        if (c == 0) {
          const float2 o = load2(ones + t * ONES_BYTES);
          here[WIDTH] = o.x;
          here[8 * SUMS + WIDTH] = o.y;
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(640, 1)
mean_symmetric(
    const uint32_t* rows, const uint8_t* tiles, const uint8_t* bytes, const int4* list, const int* begins,
    float* out_rows, float* out_columns, int block_offset, int super_offset, int blocks, int supers) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) {
      barrier_init(shared + FULL + 8 * i, 1);
      barrier_init(shared + EMPTY + 8 * i, 16);
    }
    for (int i = 0; i < PHI_BUFFERS; i++) {
      barrier_init(shared + PHI_FULL + 8 * i, 16);
      barrier_init(shared + PHI_EMPTY + 8 * i, 4);
    }
    barrier_init(shared + REST_EMPTY, 4);
    barrier_init(shared + ROWS_FULL, 1);
    barrier_init(shared + BYTES_FULL, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Units units = {list, begins[blockIdx.x], begins[blockIdx.x + 1], block_offset, super_offset, blocks, supers};
  if (units.begin == units.end) return;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role < 4) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    consume(shared, rows, units, out_rows);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    transpose(shared, tiles, bytes, units, out_columns);
  }
}
