// Exponents of WIDTH dimensions, of 64 rows in registers and a tile of 64 columns in shared memory. A tile lies as
// pack_points has it, hi (WIDTH) | constants (8) | lo (WIDTH) | rests (8), and at "high" the third piece of the points
// (WIDTH).

// The constants are added after half of the dimensions, where sums of near points are smallest: see bounds.py.
constexpr int STEPS = WIDTH / 16, HALF = (STEPS + 1) / 2;
constexpr int GROUP = TILE_COLUMNS * 16;  // bytes of eight dimensions of a tile
constexpr int TILE = ((2 + HIGH) * WIDTH / 8 + 2) * GROUP;
constexpr int ROW = (2 + HIGH) * WIDTH / 2 + 8;  // pairs of numbers of a row

// Zero. Where there are registers the compiler is not told: it would make it anew between products, which then wait.
__device__ __forceinline__ uint32_t none() {
  if (WIDTH > 16) return 0;
  uint32_t x;
  asm volatile("mov.b32 %0, 0;" : "=r"(x));
  return x;
}

#if WIDTH == 8
// Two pieces to a product: of rows g and g + 8, hi and constants; lo and hi; none and lo, at "high" third and lo, and rests
// and hi.
typedef uint32_t Rows[3 + HIGH][4];

__device__ __forceinline__ void load_rows(Rows& q, const uint32_t* rows, int g, int c) {
  UNROLL for (int i = 0; i < 2; i++) {
    auto piece = [&](int k) { return rows[(size_t)(g + i * 8) * ROW + k * 4 + c]; };
    q[0][i] = q[1][2 + i] = piece(0);
    q[0][2 + i] = piece(1);
    q[1][i] = q[2][2 + i] = piece(3);
    q[2][i] = HIGH ? piece(4) : none();
#if HIGH
    q[3][i] = piece(2);
    q[3][2 + i] = piece(0);
#endif
  }
}

struct Columns {
  uint64_t hi_constants, hi_lo, rest_third;
  __device__ __forceinline__ explicit Columns(uint32_t at) {
    hi_constants = descriptor(at, GROUP, 128), hi_lo = descriptor(at, 2 * GROUP, 128);
    rest_third = hi_constants + 3 * GROUP / 16;
  }
};

template <bool LOW> __device__ __forceinline__ void take_exponents(float (&S)[32], const Rows& q, const Columns& tile) {
  static_assert(LOW);
  WGMMA_FENCE;
  begin_n64(S, q[0], tile.hi_constants);
  add_n64(S, q[1], tile.hi_lo);
  add_n64(S, q[2], tile.hi_lo);
  if (HIGH) add_n64(S, q[3], tile.rest_third);
  WGMMA_TAKE(S);
}
#else

// What sixteen rows are to the products of their warp; a thread has some numbers of rows g and g + 8.
constexpr int RESTS = (2 + HIGH) * STEPS + 1;
typedef uint32_t Rows[RESTS + HIGH][4];

__device__ __forceinline__ void load_rows(Rows& q, const uint32_t* rows, int g, int c) {
  UNROLL for (int k = 0; k < RESTS; k++) {
    UNROLL for (int i = 0; i < 4; i++) q[k][i] = rows[(size_t)(g + (i & 1) * 8) * ROW + k * 8 + (i >> 1) * 4 + c];
  }
  UNROLL for (int i = 0; i < 2 && HIGH; i++) {  // constants and rests are two products
    q[RESTS][2 + i] = q[STEPS][2 + i];
    q[RESTS][i] = none();
    q[STEPS][2 + i] = none();
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
  begin_n64(S, q[0], tile.hi);
  UNROLL for (int k = 1; k < HALF; k++) add_n64(S, q[k], tile.hi + k * (GROUP / 8));
  add_n64(S, q[STEPS], tile.constants);
  UNROLL for (int k = HALF; k < STEPS; k++) add_n64(S, q[k], tile.hi + k * (GROUP / 8));
  UNROLL for (int k = 0; k < STEPS; k++) {
    const uint32_t* lo = q[STEPS + 1 + k];
    if (APART && k == 0) begin_n64(rest, lo, tile.hi);
    else add_n64(rest, lo, tile.hi + k * (GROUP / 8));
    add_n64(rest, q[k], tile.lo + k * (GROUP / 8));
    if (LOW || HIGH) add_n64(rest, lo, tile.lo + k * (GROUP / 8));
  }
  UNROLL for (int k = 0; k < STEPS && HIGH; k++) {
    add_n64(rest, q[2 * STEPS + 1 + k], tile.hi + k * (GROUP / 8));
    add_n64(rest, q[k], tile.third + k * (GROUP / 8));
  }
  if (HIGH) add_n64(rest, q[RESTS], tile.constants);
  WGMMA_TAKE(S);
  if (APART) {
    hold(R);
    UNROLL for (int i = 0; i < 32; i++) S[i] += R[i];
  }
}
#endif
