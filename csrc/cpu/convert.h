// fp32 <-> bf16 in plain integer arithmetic, which gcc vectorizes for every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
// One binary for three instruction sets; the loader picks one (AVX-512, AVX2, SSE2).
#define MEGALITE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGALITE_CLONES
#endif

namespace megalite {

struct BF16 {
  uint16_t bits;
};

inline __attribute__((always_inline)) float widen(float x) { return x; }

inline __attribute__((always_inline)) float widen(BF16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline __attribute__((always_inline)) void narrow(float x, float& y) { y = x; }

// Round to nearest even; NaN stays NaN. With masks: gcc turns a conditional with a constant into a branch, and
// then sometimes does not vectorize.
inline __attribute__((always_inline)) void narrow(float x, BF16& y) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = -static_cast<uint32_t>((bits & 0x7fffffffu) > 0x7f800000u);
  y.bits = static_cast<uint16_t>((rounded & ~nan) | (0x7fc0u & nan));
}

}  // namespace megalite
