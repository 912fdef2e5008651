// Points in pieces, and partial sums put together.

#define SQRT_LOG2E 1.2011224087864498
#define LN2 0.6931471805599453

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

// v = √(log2 e) u as two pieces: hi + lo in half precision, hi a multiple of ``step``.
struct Pieces {
  uint16_t hi, lo;
  __device__ __forceinline__ Pieces(double u, double step) {
    const double v = u * SQRT_LOG2E;
    hi = half_of((float)(rint(v / step) * step));
    lo = half_of((float)(v - of_half(hi)));
  }
  __device__ __forceinline__ double packed() const { return of_half(hi) + of_half(lo); }
};

// c = -½|v|² + offset as two pieces, multiples of step²: the first, or the second. Points beyond the last have c so low
// that φ is 0.
__device__ __forceinline__ uint16_t constant(double square, double offset, double step, bool inside, bool first) {
  const double grid = step * step, c = inside ? rint((-0.5 * square + offset) / grid) * grid : -60000.0;
  const uint16_t c1 = half_of((float)c);
  return first ? c1 : half_of((float)(c - of_half(c1)));
}
// Over sixteen threads.
__device__ __forceinline__ double sum16(double x) {
#pragma unroll
  for (int m = 8; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m, 16);
  return x;
}

// Points (n, d), float64, in bandwidths, as what ``mean_symmetric`` takes; sixteen threads for each: rows (padded, 48),
// tiles of columns, and the same in bytes.
extern "C" __global__ void pack_symmetric(
    const double* points, int n, int padded, int d, double step, uint16_t* rows, uint16_t* tiles, uint8_t* bytes) {
  const int point = (blockIdx.x * blockDim.x + threadIdx.x) / 16, k = threadIdx.x % 16;
  if (point >= padded) return;
  const bool inside = point < n;
  const Pieces v(inside && k < d ? points[(size_t)point * d + k] : 0.0, step);
  const double packed = v.packed(), square = sum16(packed * packed);
  const uint16_t one = 0x3c00;
  const uint16_t of_row = constant(square, SCALE_BITS, step, inside, k == 0);
  // A column's constant stands where the row has its ones.
  const uint16_t of_column = constant(square, 0.0, step, inside, (k & 1) == 0);
  uint16_t* row = rows + (size_t)point * 48;
  row[k] = v.hi;
  row[16 + k] = k < 2 ? of_row : k < 4 ? one : 0;
  row[32 + k] = v.lo;
  const int tile = point / 64, j = point % 64;
  uint16_t* to = tiles + (size_t)tile * (TILE_BYTES / 2) + j / 8 * 64 + j % 8 * 8 + k % 8;
  to[k / 8 * 512] = v.hi;
  to[(2 + k / 8) * 512] = k < 2 ? one : k < 4 ? of_column : 0;
  to[(4 + k / 8) * 512] = v.lo;
  uint16_t* values = tiles + (size_t)tile * (TILE_BYTES / 2) + EXPONENT_BYTES / 2 + j / 8 * 320 + k % 8 * 8 + j % 8;
  values[k / 8 * 64] = v.hi;
  values[(3 + k / 8) * 64] = v.lo;
  if (k < 8) values[128] = k == 0 && inside ? one : 0;
  // Rows g and g + 8 of 16 beside each other.
  float back, unused;
  const uint8_t coarse = byte_of((float)packed, back), fine = byte_of((float)(packed - back), unused);
  uint8_t* byte = bytes + (size_t)tile * (64 * VALUES) + j / 16 * 640 + k % 8 * 16 + j % 8 * 2 + j / 8 % 2;
  byte[k / 8 * 128] = coarse;
  byte[(3 + k / 8) * 128] = fine;
  if (k < 8) byte[256] = k == 0 && inside ? 0x38 : 0;  // 1
}

// Points as what the other kernels take, in ``width`` dimensions, a multiple of 16 up to 64; sixteen threads for each.
//
// rows: (padded, 2 width + 16), hi | constants | lo, the constants larger by ``row_offset``. tiles: of 64 columns, hi |
// constants (8) | lo | zeros (8), eight columns of these after another. With ``weighted``, a copy of every tile for
// what φ is multiplied by: w v in two pieces for v, and for the constants w, its rest, and one, w the weight relative
// to the largest, two to WEIGHT_BITS. logs: of the weights relative to the largest, to base two. Rows, tiles and logs
// are written where they are not null.
extern "C" __global__ void pack_points(
    const double* points, const double* log_weights, const double* top, int n, int padded, int d, int width,
    double step, double row_offset, uint16_t* rows, uint16_t* tiles, float* logs, int weighted) {
  const int point = (blockIdx.x * blockDim.x + threadIdx.x) / 16, lane = threadIdx.x % 16;
  if (point >= padded) return;
  const bool inside = point < n;
  auto piece = [&](int k) { return Pieces(inside && k < d ? points[(size_t)point * d + k] : 0.0, step); };
  double square = 0.0;
  for (int k = lane; k < width; k += 16) {
    const double x = piece(k).packed();
    square += x * x;
  }
  square = sum16(square);
  const uint16_t one = 0x3c00;
  if (rows) {
    uint16_t* row = rows + (size_t)point * (2 * width + 16);
    for (int k = lane; k < width; k += 16) {
      const Pieces v = piece(k);
      row[k] = v.hi;
      row[width + 16 + k] = v.lo;
    }
    row[width + lane] = lane < 2 ? constant(square, row_offset, step, inside, lane == 0) : lane < 4 ? one : 0;
  }
  const double log_weight = inside && log_weights ? log_weights[point] - top[0] : 0.0;
  if (logs && lane == 0) logs[point] = (float)(log_weight * 1.4426950408889634);
  if (!tiles) return;
  const int j = point % 64, groups = width / 8, copy = (2 * groups + 2) * 512;
  uint16_t* to = tiles + (size_t)(point / 64) * (copy << weighted) + j / 8 * 64 + j % 8 * 8 + lane % 8;
  for (int k = lane; k < width; k += 16) {
    const Pieces v = piece(k);
    to[k / 8 * 512] = v.hi;
    to[(groups + 1 + k / 8) * 512] = v.lo;
  }
  uint16_t* constants = to + (lane < 8 ? groups : 2 * groups + 1) * 512;
  constants[0] = lane < 2 ? one : lane < 4 ? constant(square, 0.0, step, inside, lane == 2) : 0;
  if (!weighted) return;
  const double w = inside ? exp(log_weight) * (1 << WEIGHT_BITS) : 0.0;
  for (int k = lane; k < width; k += 16) {
    const double x = w * piece(k).packed();
    const uint16_t near = half_of((float)x);
    to[copy + k / 8 * 512] = near;
    to[copy + (groups + 1 + k / 8) * 512] = half_of((float)(x - of_half(near)));
  }
  const uint16_t near = half_of((float)w);
  constants[copy] = lane == 0 ? near : lane == 1 ? half_of((float)(w - of_half(near))) : lane == 2 && inside ? one : 0;
}

