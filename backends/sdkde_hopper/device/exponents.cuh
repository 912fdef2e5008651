// Exponents of WIDTH dimensions, of 64 rows in registers and a tile of 64 columns in shared memory: for dense.cu and
// log_sum.cu. A tile lies as pack_points has it, hi (WIDTH) | constants (8) | lo (WIDTH) | rests (8), and
// at "high" the third piece of the points (WIDTH).

// The constants are added after half of the dimensions, where sums of near points are smallest: see bounds.py.
constexpr int STEPS = WIDTH / 16, HALF = (STEPS + 1) / 2;
constexpr int GROUP = TILE_COLUMNS * 16;  // bytes of eight dimensions of a tile
constexpr int TILE = ((2 + HIGH) * WIDTH / 8 + 2) * GROUP;
constexpr int ROW = (2 + HIGH) * WIDTH / 2 + 8;  // pairs of numbers of a row

// What sixteen rows are to the products of their warp; a thread has some numbers of rows g and g + 8.
typedef uint32_t Rows[(2 + HIGH) * STEPS + 1][4];

__device__ __forceinline__ void load_rows(Rows& q, const uint32_t* rows, int g, int c) {
#pragma unroll
  for (int k = 0; k < (2 + HIGH) * STEPS + 1; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) q[k][i] = rows[(size_t)(g + (i & 1) * 8) * ROW + k * 8 + (i >> 1) * 4 + c];
  }
}

// And what a tile is that lies ``at``, in shared memory.
struct Columns {
  uint64_t hi, lo, third, constants;
  __device__ __forceinline__ explicit Columns(uint32_t at) {
    hi = descriptor(at, GROUP, 128), lo = hi + (STEPS * 2 + 1) * (GROUP / 16), third = lo + (lo - hi);
    constants = descriptor(at + STEPS * 2 * GROUP, (STEPS * 2 + 1) * GROUP, 128);
  }
};

// LOW: with lo·lo, which cannot weigh in a log sum at "fast". At "high" hi·hi and the constants are exact; what the
// constants' grid leaves of them comes last, for log sums with what raises the exponents: of sums that are small until
// then little is truncated. For shifts in more than 32 dimensions, whose steps are many, the rest is summed apart.
template <bool LOW> __device__ __forceinline__ void take_exponents(float (&S)[32], const Rows& q, const Columns& tile) {
  constexpr bool APART = LOW && HIGH && WIDTH > 32;
  float R[32];
  float(&rest)[32] = APART ? R : S;
  WGMMA_FENCE;
  begin_n64(S, q[0][0], q[0][1], q[0][2], q[0][3], tile.hi);
#pragma unroll
  for (int k = 1; k < HALF; k++) add_n64(S, q[k][0], q[k][1], q[k][2], q[k][3], tile.hi + k * (GROUP / 8));
  add_n64(S, q[STEPS][0], q[STEPS][1], 0, 0, tile.constants);
#pragma unroll
  for (int k = HALF; k < STEPS; k++) add_n64(S, q[k][0], q[k][1], q[k][2], q[k][3], tile.hi + k * (GROUP / 8));
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    const uint32_t* x = q[STEPS + 1 + k];
    if (APART && k == 0) begin_n64(rest, x[0], x[1], x[2], x[3], tile.hi);
    else add_n64(rest, x[0], x[1], x[2], x[3], tile.hi + k * (GROUP / 8));
    add_n64(rest, q[k][0], q[k][1], q[k][2], q[k][3], tile.lo + k * (GROUP / 8));
    if (LOW || HIGH) add_n64(rest, x[0], x[1], x[2], x[3], tile.lo + k * (GROUP / 8));
  }
#if HIGH
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    const uint32_t* x = q[2 * STEPS + 1 + k];
    add_n64(rest, x[0], x[1], x[2], x[3], tile.hi + k * (GROUP / 8));
    add_n64(rest, q[k][0], q[k][1], q[k][2], q[k][3], tile.third + k * (GROUP / 8));
  }
#endif
  if (HIGH) add_n64(rest, 0, 0, q[STEPS][2], q[STEPS][3], tile.constants);
  WGMMA_COMMIT;
  WGMMA_WAIT(0);
  hold(S);
  if (APART) {
    hold(R);
#pragma unroll
    for (int i = 0; i < 32; i++) S[i] += R[i];
  }
}
