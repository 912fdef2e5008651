// Points in pieces, and partial sums of the kernels whose φ is for its row alone put together.

// Points as what the kernels take, in ``width`` dimensions, 8 or a multiple of 16 up to 64; sixteen threads for each.
//
// rows: (padded, 2 width + 16), hi | constants (8) | rests (8) | lo, the constants larger by ``row_offset``. tiles: of 64
// columns, hi | constants (8) | lo | rests (8), eight columns of these after another. The rests are for "high": what the
// grid leaves of a row's and of a column's constant, each by the other's one, and ``high_offset``. Their first is zero,
// as MEAN adds it to the constants' first. With ``third`` that piece of the points is the last, in rows and in tiles.
//
// With ``weighted``, a copy of every tile for what φ is multiplied by: pieces of w v for those of v, and for the constants w,
// its rest, and one, w the weight relative to the largest, two to WEIGHT_BITS. logs: of the weights relative to the
// largest, to base two. bytes: the copy in bytes, sixteen points after another, and w are shares; see pieces.cuh. Rows,
// tiles, logs and bytes are written where they are not null.
extern "C" __global__ void pack_points(
    const double* points, const double* log_weights, const double* top, int n, int padded, int d, int width,
    double step, double row_offset, double high_offset, uint16_t* rows, uint16_t* tiles, float* logs, uint8_t* bytes,
    int weighted, int third) {
  const int point = (blockIdx.x * blockDim.x + threadIdx.x) / 16, lane = threadIdx.x % 16;
  if (point >= padded) return;
  const bool inside = point < n;
  auto made = [&](int k) { return Pieces(inside && k < d ? points[(size_t)point * d + k] : 0.0, step); };
  const Pieces own = made(lane);
  auto piece = [&](int k) { return k < 16 ? own : made(k); };  // in up to sixteen dimensions made once
  double square = 0.0;
  for (int k = lane; k < width; k += 16) {
    const double x = piece(k).packed(third);
    square += x * x;
  }
  square = sum16(square);
  const uint16_t one = 0x3c00;
  const double more = bytes ? -log2(share(point)) : 0.0;
  if (rows) {
    uint16_t* row = rows + (size_t)point * ((2 + third) * width + 16);
    for (int k = lane; k < width; k += 16) {
      const Pieces v = piece(k);
      row[k] = v.hi;
      row[width + 16 + k] = v.lo;
      if (third) row[2 * width + 16 + k] = v.third;
    }
    row[width + lane] = lane < 8    ? constant_of_row(square, row_offset + more, step, inside, lane)
                        : !third    ? 0
                        : lane == 9 ? rest_of(square, step, inside)
                        : lane == 10 ? one
                        : lane == 11 ? half_of((float)high_offset)
                                     : 0;
  }
  const double log_weight = inside && log_weights ? log_weights[point] - top[0] : 0.0;
  if (logs && lane == 0) logs[point] = (float)(log_weight * 1.4426950408889634);
  if (!tiles) return;
  const int j = point % 64, groups = width / 8, copy = ((2 + third) * groups + 2) * 512;
  uint16_t* to = tiles + (size_t)(point / 64) * (copy << weighted) + j / 8 * 64 + j % 8 * 8 + lane % 8;
  for (int k = lane; k < width; k += 16) {
    const Pieces v = piece(k);
    to[k / 8 * 512] = v.hi;
    to[(groups + 1 + k / 8) * 512] = v.lo;
    if (third) to[(2 * groups + 2 + k / 8) * 512] = v.third;
  }
  uint16_t* constants = to + (lane < 8 ? groups : 2 * groups + 1) * 512;
  constants[0] = lane < 8    ? constant_of_column(square, more, step, inside, lane)
                 : lane == 10 ? rest_of(square, step, inside)
                 : lane == 9 || lane == 11 ? one
                                           : 0;
  if (!weighted) return;
  const double w = !inside ? 0.0 : bytes ? share(point) : exp(log_weight) * (1 << WEIGHT_BITS);
  float back, unused;
  // Rows g and g + 8 of 16 beside each other.
  uint8_t* byte = bytes + (size_t)(point / 64 * 4 + j / 16) * (16 * (2 * width + 8)) + lane % 8 * 16 + j % 8 * 2 + j / 8 % 2;
  for (int k = lane; k < width; k += 16) {
    const double x = w * piece(k).packed(third);
    const uint16_t near = half_of((float)x);
    to[copy + k / 8 * 512] = near;
    const uint16_t low = half_of((float)(x - of_half(near)));
    to[copy + (groups + 1 + k / 8) * 512] = low;
    if (third) to[copy + (2 * groups + 2 + k / 8) * 512] = half_of((float)(x - of_half(near) - of_half(low)));
    if (!bytes) continue;
    byte[k / 8 * 128] = byte_of((float)x, back);
    byte[(groups + 1 + k / 8) * 128] = byte_of((float)(x - back), unused);
  }
  const uint16_t near = half_of((float)w);
  constants[copy] = lane == 0 ? near : lane == 1 ? half_of((float)(w - of_half(near))) : lane == 2 && inside ? one : 0;
  if (!bytes || lane >= 8) return;
  const uint8_t first = byte_of((float)w, back), second = byte_of((float)w - back, unused);
  byte[groups * 128] = lane == 0 ? first : lane == 1 ? second : 0;
}

