// MEAN of the points themselves, every φ for its row alone: for weights, ranges, and more than sixteen dimensions.
//
// WARPGROUPS of 64 rows each, and one more that fetches the columns. A tile of 64 columns lies as pack_points has it,
// hi (WIDTH) | constants (8) | lo (WIDTH) | rests (8): so hi | constants is what φ is multiplied by too, a core matrix
// then being contiguous along the product's columns; the constants begin with a one, whose product is Σφ. With weights
// there is a second copy of the kind, of the pieces of w v: hi | w, its rest, one | lo | zeros, at "high" and a third. A
// tile's sums are added up in fp32, those of MOST_TILES in float64: beside a heap of duplicates every addition rounds alike.

constexpr int COPIES = (WEIGHTED + 1) * TILE;  // with weights there are two of a tile
constexpr int FULL = STAGES * COPIES, EMPTY = FULL + 8 * STAGES;
constexpr int SUMS = WIDTH + 4;
constexpr uint64_t LOW = (STEPS * 2 + 1) * (GROUP / 16);
constexpr bool THIRD = HIGH && WIDTH > 32;  // of what φ is multiplied by, which is off by more in more dimensions
constexpr int MOST_TILES = HIGH ? 8 : 64;
static_assert(EMPTY + 8 * STAGES == DENSE_SHARED && DENSE_SHARED <= 232448, "shared memory");

__device__ __forceinline__ void consume(
    uint32_t shared, const uint32_t* rows, double* out, int count, int own) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  float S[32], T[WIDTH / 2 + 4], V[WIDTH / 2], M[WIDTH / 2 + 2];
  uint32_t P[16], L[16];
  Rows q;
  load_rows(q, rows, warp * 16 + g, c);
  UNROLL for (int i = 0; i < WIDTH / 2 + 2; i++) M[i] = 0;
  double* to = out + (size_t)(warp * 16 + g) * SUMS;
  own += warp * 16 + g;
  int phase = 0, stage = 0;
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    barrier_wait(shared + FULL + 8 * stage, phase);
    const uint32_t at = __shfl_sync(0xffffffffu, shared + stage * COPIES, 0);
    const Columns columns(at);
    const uint64_t v = descriptor(at + WEIGHTED * TILE, 128, GROUP);
    take_exponents<true>(S, q, columns);
    const int at_own = own - t * TILE_COLUMNS;  // the column of this tile that is row g, if one is
    if (HIGH && at_own > -9 && at_own < TILE_COLUMNS) {
      UNROLL for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + 2 * c + i % 2 == at_own + i / 2 % 2 * 8) S[i] = -1e4f;
    }
    UNROLL for (int p = 0; p < 16; p++) P[p] = exponentials(S[2 * p], S[2 * p + 1], L[p]);
    // At "high" half of a tile at a time: what follows a near neighbour's is truncated beside it.
    constexpr int PER = HIGH ? 2 : 4;
    UNROLL for (int first = 0; first < 4; first += PER) {
      auto take = [&](const uint32_t* x, uint64_t tile, int i) {
        add_values(T, x + 4 * i, tile + 16 * i);
      };
      const uint32_t* x = L + 4 * first;
      WGMMA_FENCE;  // the largest last, as what follows it is truncated
      begin_values(T, x, v + 16 * first);
      UNROLL for (int i = 1; i < PER; i++) take(L, v, first + i);
      if (THIRD) {  // a product of another shape has sums of its own: PTX orders those of one shape only
        const uint32_t* y = P + 4 * first;
        begin_points(V, y, v + 2 * LOW + 16 * first);
        UNROLL for (int i = 1; i < PER; i++) {
          y = P + 4 * (first + i);
          add_points(V, y, v + 2 * LOW + 16 * (first + i));
        }
      }
      UNROLL for (int i = first; i < first + PER; i++) take(P, v + LOW, i);
      UNROLL for (int i = first; i < first + PER; i++) take(P, v, i);
      WGMMA_TAKE(T);
      if (THIRD) hold(V);
      if (first + PER == 4 && lane == 0) barrier_arrive(shared + EMPTY + 8 * stage);
      UNROLL for (int i = 0; i < WIDTH / 2; i++) M[i] += THIRD ? T[i] + V[i] : T[i];
      // Of the eight constants' products a thread has two for each row: 1 in the first, or w, its rest, and 1.
      M[WIDTH / 2] += WEIGHTED ? T[WIDTH / 2] + T[WIDTH / 2 + 1] : T[WIDTH / 2];
      M[WIDTH / 2 + 1] += WEIGHTED ? T[WIDTH / 2 + 2] + T[WIDTH / 2 + 3] : T[WIDTH / 2 + 2];
    }
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
    if ((t + 1) % MOST_TILES != 0 && t + 1 < count) continue;
    auto add = [&](double* place, float x, float y) {
      double2 sum = t < MOST_TILES ? make_double2(0.0, 0.0) : *(double2*)place;
      *(double2*)place = make_double2(sum.x + x, sum.y + y);
    };
    UNROLL for (int i = 0; i < WIDTH / 2; i += 2) {  // dimensions 8 (i / 4) + 2 c, of row g and of g + 8
      add(to + (i / 2 % 2) * 8 * SUMS + i / 4 * 8 + 2 * c, M[i], M[i + 1]);
      M[i] = M[i + 1] = 0;
    }
    UNROLL for (int i = 0; i < 2; i++) {
      double* place = to + i * 8 * SUMS + WIDTH + c;
      if (c < 2) *place = (t < MOST_TILES ? 0.0 : *place) + M[WIDTH / 2 + i];
      M[WIDTH / 2 + i] = 0;
    }
  }
}

// At "high" a row's own φ, in the column ``own`` for the first one, is left to finish_dense: beside it a Tensor Core
// truncates of others what matters where they are many and alike.
//
// rows: as packed, whole blocks; out: (parts, blocks of rows, SUMS): Σ w φ v, Σ w φ, Σ φ with weights, and what is
// free. Every part has ``length`` tiles at most, of ``count``. ``listed``, where it is not null, has no rows yet.
extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
mean_dense(
    const uint32_t* rows, const uint8_t* tiles, double* out, int blocks, int count, int length, int own, int* listed) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    if (listed && blockIdx.x == 0) listed[0] = 0;
    ring_init(shared + FULL, shared + EMPTY, STAGES, 4 * WARPGROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int block = blockIdx.x % blocks, part = blockIdx.x / blocks;
  const uint8_t* from = tiles + (size_t)part * length * COPIES;
  count = min(length, count - part * length);
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role < WARPGROUPS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    const size_t first = (size_t)WARPGROUPS * 64 * block, to = (size_t)WARPGROUPS * 64 * blockIdx.x;
    consume(shared, rows + first * ROW, out + to * SUMS, count, own + (int)first - part * length * TILE_COLUMNS);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 128 * WARPGROUPS) {
      int stage = 0, phase = 1;
#pragma unroll 1
      for (int t = 0; t < count; t++) {
        barrier_wait(shared + EMPTY + 8 * stage, phase);
        barrier_expect(shared + FULL + 8 * stage, COPIES);
        bulk_copy(shared + stage * COPIES, from + (size_t)t * COPIES, COPIES, shared + FULL + 8 * stage);
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
      }
    }
  }
}
