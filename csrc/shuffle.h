// A pseudo-random permutation of [0, n) whose elements are computed one by one.
//
// No table is made: element i costs the same whatever n, i or the order of the calls, so a rank finds its part of
// an epoch, or a resumed run its position, without replaying what came before.
//
// Method: a Feistel network over the smallest power of two not below n (M. Luby, C. Rackoff, "How to construct
// pseudorandom permutations from pseudorandom functions", 1988), its two halves of unequal width when the number
// of bits is odd. A value at or above n is sent through the network again until it falls below n: cycle walking
// (J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", 2002); fewer than two passes on average.
// The round function is mix64 (mix.h).
//
// Thread-safety: values are immutable; every method may be called from any thread.

#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace phalanx {

class Permutation {
 public:
  static constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 62;
  static constexpr int kRounds = 8;

  // REQUIRES: 1 <= n <= kMaxSize; throws std::invalid_argument otherwise.
  Permutation(std::uint64_t n, std::uint64_t seed);

  // The element at position `i`. REQUIRES: i < n.
  std::uint64_t at(std::uint64_t i) const noexcept;

  // Fills `out` with the elements at start, start + step, start + 2 * step, ...
  // Throws std::invalid_argument when step is 0 or a position falls outside [0, n).
  void fill(std::span<std::int64_t> out, std::uint64_t start, std::uint64_t step) const;

 private:
  std::uint64_t pass(std::uint64_t value) const noexcept;

  std::uint64_t n_;
  int low_bits_;
  std::uint64_t low_mask_;
  std::uint64_t high_mask_;
  std::array<std::uint64_t, kRounds> keys_;
};

}  // namespace phalanx