// The end of ``mean_dense``: ℓ and the shift of every row, a warp for each, from the sums of all parts of the columns
// in a fixed order: (parts, padded, width + 4).
//
// With weights, ``top`` is the largest log weight; rows whose sums are too small for the pieces that they are made of
// are listed. Of w v, 2⁻²⁵ in every dimension is lost, where w is up to two to WEIGHT_BITS; of φ 2⁻²⁵, which is
// ``raised`` by so many bits: ``more`` says how many times as much as "fast" needs has to be there. At "high" a row's
// own φ, of column ``own`` for the first row, is added here where it is one of so many ``columns``.
extern "C" __global__ void __launch_bounds__(256)
finish_dense(
    const double* out, int parts, int padded, int width, const uint16_t* rows, const double* log_weights,
    const double* top, int n, int d, double* log_sum, double* shift, int* listed, double raised, double more,
    int third, int own, int columns) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  double v[2] = {0, 0}, sum = 0, count = 0;
  for (int part = 0; part < parts; part++) {
    const double* from = out + ((size_t)part * padded + row) * (width + 4);
    if (lane < width) v[0] += from[lane];
    if (lane + 32 < width) v[1] += from[lane + 32];
    sum += from[width];
    count += from[width + 1];
  }
  const uint16_t* packed = rows + (size_t)row * ((2 + third) * width + 16);
  const bool adds = own + row >= 0 && own + row < columns;
  const double one = exp2(raised);
  const double mine = adds && listed ? one * exp(log_weights[own + row] - top[0]) * (1 << WEIGHT_BITS) : adds * one;
  sum += mine;
  count += adds ? one : 0.0;
  UNROLL for (int i = 0; i < 2; i++) {
    const int k = lane + 32 * i;
    double here = of_half(packed[k]) + of_half(packed[width + 16 + k]);  // what φ was multiplied by
    if (third && width > 32) here += of_half(packed[2 * width + 16 + k]);
    const size_t at = (size_t)row * d + k;
    if (k < d) shift[at] = sum <= 0 ? 0.0 : ((v[i] + mine * here) / sum - here) * (1.0 / SQRT_LOG2E);
  }
  if (lane > 0) return;
  if (!listed) {
    log_sum[row] = log_of(sum) - raised * LN2 + log_weights[0];
    return;
  }
  log_sum[row] = log_of(sum) - (raised + WEIGHT_BITS) * LN2 + top[0];
  const double all = fmin(exp(-top[0]), 131072.0);  // the sum of all weights, at most, in units of the largest
  const bool enough =
      sum >= more * count * 0x1p-5 && sum >= more * all * exp2(raised + WEIGHT_BITS - 22);
  if (!enough) listed[1 + atomicAdd(listed, 1)] = row;
}

extern "C" __global__ void move_points(const double* points, const double* shift, int count, double* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = points[i] + 0.5 * shift[i];
}

// ℓ of every row from the maxima and sums of all parts of the columns, in a fixed order: (parts, m, 3); ``laplace``:
// log M, the sign and log |L| of LAPLACE. Rows with no column have what padding leaves. Exponents were ``raised`` by so
// many bits. ``form`` 1: the log density, ℓ + constant or log |L| + constant, NaN where L is negative; 2: the density; to
// ``single`` where that is not null, else to ``log_sum``.
extern "C" __global__ void finish_log_sum(
    const float* out, const double* top_weight, int m, int d, int parts, int laplace, double* log_sum, double* sign,
    double* log_magnitude, double raised, double constant, int form, float* single) {
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
  const double all = none ? nothing : log(total) + (top - raised) * LN2 + top_weight[0];
  const double half = laplace ? 1.0 + 0.5 * d : 1.0, square = laplace ? -LN2 * moment / total : 0.0;  // the mean of ½ r²
  const double side = none || half == square ? 0.0 : half > square ? 1.0 : half < square ? -1.0 : square;
  const double size = none ? nothing : all + log(fabs(half - square));
  const double value = form == 2 ? side * exp(size + constant) : form == 1 && side < 0.0 ? 0.0 / 0.0
                     : form == 1 ? size + constant : none ? nothing : all + log(half + square);
  if (single) single[row] = (float)value;
  else log_sum[row] = value;
  if (form || !laplace) return;
  sign[row] = side;
  log_magnitude[row] = size;
}
