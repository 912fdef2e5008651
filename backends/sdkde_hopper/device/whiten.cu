// Points in bandwidths: what comes before packing.

#define SOME 512  // rows of which a centre is taken, at most

// The user's numbers, in either precision.
struct Numbers {
  const void* x;
  int single;
  __device__ __forceinline__ double operator[](size_t i) const {
    return single ? (double)((const float*)x)[i] : ((const double*)x)[i];
  }
};

// Per column, a program each, the lower median of every ``stride``-th row; NaN is left out.
extern "C" __global__ void __launch_bounds__(SOME)
find_centre(const void* given, int single, int count, int stride, int d, double* centre) {
  __shared__ double values[SOME];
  const Numbers x = {given, single};
  const int own = threadIdx.x, k = blockIdx.x;
  const bool inside = own < count;
  const double value = inside ? x[(size_t)own * stride * d + k] : 0.0;
  const bool valid = inside && value == value;
  values[own] = value;
  const int known = __syncthreads_count(valid);
  if (known == 0 && own == 0) centre[k] = 0.0 / 0.0;
  int rank = 0;
  for (int j = 0; j < count; j++) rank += values[j] < value || (values[j] == value && j < own);
  if (valid && rank == (known - 1) / 2) centre[k] = value;
}

// The sum of a number of every thread, in a fixed order, or the largest.
__device__ __forceinline__ double of_program(double x, bool sum) {
  __shared__ double warps[32];
  for (int m = 16; m > 0; m /= 2) {
    const double other = __shfl_xor_sync(0xffffffffu, x, m);
    x = sum ? x + other : fmax(x, other);
  }
  __syncthreads();  // threads may still read those of the call before
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = warps[0];
  for (int i = 1; i < blockDim.x / 32; i++) x = sum ? x + warps[i] : fmax(x, warps[i]);
  return x;
}

// u = L⁻¹(x − centre) for the rows of two arrays, sixteen threads a row, WHITENED rows a program, and the largest
// distance of those to ``slots``: infinite where a coordinate is NaN. ``scale``: null for one factor 1/h of every column;
// L's diagonal; or, a ``matrix``, L⁻¹.
#define WHITENED 128
extern "C" __global__ void whiten(
    const void* first, const void* second, int single, int n, int m, int d, double factor, const double* scale,
    int matrix, const double* centre, double* points, double* rows, double* slots) {
  const int blocks = (n + WHITENED - 1) / WHITENED, lane = threadIdx.x % 16;
  const bool own = blockIdx.x < blocks;
  const Numbers x = {own ? first : second, single};
  double *to = own ? points : rows, largest = 0.0;
  const int begin = (own ? blockIdx.x : blockIdx.x - blocks) * WHITENED + threadIdx.x / 16, count = own ? n : m;
  for (int i = 0; i < WHITENED; i += blockDim.x / 16) {
    const int row = begin + i;
    double square = 0.0;
    for (int k = lane; row < count && k < d; k += 16) {
      double u = 0.0;
      if (matrix) {
        for (int l = 0; l < d; l++) u = fma(x[(size_t)row * d + l] - centre[l], scale[(size_t)k * d + l], u);
      } else {
        u = x[(size_t)row * d + k] - centre[k];
        u = scale ? u / scale[k] : u * factor;
      }
      to[(size_t)row * d + k] = u;
      square = fma(u, u, square);
    }
    const double distance = sqrt(sum16(square));
    largest = distance <= 1e300 ? fmax(largest, distance) : 1.0 / 0.0;
  }
  largest = of_program(largest, false);
  if (threadIdx.x == 0) *(volatile double*)(slots + blockIdx.x) = largest;
}

// log w − log Σw of weights, (n,), by one program. To ``slot`` log max w − log min w: infinite where one is not positive
// and finite.
extern "C" __global__ void __launch_bounds__(1024)
weigh(const void* given, int single, int n, double* log_weights, double* slot) {
  const Numbers w = {given, single};
  double most = 0.0, least = -1.0 / 0.0, sum = 0.0;  // the least as the largest −w
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const double x = w[i] > 0.0 ? w[i] : 1.0 / 0.0;
    most = fmax(most, x);
    least = fmax(least, -x);
  }
  most = of_program(most, false);
  least = -of_program(least, false);
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += w[i] / most;
  const double log_of_all = log(most) + log(of_program(sum, true));
  for (int i = threadIdx.x; i < n; i += blockDim.x) log_weights[i] = log(w[i]) - log_of_all;
  if (threadIdx.x == 0) *(volatile double*)slot = most < 1.0 / 0.0 ? log(most) - log(least) : most;
}

// The largest of some numbers, (n,), by one program.
extern "C" __global__ void __launch_bounds__(1024)
find_largest(const double* x, int n, double* found) {
  double largest = -1.0 / 0.0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) largest = fmax(largest, x[i]);
  largest = of_program(largest, false);
  if (threadIdx.x == 0) found[0] = largest;
}
