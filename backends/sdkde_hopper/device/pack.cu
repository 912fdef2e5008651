// Points in pieces, and partial sums put together.

__device__ __forceinline__ uint16_t half_of(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
__device__ __forceinline__ double of_half(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
// Nearest number of four significant bits.
__device__ __forceinline__ uint8_t byte_of(float x, float& back) {
  uint16_t both, low;
  uint32_t halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(x));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
  low = (uint16_t)halves;
  back = (float)of_half(low);
  return (uint8_t)both;
}

// Points (n, d), float64, in bandwidths, as rows (padded, 48) and as tiles of columns; sixteen threads for each.
//
// v = √(log2 e) u is hi + lo in half precision, hi a multiple of ``step``; c = -½|v|² is two pieces, multiples of
// step². Rows' c is larger by ``row_offset``. Rows, columns and what MEAN needs besides are written where ``rows``,
// ``tiles`` and ``bytes`` are not null; without ``bytes``, tiles are what the exponents need. Points beyond n have c
// so low that φ is 0.
extern "C" __global__ void pack(
    const double* points, int n, int padded, int d, double step, double row_offset, uint16_t* rows, uint16_t* tiles,
    uint8_t* bytes) {
  const int point = (blockIdx.x * blockDim.x + threadIdx.x) / 16, k = threadIdx.x % 16;
  if (point >= padded) return;
  const bool inside = point < n;
  const double v = inside && k < d ? points[(size_t)point * d + k] * 1.2011224087864498 : 0.0;
  const uint16_t hi = half_of((float)(rint(v / step) * step));
  const uint16_t lo = half_of((float)(v - of_half(hi)));
  const double packed = of_half(hi) + of_half(lo);
  double square = packed * packed;
#pragma unroll
  for (int m = 8; m > 0; m /= 2) square += __shfl_xor_sync(0xffffffffu, square, m, 16);
  const double grid = step * step;
  auto constant = [&](double offset) {  // lane 0 has the first piece, lane 1 the second
    const double c = inside ? rint((-0.5 * square + offset) / grid) * grid : -60000.0;
    const uint16_t c1 = half_of((float)c);
    return k == 0 ? c1 : half_of((float)(c - of_half(c1)));
  };
  const uint16_t one = 0x3c00;
  const uint16_t of_row = constant(row_offset), of_column = constant(0.0);
  if (rows) {
    uint16_t* row = rows + (size_t)point * 48;
    row[k] = hi;
    row[16 + k] = k < 2 ? of_row : k < 4 ? one : 0;
    row[32 + k] = lo;
  }
  const int tile = point / 64, j = point % 64;
  // A column's constant stands where the row has its ones.
  const uint16_t column_c = __shfl_sync(0xffffffffu, of_column, (k - 2) & 1, 16);
  if (tiles) {
    uint16_t* to = tiles + (size_t)tile * ((bytes ? TILE_BYTES : EXPONENT_BYTES) / 2) + j / 8 * 64 + j % 8 * 8 + k % 8;
    to[k / 8 * 512] = hi;
    to[(2 + k / 8) * 512] = k < 2 ? one : k < 4 ? column_c : 0;
    to[(4 + k / 8) * 512] = lo;
  }
  if (bytes) {
    uint16_t* values = tiles + (size_t)tile * (TILE_BYTES / 2) + EXPONENT_BYTES / 2 + j / 8 * 320 + k % 8 * 8 + j % 8;
    values[k / 8 * 64] = hi;
    values[(3 + k / 8) * 64] = lo;
    if (k < 8) values[128] = k == 0 && inside ? one : 0;
    // Rows g and g + 8 of 16 beside each other.
    float back, unused;
    const uint8_t coarse = byte_of((float)packed, back), fine = byte_of((float)(packed - back), unused);
    uint8_t* to = bytes + (size_t)tile * (64 * VALUES) + j / 16 * 640 + k % 8 * 16 + j % 8 * 2 + j / 8 % 2;
    to[k / 8 * 128] = coarse;
    to[(3 + k / 8) * 128] = fine;
    if (k < 8) to[256] = k == 0 && inside ? 0x38 : 0;  // 1
  }
}

// Adds up what the units and the columns' slots have of 32 rows, always in the same order, and at the end makes ℓ and
// the shift of them. A row's 20 sums are Σφv in 16 dimensions, Σφ, and three that are free; a thread has four of them.
//
// ``sums`` (padded, 20), float64, carries the sums from one launch to the next.
extern "C" __global__ void __launch_bounds__(160)
merge(
    const float4* out_rows, const float4* out_columns, const int* row_begin, const int* row_units,
    const int* column_begin, const int* column_slots, int block_offset, int super_offset, int blocks, int supers,
    double* sums, int begins, int ends, const uint16_t* rows, const double* log_weights, int n, int d, double* log_sum,
    double* shift) {
  __shared__ double shared[160 * 4];
  const int first = blockIdx.x * 32, own = threadIdx.x;  // in the four's order of 32 rows
  int block = first / 256 - block_offset, super = first / (64 * TILES) - super_offset;
  if (block < 0) block += blocks;
  if (super < 0) super += supers;
  double s[4] = {0, 0, 0, 0};
  auto add = [&](float4 x) { s[0] += x.x; s[1] += x.y; s[2] += x.z; s[3] += x.w; };
  const float4* here = out_rows + first % 256 * 5 + own;
  const int last_unit = row_begin[block + 1], last_slot = column_begin[super + 1];
#pragma unroll 8
  for (int j = row_begin[block]; j < last_unit; j++) add(here[(size_t)row_units[j] * (256 * 5)]);
  here = out_columns + first % (64 * TILES) * 5 + own;
#pragma unroll 4
  for (int j = column_begin[super]; j < last_slot; j++) add(here[(size_t)column_slots[j] * (64 * TILES * 5)]);
  double* kept = sums + (size_t)first * 20 + own * 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (!begins) s[i] += kept[i];
    if (!ends) kept[i] = s[i];
    shared[own * 4 + i] = s[i];
  }
  if (!ends) return;
  __syncthreads();
  const int count = min(32, n - first);
  for (int i = threadIdx.x; i < count * d; i += 160) {
    const int row = first + i / d, k = i % d;
    const double packed = of_half(rows[(size_t)row * 48 + k]) + of_half(rows[(size_t)row * 48 + 32 + k]);
    const double mean = shared[i / d * 20 + k] / shared[i / d * 20 + 16];
    shift[(size_t)first * d + i] = (mean - packed) * (1.0 / 1.2011224087864498);
  }
  if (own < count) log_sum[first + own] = log(shared[own * 20 + 16]) - SCALE_BITS * 0.6931471805599453 + log_weights[0];
}

// ℓ of every row from the maxima and sums of all parts of the columns, in a fixed order: (parts, m, 2).
extern "C" __global__ void finish_log_sum(
    const float2* out, const double* log_weights, int m, int parts, double* log_sum) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m) return;
  double top = -1e300, total = 0.0;
  for (int part = 0; part < parts; part++) top = fmax(top, (double)out[(size_t)part * m + row].x);
  for (int part = 0; part < parts; part++) {
    const float2 x = out[(size_t)part * m + row];
    total += x.y * exp2(x.x - top);
  }
  log_sum[row] = log(total) + (top - RAISED_BITS) * 0.6931471805599453 + log_weights[0];
}
