// How points lie for ``mean_symmetric``, in WIDTH dimensions: 8 or 16; and partial sums put together.
//
// Rows and tiles are as pack_points has them. What φ is multiplied by is hi (WIDTH) | one, free (8) | lo (WIDTH) of a tile,
// at "fast" of its copy, by shares.

static_assert(WIDTH == 8 || WIDTH == 16, "dimensions");
constexpr int GROUPS = WIDTH / 8;
constexpr int VALUES = 2 * WIDTH + 8, VALUE_BYTES = TILE_COLUMNS * VALUES * 2;
constexpr int VALUES_AT = HIGH ? 0 : TILE, TILE_BYTES = VALUES_AT + TILE;
constexpr int BYTE_TILE = HIGH ? 0 : TILE_COLUMNS * VALUES;
constexpr int SUMS = WIDTH + 4;  // of a row: Σφv, Σφ, and three that are free

// Adds up what the units and the columns' slots have of 32 rows, always in the same order, and at the end makes ℓ and
// the shift of them. A thread has four of a row's SUMS.
//
// ``sums`` (padded, SUMS), float64, carries the sums from one launch to the next. ``own_phi``: a row's own φ, where it is not
// among them.
constexpr int QUADS = SUMS / 4, THREADS = 32 * QUADS;
extern "C" __global__ void __launch_bounds__(THREADS)
merge(
    const float4* out_rows, const float4* out_columns, const int* row_begin, const int* row_units,
    const int* column_begin, const int* column_slots, int block_offset, int super_offset, int blocks, int supers,
    double* sums, int begins, int ends, const uint16_t* rows, const double* log_weights, int n, int d, double own_phi,
    double* log_sum, double* shift) {
  __shared__ double shared[THREADS * 4];
  const int first = blockIdx.x * 32, own = threadIdx.x;  // in the four's order of 32 rows
  int block = first / 256 - block_offset, super = first / (64 * TILES) - super_offset;
  if (block < 0) block += blocks;
  if (super < 0) super += supers;
  const int last_unit = row_begin[block + 1], last_slot = column_begin[super + 1];
  if (!begins && !ends && row_begin[block] == last_unit && column_begin[super] == last_slot) return;  // half of them
  double s[4] = {0, 0, 0, 0};
  auto add = [&](float4 x) { s[0] += x.x; s[1] += x.y; s[2] += x.z; s[3] += x.w; };
  const float4* here = out_rows + first % 256 * QUADS + own;
#pragma unroll 8
  for (int j = row_begin[block]; j < last_unit; j++) add(here[(size_t)row_units[j] * (256 * QUADS)]);
  // As a thread of ``transpose`` has them: of points g and g + 8, in dimensions 2 c and 2 c + 1 of every eight, or the ones.
  const int point = first % (64 * TILES) + own / QUADS, quad = own % QUADS;
  const bool ones = quad == WIDTH / 4;
  const int second = point / 8 % 2, pair = point / 64 * QUADS + (ones ? WIDTH / 4 : quad / 2 * 2 + second);
  here = out_columns + pair * 64 + point % 64 / 16 * 16 + point % 8 * 2 + (ones ? 0 : quad % 2);
#pragma unroll 4
  for (int j = column_begin[super]; j < last_slot; j++) {
    const float4 x = here[(size_t)column_slots[j] * (64 * TILES * QUADS)];
    if (ones) s[0] += second ? x.y : x.x;
    else add(x);
  }
  double* kept = sums + (size_t)first * SUMS + own * 4;
  UNROLL for (int i = 0; i < 4; i++) {
    if (!begins) s[i] += kept[i];
    if (!ends) kept[i] = s[i];
    shared[own * 4 + i] = s[i];
  }
  if (!ends) return;
  __syncthreads();
  const int count = min(32, n - first);
  for (int i = threadIdx.x; i < count * d; i += THREADS) {
    const int row = first + i / d, k = i % d;
    const uint16_t* of_row = rows + (size_t)row * (2 * ROW) + k;
    const double packed = of_half(of_row[0]) + of_half(of_row[WIDTH + 16]);  // hi and lo
    const double sum = shared[i / d * SUMS + WIDTH] + own_phi;  // of some other points it may be 0
    const double away = (shared[i / d * SUMS + k] + own_phi * packed) / sum - packed;
    const size_t at = (size_t)first * d + i;
    shift[at] = sum <= 0 ? 0.0 : away * (1.0 / SQRT_LOG2E);
  }
  if (own < count)
    log_sum[first + own] = log_of((shared[own * SUMS + WIDTH] + own_phi) * (HIGH ? 1.0 : share(first + own))) -
                           SCALE_BITS * LN2 + log_weights[0];
}
