// MEAN of the points themselves, every tile of φ computed once, for its rows and for its columns. Deterministic.
//
// A unit is 256 rows and up to TILES tiles of columns, a multiple of four. A program runs consecutive units, sorted by
// their columns. Four warpgroups of 64 rows each take exponentials and sum over columns, in registers, as long as a
// unit lasts (at "high" eight tiles). They leave φ in shared memory, where a fifth warpgroup reads it for the transposed product, 64 columns
// by 256 rows, and adds that to the columns' sums, which nobody else adds to. The fifth also fetches: columns in a ring,
// rows as what φᵀ is multiplied by.
//
// φ is two pieces: half precision, the nearest, and what that leaves. For the rows the second piece is in half
// precision too. For the columns of "fast" it is in three significant bits (e5m2), by half the traffic, and multiplied
// by the points in two pieces of four (e4m3). A byte's place along K is free, so rows g and g + 8 of 16, which one
// thread holds, are beside each other. In bytes the one is in two pieces, its second beside it.
//
// At "high" sums of products are short: what follows a near neighbour's is truncated beside it. A row's own φ is left to
// ``merge``.

constexpr int RING = 4;  // of tiles of columns, as many as there are in a group
constexpr int PHI_BUFFERS = 2;

constexpr int PHI = 0, PHI_BYTES = 256 * TILE_COLUMNS * 2;
constexpr int REST = PHI + PHI_BUFFERS * PHI_BYTES, REST_BYTES = HIGH ? PHI_BYTES : 256 * TILE_COLUMNS;
constexpr int ROWS = REST + PHI_BUFFERS * REST_BYTES, ROWS_BYTES = 4 * VALUE_BYTES;
constexpr int BYTES = ROWS + ROWS_BYTES, BYTES_BYTES = 4 * BYTE_TILE;
constexpr int COLUMNS = BYTES + BYTES_BYTES;
constexpr int FULL = COLUMNS + RING * TILE_BYTES, EMPTY = FULL + 8 * RING;
constexpr int PHI_FULL = EMPTY + 8 * RING, PHI_EMPTY = PHI_FULL + 8 * PHI_BUFFERS;
constexpr int ROWS_FULL = PHI_EMPTY + 8 * PHI_BUFFERS, SHARED = ROWS_FULL + 8;
static_assert(SHARED == MEAN_SHARED && SHARED <= 232448, "shared memory");

// Where a thread's sums of a product with hi | one, free | lo are: of hi first, of one, of lo.
constexpr int ONE = WIDTH / 2, LO = ONE + 4;
// In a descriptor's units: from sixteen rows of φ to the next, from sixteen points to the next, from 32 in bytes.
constexpr int PHI_ROWS = 128, POINTS = 16, BYTE_POINTS = 2 * VALUES;
// For its registers "high" multiplies φ by 24 columns at a time: by hi and lo together only in eight dimensions.
constexpr int PRODUCT = HIGH ? 24 : VALUES;
constexpr bool TOGETHER = PRODUCT == VALUES;
// How many times sixteen columns Tensor Cores add up, at "high" rows too: in few dimensions near neighbours are nearer.
constexpr int SHORT = HIGH && WIDTH == 8 ? 2 : 4;
constexpr bool KEPT = SHORT == 4;  // sums that products only add to: for others, of so many, the compiler lacks registers

// What a program does: {rows' block, columns' super, flags, slot of the columns' sums}. Flags: 1 symmetric, 2 the
// first of the slot, first tile << 8, end << 16. Blocks and supers count from an offset, round in a circle.
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