// Of a sum of numbers that are not negative; NaN stays.
__device__ __forceinline__ double log_of(double sum) { return sum <= 0 ? -1.0 / 0.0 : log(sum); }

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
    const double sum = shared[i / d * 20 + 16];  // of some other points it may be 0
    const double away = shared[i / d * 20 + k] / sum - packed;
    shift[(size_t)first * d + i] = sum <= 0 ? 0.0 : away * (1.0 / SQRT_LOG2E);
  }
  if (own < count)
    log_sum[first + own] = log_of(shared[own * 20 + 16]) - SCALE_BITS * LN2 + log_weights[0];
}

// The end of ``mean_dense``: ℓ and the shift of every row, a warp for each, from the sums of all parts of the columns
// in a fixed order: (parts, padded, width + 4).
//
// With weights, ``top`` is the largest log weight; rows whose sums are too small for the pieces that they are made of
// are listed. Of w v, 2⁻²⁵ in every dimension is lost, where w is up to two to WEIGHT_BITS; of φ, 2⁻³⁹.
extern "C" __global__ void __launch_bounds__(256)
finish_dense(
    const float* out, int parts, int padded, int width, const uint16_t* rows, const double* log_weights,
    const double* top, int n, int d, double* log_sum, double* shift, int* listed) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  double v[2] = {0, 0}, sum = 0, count = 0;
  for (int part = 0; part < parts; part++) {
    const float* from = out + ((size_t)part * padded + row) * (width + 4);
    if (lane < width) v[0] += from[lane];
    if (lane + 32 < width) v[1] += from[lane + 32];
    sum += from[width];
    count += from[width + 1];
  }
  const uint16_t* packed = rows + (size_t)row * (2 * width + 16);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int k = lane + 32 * i;
    const double own = of_half(packed[k]) + of_half(packed[width + 16 + k]);
    if (k < d) shift[(size_t)row * d + k] = sum <= 0 ? 0.0 : (v[i] / sum - own) * (1.0 / SQRT_LOG2E);
  }
  if (lane > 0) return;
  if (!listed) {
    log_sum[row] = log_of(sum) - SCALE_BITS * LN2 + log_weights[0];
    return;
  }
  log_sum[row] = log_of(sum) - (SCALE_BITS + WEIGHT_BITS) * LN2 + top[0];
  const double all = fmin(exp(-top[0]), 131072.0);  // the sum of all weights, at most, in units of the largest
  const bool enough = sum >= count * 0x1p-5 && sum >= all * 0x1p-22 * (1 << SCALE_BITS) * (1 << WEIGHT_BITS);
  if (!enough) listed[1 + atomicAdd(listed, 1)] = row;
}

// ℓ of every row from the maxima and sums of all parts of the columns, in a fixed order: (parts, m, 3); ``laplace``:
// log M, the sign and log |L| of LAPLACE. Rows with no column have what padding leaves.
extern "C" __global__ void finish_log_sum(
    const float* out, const double* top_weight, int m, int d, int parts, int laplace, double* log_sum, double* sign,
    double* log_magnitude) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m) return;
  double top = -1e300, total = 0.0, moment = 0.0;
  for (int part = 0; part < parts; part++) top = fmax(top, (double)out[((size_t)part * m + row) * 3]);
  for (int part = 0; part < parts; part++) {
    const float* x = out + ((size_t)part * m + row) * 3;
    const double more = exp2(x[0] - top);
    total += x[1] * more;
    moment += x[2] * more;
  }
  const double nothing = -1.0 / 0.0;
  const bool none = top < -2e4 && total == total;  // NaN stays
  const double all = none ? nothing : log(total) + (top - RAISED_BITS) * LN2 + top_weight[0];
  if (!laplace) {
    log_sum[row] = all;
    return;
  }
  const double half = 1.0 + 0.5 * d, square = -LN2 * (moment / total - RAISED_BITS);  // the mean of ½ r²
  log_sum[row] = none ? nothing : all + log(half + square);
  sign[row] = none || half == square ? 0.0 : half > square ? 1.0 : half < square ? -1.0 : square;
  log_magnitude[row] = none ? nothing : all + log(fabs(half - square));
}
