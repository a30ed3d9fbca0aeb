#include "shuffle.h"

#include <bit>
#include <stdexcept>
#include <string>

#include "mix.h"

namespace phalanx {
namespace {

constexpr std::uint64_t mask_of(int bits) noexcept { return (std::uint64_t{1} << bits) - 1; }

}  // namespace

Permutation::Permutation(std::uint64_t n, std::uint64_t seed) : n_(n) {
  if (n < 1 || n > kMaxSize) {
    throw std::invalid_argument("a permutation holds 1 to 2**62 elements, asked for " + std::to_string(n));
  }
  const int bits = std::bit_width(n - 1);
  low_bits_ = (bits + 1) / 2;
  low_mask_ = mask_of(low_bits_);
  high_mask_ = mask_of(bits - low_bits_);
  for (int round = 0; round < kRounds; ++round) {
    seed += kStep;
    keys_[round] = mix64(seed);
  }
}

std::uint64_t Permutation::pass(std::uint64_t value) const noexcept {
  std::uint64_t high = value >> low_bits_;
  std::uint64_t low = value & low_mask_;
  for (int round = 0; round < kRounds; round += 2) {
    high ^= mix64(low ^ keys_[round]) & high_mask_;
    low ^= mix64(high ^ keys_[round + 1]) & low_mask_;
  }
  return high << low_bits_ | low;
}

std::uint64_t Permutation::at(std::uint64_t i) const noexcept {
  std::uint64_t value = pass(i);
  while (value >= n_) value = pass(value);
  return value;
}

void Permutation::fill(std::span<std::int64_t> out, std::uint64_t start, std::uint64_t step) const {
  if (out.empty()) return;
  if (step == 0 || start >= n_ || (n_ - 1 - start) / step < out.size() - 1) {
    throw std::invalid_argument(std::to_string(out.size()) + " positions from " + std::to_string(start) +
                                " in steps of " + std::to_string(step) + " do not lie in [0, " +
                                std::to_string(n_) + ")");
  }
  for (std::int64_t& element : out) {
    element = static_cast<std::int64_t>(at(start));
    start += step;
  }
}

}  // namespace phalanx