__device__ __forceinline__ void store4(uint32_t to, const uint32_t* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

template <int N> __device__ __forceinline__ void clear(float (&x)[N]) {
  UNROLL for (int i = 0; i < N; i++) x[i] = 0;
  hold(x);
}

// What is left in rows g and g + 8, two columns each, to bytes (e5m2: the upper half of half precision, rounded): of
// the first column both rows, then of the second.
__device__ __forceinline__ uint32_t residuals(uint32_t g, uint32_t g8) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, 0x7351;" : "=r"(r) : "r"(g + 0x00800080u), "r"(g8 + 0x00800080u));
  return r;
}
// Stores those of eight numbers.
__device__ __forceinline__ void store_residuals(uint32_t to, const uint32_t* x) {
  uint32_t r[4];
  UNROLL for (int i = 0; i < 4; i++) r[i] = residuals(x[2 * i], x[2 * i + 1]);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

__device__ __forceinline__ void consume(uint32_t shared, const uint32_t* rows, const Units& units, float* out_rows) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t phi_at = shared + PHI + ((warp * 2 + ((lane / 8) & 1)) * 8 + (lane / 16)) * 128 + (lane % 8) * 16;
  const uint32_t rest_at = HIGH ? phi_at + REST - PHI : shared + REST + (warp * 8 + lane / 8) * 128 + (lane % 8) * 16;
  const uint32_t ring = __shfl_sync(0xffffffffu, shared + COLUMNS, 0);
  // Exponents; sums by φ, or its first piece, and these added up, as a Tensor Core truncates what it adds to; at "fast"
  // sums by the second piece, for which that is nothing.
  float S[32], O[4 / SHORT][PRODUCT / 2], M[ONE + 2], R[LO];
  uint32_t P[16], L[16];
  Rows q;
  int phase = 0;
  int4 unit = units[units.begin];
  auto load = [&]() { load_rows(q, rows + (size_t)unit.x * 256 * ROW, warp * 16 + g, c); };
  auto multiply = [&](uint64_t v) {
    WGMMA_FENCE;
    UNROLL for (int part = 0; part < 4 / SHORT; part++) {  // the largest last, as what follows it is truncated
      const int first = part * SHORT;
      UNROLL for (int i = first; i < first + SHORT; i++) {
        if (!HIGH) add_hi(R, L + 4 * i, v + POINTS * i);  // by hi and one alone
        else if (i == first && !KEPT) begin_values(O[part], L + 4 * i, v + POINTS * i);
        else add_values(O[part], L + 4 * i, v + POINTS * i);
      }
      UNROLL for (int i = first; i < first + SHORT && !TOGETHER; i++)
        add_values(O[part], P + 4 * i, v + (GROUPS + 1) * GROUP / 16 + POINTS * i);
      UNROLL for (int i = first; i < first + SHORT; i++) add_values(O[part], P + 4 * i, v + POINTS * i);
    }
    WGMMA_COMMIT;
  };
  auto finish = [&](int k, bool any) {  // a tile: hi and lo together; of the ones a thread has two rows'
    WGMMA_WAIT;
    if (!HIGH) hold(R);
    UNROLL for (int part = 0; part < 4 / SHORT; part++) {
      float* sums = O[part];
      hold(O[part]);
      if (!HIGH && k < RING - 1) continue;
      UNROLL for (int i = 0; i < ONE; i++) M[i] += TOGETHER ? sums[i] + sums[LO + i] : sums[i];
      M[ONE] += sums[ONE]; M[ONE + 1] += sums[ONE + 2];
      if (KEPT) clear(O[part]);
    }
    if (lane == 0 && any) barrier_arrive(shared + EMPTY + 8 * k);
  };
  load();
  if (KEPT) clear(O[0]);
  clear(M);
  if (!HIGH) clear(R);
#pragma unroll 1
  for (int u = units.begin; u < units.end; u++) {
    const int flags = __shfl_sync(0xffffffffu, unit.z, 0);
    // The column of the next tile that is row g, if one is.
    int own = unit.x * 256 + warp * 16 + g - (unit.y * TILES + ((flags >> 8) & 255)) * TILE_COLUMNS;
    if (!HIGH && u + 1 < units.end) unit = units[u + 1];  // ahead, for which "high" has no registers
    bool adds = false, begun = false;
    auto save = [&](float* place, float x, float y) {
      const float2 before = adds ? *(float2*)place : make_float2(0, 0);
      *(float2*)place = make_float2(before.x + x, before.y + y);
    };
    auto flush = [&]() {
      float* to = out_rows + ((size_t)u * 256 + warp * 16 + g) * SUMS;
      UNROLL for (int i = 0; i < 2; i++) {
        UNROLL for (int k = 0; k < GROUPS; k++)
          save(to + 8 * (SUMS * i + k) + 2 * c, M[4 * k + 2 * i], M[4 * k + 2 * i + 1]);
        if (c == 0) save(to + 8 * SUMS * i + WIDTH, M[ONE + i], 0);
      }
      clear(M);
      adds = true;
    };
#pragma unroll 1
    for (int groups = ((flags >> 16) - ((flags >> 8) & 255)) / RING; groups > 0; groups--) {
      UNROLL for (int k = 0; k < RING; k++) {
        const uint32_t tile = ring + k * TILE_BYTES;
        barrier_wait(shared + FULL + 8 * k, phase);
        if (!HIGH || k > 0) finish((k + RING - 1) % RING, k > 0 || begun);
        take_exponents<true>(S, q, Columns(tile));
        if (k == RING - 1 && groups == 1) {  // the next unit's
          if (HIGH && u + 1 < units.end) unit = units[u + 1];
          load();
        }
        if (HIGH && own > -9 && own < TILE_COLUMNS) {
          UNROLL for (int i = 0; i < 32; i++)
            if (i / 4 * 8 + 2 * c + i % 2 == own + i / 2 % 2 * 8) S[i] = -1e4f;
        }
        own -= TILE_COLUMNS;
        UNROLL for (int p = 0; p < 16; p++) P[p] = exponentials(S[2 * p], S[2 * p + 1], L[p]);
        multiply(descriptor(tile + VALUES_AT, 128, GROUP));
        if (flags & 1) {
          barrier_wait(shared + PHI_EMPTY + 8 * (k & 1), (k >> 1) ^ 1);
          UNROLL for (int i = 0; i < 4; i++) store4(phi_at + (k & 1) * PHI_BYTES + 256 * i, P + 4 * i);
          UNROLL for (int i = 0; i < 4 && HIGH; i++) store4(rest_at + (k & 1) * REST_BYTES + 256 * i, L + 4 * i);
          UNROLL for (int i = 0; i < 2 && !HIGH; i++)
            store_residuals(rest_at + (k & 1) * REST_BYTES + 512 * i, L + 8 * i);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          if (lane == 0) barrier_arrive(shared + PHI_FULL + 8 * (k & 1));
        }
      }
      phase ^= 1;
      begun = true;
      if (HIGH) finish(RING - 1, true);
      if (HIGH && groups == 3) flush();  // eight tiles are added up: beside a heap of duplicates every addition rounds alike
    }
    if (!HIGH) {
      finish(RING - 1, true);
      UNROLL for (int i = 0; i < ONE; i++) M[i] += R[i];
      M[ONE] += R[ONE]; M[ONE + 1] += R[ONE + 2];
      clear(R);
    }
    flush();
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
__device__ __forceinline__ void fetch_rows(
    uint32_t shared, const uint8_t* tiles, const uint8_t* bytes, const Units& units, int u) {
  while (u < units.end && !(units.list[u].z & 1)) u++;
  if (u >= units.end) return;
  const size_t block = units[u].x;
  barrier_expect(shared + ROWS_FULL, ROWS_BYTES + BYTES_BYTES);
  for (int w = 0; w < 4; w++)
    bulk_copy(shared + ROWS + w * VALUE_BYTES, tiles + (block * 4 + w) * TILE_BYTES + VALUES_AT, VALUE_BYTES,
              shared + ROWS_FULL);
  if (!HIGH) bulk_copy(shared + BYTES, bytes + block * BYTES_BYTES, BYTES_BYTES, shared + ROWS_FULL);
}

__device__ __forceinline__ void transpose(
    uint32_t shared, const uint8_t* tiles, const uint8_t* bytes, const Units& units, float2* out_columns) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - 16, lane = threadIdx.x % 32;
  Fetcher columns = {units.begin};
  columns.begin(tiles, units);
  if (threadIdx.x % 128 == 0) {
    for (int i = 0; i < RING; i++) columns.fetch(shared, i, tiles, units);
    fetch_rows(shared, tiles, bytes, units, units.begin);
  }
  int phase = 0, tile = 0;  // of the rows; how many tiles there were
#pragma unroll 1
  for (int u = units.begin; u < units.end; u++) {
    const int flags = __shfl_sync(0xffffffffu, units.list[u].z, 0);
    float2* slot = out_columns + (size_t)units.list[u].w * (TILES * 32 * SUMS) + threadIdx.x % 128;
    if (flags & 2) {
#pragma unroll 8
      for (int i = 0; i < TILES * SUMS / 4; i++) slot[i * 128] = make_float2(0, 0);
    }
    if (flags & 1) {
      barrier_wait(shared + ROWS_FULL, phase);
      phase ^= 1;
    }
#pragma unroll 1
    for (int t = (flags >> 8) & 255; t < flags >> 16; t++, tile++) {
      if (warp == 0 && tile > 0) {
        barrier_wait(shared + EMPTY + 8 * ((tile - 1) % RING), ((tile - 1) / RING) & 1);
        if (lane == 0) columns.fetch(shared, (tile - 1) % RING, tiles, units);
      }
      if (!(flags & 1)) continue;
      const int b = t & 1;
      barrier_wait(shared + PHI_FULL + 8 * b, (t >> 1) & 1);
      uint32_t base = shared;
      asm volatile("" : "+r"(base));  // else all descriptors are kept, and registers are few
      const uint64_t rows = descriptor(base + ROWS, 128, GROUP), phi = descriptor(base + PHI + b * PHI_BYTES, 1024, 128);
      const uint64_t rest = descriptor(base + REST + b * REST_BYTES, 1024, 128);
      float M[ONE + 2], C[VALUES / 2];
#if HIGH
      clear(M);
      UNROLL for (int w = 0; w < 16; w += SHORT) {
        const uint64_t v = rows + w / 4 * (VALUE_BYTES / 16) + w % 4 * POINTS;
        WGMMA_FENCE;
        begin_transposed(C, rest + w * PHI_ROWS, v);
        UNROLL for (int i = 1; i < SHORT; i++) add_transposed(C, rest + (w + i) * PHI_ROWS, v + i * POINTS);
        UNROLL for (int i = 0; i < SHORT; i++) add_transposed(C, phi + (w + i) * PHI_ROWS, v + i * POINTS);
        WGMMA_TAKE(C);
        UNROLL for (int i = 0; i < ONE; i++) M[i] += C[i] + C[LO + i];
        M[ONE] += C[ONE]; M[ONE + 1] += C[ONE + 2];
      }
#else
      const uint64_t v_bytes = descriptor(base + BYTES, VALUES * 16, 128);
      WGMMA_FENCE;
      begin_bytes(C, rest, v_bytes);
      UNROLL for (int w = 1; w < 8; w++) add_bytes(C, rest + w * 128, v_bytes + BYTE_POINTS * w);
      WGMMA_TAKE(C);
      WGMMA_FENCE;
      UNROLL for (int w = 0; w < 16; w++)
        add_transposed(C, phi + w * PHI_ROWS, rows + w / 4 * (VALUE_BYTES / 16) + w % 4 * POINTS);
      WGMMA_TAKE(C);
      UNROLL for (int i = 0; i < ONE; i++) M[i] = C[i] + C[LO + i];
      M[ONE] = C[ONE] + C[ONE + 1], M[ONE + 1] = C[ONE + 2] + C[ONE + 3];  // and its second piece
#endif
      if (lane == 0) barrier_arrive(shared + PHI_EMPTY + 8 * b);
      if (t + 1 == flags >> 16) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (threadIdx.x % 128 == 0) fetch_rows(shared, tiles, bytes, units, u + 1);
      }
      float2* to = slot + t * (32 * SUMS);
      UNROLL for (int i = 0; i < ONE / 2; i++) atomicAdd(to + i * 128, make_float2(M[2 * i], M[2 * i + 1]));
      if (lane % 4 == 0) atomicAdd(to + ONE / 2 * 128, make_float2(M[ONE], M[ONE + 1]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(640, 1)
mean_symmetric(
    const uint32_t* rows, const uint8_t* tiles, const uint8_t* bytes, const int4* list, const int* begins,
    float* out_rows, float2* out_columns, int block_offset, int super_offset, int blocks, int supers) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    ring_init(shared + FULL, shared + EMPTY, RING, 16);
    for (int i = 0; i < PHI_BUFFERS; i++) {
      barrier_init(shared + PHI_FULL + 8 * i, 16);
      barrier_init(shared + PHI_EMPTY + 8 * i, 4);
    }
    barrier_init(shared + ROWS_FULL, 1);
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
