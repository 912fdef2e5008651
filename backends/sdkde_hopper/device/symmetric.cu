// Before and after ``mean_symmetric``: points in pieces, and partial sums put together.
//
// How points lie for ``mean_symmetric``, in WIDTH dimensions: 8 or 16.
//
// For the exponents a point is hi (WIDTH) | constants (8, or 16) | lo (WIDTH), as a row in this order, and in a tile of
// 64 columns K slowest, eight of K after another. As what φ is multiplied by it is hi (WIDTH) | one, free (8) | lo
// (WIDTH), transposed: eight points after another. In bytes likewise, sixteen points after another.

static_assert(WIDTH == 8 || WIDTH == 16, "dimensions");
constexpr int GROUPS = WIDTH / 8;
constexpr int EXPONENTS = 3 * WIDTH, EXPONENT_BYTES = TILE_COLUMNS * EXPONENTS * 2;
constexpr int VALUES = 2 * WIDTH + 8, VALUE_BYTES = TILE_COLUMNS * VALUES * 2;
constexpr int TILE_BYTES = EXPONENT_BYTES + VALUE_BYTES;
constexpr int BYTE_TILE = TILE_COLUMNS * VALUES;
constexpr int SUMS = WIDTH + 4;  // of a row: Σφv, Σφ, and three that are free

// By which a point's φ are divided, and it and its one are multiplied where they are what φ is multiplied by. The φ of
// duplicates are alike, and so would be what two pieces round off: this sets them apart, and the sum of many is right
// to more bits than each. Eleven bits, one in half precision; the same for a point and the 256th after it.
__device__ __forceinline__ double share(int point) { return 1.0 - (point * 77u & 255u) * 0x1p-11; }

// Points (n, d), float64, in bandwidths, as what ``mean_symmetric`` takes; sixteen threads for each: rows (padded,
// EXPONENTS), tiles of columns, and the same in bytes.
extern "C" __global__ void pack_symmetric(
    const double* points, int n, int padded, int d, double step, uint16_t* rows, uint16_t* tiles, uint8_t* bytes) {
  const int point = (blockIdx.x * blockDim.x + threadIdx.x) / 16, k = threadIdx.x % 16;
  if (point >= padded) return;
  const bool inside = point < n;
  const Pieces v(inside && k < d ? points[(size_t)point * d + k] : 0.0, step);
  const double packed = v.packed(), square = sum16(packed * packed);
  const double w = share(point), more = -log2(w), value = w * packed;
  const uint16_t near = half_of((float)value);
  if (k >= WIDTH) return;
  uint16_t* row = rows + (size_t)point * EXPONENTS;
  row[k] = v.hi;
  row[WIDTH + k] = constant_of_row(square, SCALE_BITS + more, step, inside, k);
  row[2 * WIDTH + k] = v.lo;
  const int tile = point / 64, j = point % 64;
  uint16_t* to = tiles + (size_t)tile * (TILE_BYTES / 2) + j / 8 * 64 + j % 8 * 8 + k % 8;
  to[k / 8 * 512] = v.hi;
  to[(GROUPS + k / 8) * 512] = constant_of_column(square, more, step, inside, k);
  to[(2 * GROUPS + k / 8) * 512] = v.lo;
  uint16_t* values =
      tiles + (size_t)tile * (TILE_BYTES / 2) + EXPONENT_BYTES / 2 + j / 8 * (8 * VALUES) + k % 8 * 8 + j % 8;
  values[k / 8 * 64] = near;
  values[(GROUPS + 1 + k / 8) * 64] = half_of((float)(value - of_half(near)));
  if (k < 8) values[GROUPS * 64] = k == 0 && inside ? half_of((float)w) : 0;
  // Rows g and g + 8 of 16 beside each other.
  float back, unused;
  const uint8_t coarse = byte_of((float)value, back), fine = byte_of((float)(value - back), unused);
  uint8_t* byte = bytes + (size_t)tile * BYTE_TILE + j / 16 * (16 * VALUES) + k % 8 * 16 + j % 8 * 2 + j / 8 % 2;
  byte[k / 8 * 128] = coarse;
  byte[(GROUPS + 1 + k / 8) * 128] = fine;
  if (k < 8) {
    const uint8_t first = byte_of((float)w, back), second = byte_of((float)w - back, unused);
    byte[GROUPS * 128] = !inside ? 0 : k == 0 ? first : k == 1 ? second : 0;
  }
}

// Adds up what the units and the columns' slots have of 32 rows, always in the same order, and at the end makes ℓ and
// the shift of them. A thread has four of a row's SUMS.
//
// ``sums`` (padded, SUMS), float64, carries the sums from one launch to the next. Where ``moved_from`` is not null, half
// the shift is added to it.
constexpr int QUADS = SUMS / 4, THREADS = 32 * QUADS;
extern "C" __global__ void __launch_bounds__(THREADS)
merge(
    const float4* out_rows, const float4* out_columns, const int* row_begin, const int* row_units,
    const int* column_begin, const int* column_slots, int block_offset, int super_offset, int blocks, int supers,
    double* sums, int begins, int ends, const uint16_t* rows, const double* log_weights, int n, int d, double* log_sum,
    double* shift, const double* moved_from) {
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
  here = out_columns + first % (64 * TILES) * QUADS + own;
#pragma unroll 4
  for (int j = column_begin[super]; j < last_slot; j++) add(here[(size_t)column_slots[j] * (64 * TILES * QUADS)]);
  double* kept = sums + (size_t)first * SUMS + own * 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (!begins) s[i] += kept[i];
    if (!ends) kept[i] = s[i];
    shared[own * 4 + i] = s[i];
  }
  if (!ends) return;
  __syncthreads();
  const int count = min(32, n - first);
  for (int i = threadIdx.x; i < count * d; i += THREADS) {
    const int row = first + i / d, k = i % d;
    const double packed = of_half(rows[(size_t)row * EXPONENTS + k]) + of_half(rows[(size_t)row * EXPONENTS + 2 * WIDTH + k]);
    const double sum = shared[i / d * SUMS + WIDTH];  // of some other points it may be 0
    const double away = shared[i / d * SUMS + k] / sum - packed;
    const size_t at = (size_t)first * d + i;
    const double by = sum <= 0 ? 0.0 : away * (1.0 / SQRT_LOG2E);
    shift[at] = moved_from ? moved_from[at] + 0.5 * by : by;
  }
  if (own < count)
    log_sum[first + own] = log_of(shared[own * SUMS + WIDTH] * share(first + own)) - SCALE_BITS * LN2 + log_weights[0];
}
