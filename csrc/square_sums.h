// Sums of squares that have the same bits however the numbers are split: over threads here, over ranks by whoever adds up
// what several of them have. The twin of `phalanx.parallel.step.square_sums`, bit by bit.
//
// Thread-safety: functions of their arguments alone.

#pragma once

#include <cstddef>
#include <span>

#include "shm_reduce.h"

namespace phalanx {

struct Numbers {
  Type type;  // with a fraction
  const void* data;
  std::size_t count;
};

// Fills `largest` with the largest magnitude of each array: 0 of none, not a number where one of them is not.
// REQUIRES: largest.size() == arrays.size(); threads >= 1.
void largest_magnitudes(std::span<const Numbers> arrays, int threads, std::span<double> largest);

// What squares are rounded with: adding and subtracting 1.5 * 2**k leaves multiples of 2**(k - 52).
struct Shifts {
  double first;
  double second;  // of what the first left
};

// Fills `first` with the sum of the squares of each array, rounded with its first shift, and `second` with that of what
// this left, rounded with the second. Exact, so in any order: REQUIRES: shifts of which no sum of all squares, on
// whichever rank, needs more than 51 bits. All spans are of arrays.size(); threads >= 1.
void square_sums(std::span<const Numbers> arrays, std::span<const Shifts> shifts, int threads, std::span<double> first,
                 std::span<double> second);

}  // namespace phalanx
