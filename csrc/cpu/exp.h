// exp in fp32 from plain arithmetic, which gcc vectorizes (it vectorizes libm's only with -ffast-math).
#pragma once

#include <cstdint>
#include <cstring>

namespace megalite {

inline __attribute__((always_inline)) float from_bits(uint32_t bits) {
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline __attribute__((always_inline)) uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// condition ? y : x with masks: gcc turns a conditional with a constant into a branch and does not vectorize it.
inline __attribute__((always_inline)) float replaced_where(bool condition, float x, float y) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return from_bits((to_bits(x) & ~mask) | (to_bits(y) & mask));
}

// Accurate to 1 ulp; correct for NaN, infinities, overflow, and down to the smallest denormal. exp(x) = 2^n exp(r) with
// n = round(x / ln 2), ln 2 in two parts of which the first times n is exact; the polynomial is that of Cephes' expf.
inline __attribute__((always_inline)) float exp_f32(float x) {
  // Beyond these bounds the result is inf or 0; a NaN fails both comparisons and stays NaN.
  const bool above = x > 89.0f, below = x < -104.0f;
  x = replaced_where(below, replaced_where(above, x, 89.0f), -104.0f);
  // Adding 1.5 * 2^23 rounds to an integer, in the low bits of the sum; 254 is twice the exponent's bias.
  constexpr float kRound = 12582912.0f + 254.0f;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  // Pairs of terms first, so that additions do not wait for each other in one long chain.
  const float r2 = r * r;
  const float low = 5.0000001201e-1f + 1.6666665459e-1f * r;
  const float middle = 4.1665795894e-2f + 8.3334519073e-3f * r;
  const float high = 1.3981999507e-3f + 1.9875691500e-4f * r;
  const float y = ((low + r2 * (middle + r2 * high)) * r2 + r) + 1.0f;
  // 2^n in two factors, each in range, so that the second product is the one that overflows or rounds to a denormal.
  // For a NaN the factors are arbitrary, and the product is NaN.
  const uint32_t bits = to_bits(shifted), half = bits >> 1;
  return (y * from_bits(half << 23)) * from_bits((bits - half) << 23);
}

}  // namespace megalite
