// MEAN of listed rows by direct differences in float64, ROWS at a time: where weights leave of a row less than what the
// pieces of the other kernels resolve.

constexpr int ROWS = 8, THREADS = 128, WARPS = THREADS / 32, MOST = 64;

// Distances of some rows from a thread's column, of THREADS that are in shared memory: log w - ½ r².
__device__ __forceinline__ void exponents(
    const double* shared, const double (&row)[ROWS][MOST], int rows, double log_weight, int d, double (&e)[ROWS]) {
  UNROLL for (int r = 0; r < ROWS; r++) e[r] = 0.0;
  for (int k = 0; k < d; k += 2) {  // rows' are zero from d on
    const double x = shared[threadIdx.x * (d | 1) + k], y = k + 1 < d ? shared[threadIdx.x * (d | 1) + k + 1] : 0.0;
    UNROLL for (int r = 0; r < ROWS; r++) {
      if (r >= rows) break;
      const double2 of = *(const double2*)&row[r][k];
      e[r] += (x - of.x) * (x - of.x);
      e[r] += (y - of.y) * (y - of.y);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) e[r] = log_weight > -1e299 ? log_weight - 0.5 * e[r] : -1e300;
}

// points (n, d) and log_weights (n,), float64, are the columns; listed: how many ``of_rows``, and which.
extern "C" __global__ void __launch_bounds__(THREADS)
mean_exact(
    const double* of_rows, const double* points, const double* log_weights, int n, int d, const int* listed,
    double* log_sum, double* shift) {
  extern __shared__ double shared[];
  __shared__ __align__(16) double row[ROWS][MOST];
  __shared__ double top[ROWS], tops[ROWS][WARPS], totals[ROWS][WARPS], means[ROWS][WARPS][MOST];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = listed[0];
  const int most_rows = min(ROWS, (int)((count + gridDim.x - 1) / gridDim.x));  // few are dealt out to all programs
  auto fetch = [&](int first) {
    __syncthreads();
    const int columns = min(THREADS, n - first);
    for (int i = threadIdx.x; i < columns * d; i += THREADS)
      shared[i / d * (d | 1) + i % d] = points[(size_t)first * d + i];
    __syncthreads();
    return (int)threadIdx.x < columns ? log_weights[first + threadIdx.x] : -1e300;
  };
#pragma unroll 1
  for (int begin = blockIdx.x * most_rows; begin < count; begin += gridDim.x * most_rows) {
    const int rows = min(most_rows, count - begin);
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * MOST; i += THREADS) {
      const int k = i % MOST;
      row[i / MOST][k] = k < d ? of_rows[(size_t)listed[1 + begin + min(i / MOST, rows - 1)] * d + k] : 0.0;
    }
    double e[ROWS], high[ROWS], total[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) { high[r] = -1e300; total[r] = 0.0; }
#pragma unroll 1
    for (int first = 0; first < n; first += THREADS) {
      exponents(shared, row, rows, fetch(first), d, e);
      UNROLL for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        if (e[r] > high[r]) {
          total[r] = total[r] * exp(high[r] - e[r]) + 1.0;
          high[r] = e[r];
        } else if (!(e[r] <= high[r] - 50.0)) {  // NaN counts
          total[r] += exp(e[r] - high[r]);
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      double most = high[r];
      for (int m = 16; m > 0; m /= 2) most = fmax(most, __shfl_xor_sync(0xffffffffu, most, m));
      double all = total[r] * exp(high[r] - most);
      for (int m = 16; m > 0; m /= 2) all += __shfl_xor_sync(0xffffffffu, all, m);
      if (lane == 0) { tops[r][warp] = most; totals[r][warp] = all; }
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
      const int r = threadIdx.x;
      double most = tops[r][0], all = 0.0;
      for (int i = 1; i < WARPS; i++) most = fmax(most, tops[r][i]);
      for (int i = 0; i < WARPS; i++) all += totals[r][i] * exp(tops[r][i] - most);
      top[r] = most + log(all);
      if (r < rows) log_sum[listed[1 + begin + r]] = top[r];
    }
    // Columns that matter are few: a warp takes them one by one, a thread two dimensions.
    double mean[ROWS][2] = {};
#pragma unroll 1
    for (int first = 0; first < n; first += THREADS) {
      exponents(shared, row, rows, fetch(first), d, e);
      UNROLL for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        const double p = e[r] > top[r] - 40.0 ? exp(e[r] - top[r]) : 0.0;
        for (unsigned left = __ballot_sync(0xffffffffu, p > 0.0); left; left &= left - 1) {
          const int j = __ffs(left) - 1;
          const double share = __shfl_sync(0xffffffffu, p, j);
          const double* column = shared + (warp * 32 + j) * (d | 1);
          if (lane < d) mean[r][0] += share * (column[lane] - row[r][lane]);
          if (lane + 32 < d) mean[r][1] += share * (column[lane + 32] - row[r][lane + 32]);
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      means[r][warp][lane] = mean[r][0];
      means[r][warp][lane + 32] = mean[r][1];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * d; i += THREADS) {
      double all = 0.0;
      for (int w = 0; w < WARPS; w++) all += means[i / d][w][i % d];
      const size_t at = (size_t)listed[1 + begin + i / d] * d + i % d;
      shift[at] = top[i / d] == top[i / d] ? all : top[i / d];
    }
  }
}
