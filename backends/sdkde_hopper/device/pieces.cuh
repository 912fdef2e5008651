// Points in pieces, and what packing and adding up share.

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
  uint16_t both;
  uint32_t halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(x));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
  back = (float)of_half((uint16_t)halves);
  return (uint8_t)both;
}

// v = √(log2 e) u as two pieces, hi + lo in half precision, hi a multiple of ``step``; and a third, what they leave.
struct Pieces {
  uint16_t hi, lo, third;
  __device__ __forceinline__ Pieces(double u, double step) {
    const double v = u * SQRT_LOG2E;
    hi = half_of((float)(fabs(v) < 2048.0 * step ? rint(v / step) * step : v));  // rounded once: beyond, by half precision
    lo = half_of((float)(v - of_half(hi)));
    third = half_of((float)(v - packed()));
  }
  __device__ __forceinline__ double packed(bool all = false) const {
    return of_half(hi) + of_half(lo) + (all ? of_half(third) : 0.0);
  }
};

// c = -½|v|² + offset as three pieces, multiples of step²: 24 bits, which two do not hold. Points beyond the last have c
// so low that φ is 0.
__device__ __forceinline__ uint16_t constant(double square, double offset, double step, bool inside, int piece) {
  const double grid = step * step, c = inside ? rint((-0.5 * square + offset) / grid) * grid : -60000.0;
  const uint16_t c1 = half_of((float)c), c2 = half_of((float)(c - of_half(c1)));
  return piece == 0 ? c1 : piece == 1 ? c2 : half_of((float)(c - of_half(c1) - of_half(c2)));
}
// By which a point's φ are divided in ``mean_symmetric`` at "fast", and it and its one are multiplied where they are what φ
// is multiplied by. The φ of duplicates are alike, and so would be what two pieces round off: this sets them apart, and the
// sum of many is right to more bits than each. Eleven bits, one in half precision; the same for a point and the 256th
// after it.
__device__ __forceinline__ double share(int point) { return 1.0 - (point * 77u & 255u) * 0x1p-11; }
// What is left of c beyond its multiple of step².
__device__ __forceinline__ uint16_t rest_of(double square, double step, bool inside) {
  const double grid = step * step, c = -0.5 * square;
  return half_of(inside ? (float)(c - rint(c / grid) * grid) : 0.0f);
}
// What stands among a row's eight constants, and a column's: the one has its pieces where the other has ones. The first
// of a column's is a one.
__device__ __forceinline__ uint16_t constant_of_row(double square, double offset, double step, bool inside, int k) {
  return k < 3 ? constant(square, offset, step, inside, k) : k < 6 ? 0x3c00 : 0;
}
__device__ __forceinline__ uint16_t constant_of_column(double square, double offset, double step, bool inside, int k) {
  return k < 3 ? 0x3c00 : k < 6 ? constant(square, offset, step, inside, k - 3) : 0;
}
// Over sixteen threads.
__device__ __forceinline__ double sum16(double x) {
  UNROLL for (int m = 8; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m, 16);
  return x;
}

// Of a sum of numbers that are not negative; NaN stays.
__device__ __forceinline__ double log_of(double sum) { return sum <= 0 ? -1.0 / 0.0 : log(sum); }
