// Types of numbers: how each is kept in memory, and in which type it is computed with.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace phalanx {

template <class T>
struct Plain {
  using Kept = T;
  using Sum = T;
  static Sum widened(Kept value) { return value; }
  static Kept narrowed(Sum value) { return value; }
};

struct Bfloat16 {
  using Kept = std::uint16_t;
  using Sum = float;
  static float widened(Kept bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  static Kept narrowed(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<Kept>(value != value ? 0x7FC0 : nearest);
  }
};

// Both have as many numbers.
inline void narrow(std::span<const float> from, std::uint16_t* to) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = Bfloat16::narrowed(from[i]);
}
inline void widen(std::span<const std::uint16_t> from, float* to) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = Bfloat16::widened(from[i]);
}

// Branch-free, so that the compiler makes vector loops of it; subnormals go through the multiplication.
struct Float16 {
  using Kept = std::uint16_t;
  using Sum = float;
  static float widened(Kept bits) {
    const std::uint32_t magnitude = std::uint32_t{bits & 0x7FFFu} << 13;
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const std::uint32_t special = magnitude | 0x7F800000;  // infinity and NaN keep the fraction
    const std::uint32_t value = magnitude >= 0x0F800000 ? special : scaled;
    return std::bit_cast<float>(value | std::uint32_t{bits & 0x8000u} << 16);
  }
  static Kept narrowed(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    // Adding 0.5 lines a small number's bits up with those of a half-precision subnormal, rounding on the way.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
    const std::uint32_t normal = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    const std::uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    const std::uint32_t half = magnitude >= 0x477FF000 ? special : magnitude < 0x38800000 ? small : normal;
    return static_cast<Kept>(half | (bits >> 16 & 0x8000));
  }
};

}  // namespace phalanx
