// The mixer behind every hash and every stream of numbers here. Twin of data/sampling/hash64.py.
//
// The 64-bit finaliser known as Stafford's variant 13 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom
// number generators", 2014). It is a bijection that spreads well; it keeps no secret.

#pragma once

#include <cstdint>

namespace phalanx {

inline constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15;  // 2^64 divided by the golden ratio, made odd

constexpr std::uint64_t mix64(std::uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

}  // namespace phalanx
