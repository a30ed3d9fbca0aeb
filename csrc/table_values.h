// What values start from, and how they are kept: float32, or bfloat16. Twin of ps/table/initializers.py.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "table_hash.h"
#include "table_spec.h"

namespace phalanx {

// What a row starts from: a stream of words that belongs to (seed, table, id), two values a word.
class Starter {
 public:
  Starter(const InitSpec& init, std::uint64_t seed) : init_(init), start_(mix64(seed + kStep)) {}

  // The number whose stream belongs to the id of this hash.
  std::uint64_t number_of(std::uint64_t hash) const { return mix64(hash ^ start_); }
  void fill(std::uint64_t hash, float* values, std::size_t dim) const;

 private:
  InitSpec init_;
  std::uint64_t start_;
};

inline float widened(std::uint16_t half) { return std::bit_cast<float>(std::uint32_t{half} << 16); }

// Adds `carry`, below 2^16, to the bits and cuts: an infinity stays one, a NaN keeps a bit that says so.
inline std::uint16_t cut(float value, std::uint32_t carry) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7F800000) != 0x7F800000) return static_cast<std::uint16_t>((bits + carry) >> 16);
  return static_cast<std::uint16_t>((value != value ? bits | 0x00400000 : bits) >> 16);
}

inline std::uint16_t nearest(float value) {
  return cut(value, 0x7FFF + (std::bit_cast<std::uint32_t>(value) >> 16 & 1));
}

// Copies floats, a cache line at a time as long as it can: much faster than memcpy of a size known only then.
inline void copy_floats(const float* from, float* to, std::size_t n) {
  for (; n >= 16; n -= 16, from += 16, to += 16) std::memcpy(to, from, 16 * sizeof(float));
  if (n > 0) std::memcpy(to, from, n * sizeof(float));
}

// Reads and writes the values at the start of a row in memory.
inline void load_values(const std::byte* row, bool is_bfloat16, float* values, std::size_t dim) {
  if (!is_bfloat16) return copy_floats(reinterpret_cast<const float*>(row), values, dim);
  const auto* from = reinterpret_cast<const std::uint16_t*>(row);
  for (std::size_t j = 0; j < dim; ++j) values[j] = widened(from[j]);
}
void store_nearest(std::byte* row, bool is_bfloat16, const float* values, std::size_t dim);
// Rounds up or down by a draw that depends on the row, the tick and the column alone.
void store_stochastic(std::byte* row, std::uint64_t number, std::uint64_t tick, const float* values, std::size_t dim);

}  // namespace phalanx
