// The distinct ids among many: one pass over all arrays of a step, in the order of first occurrence.
//
// Thread-safety: functions of their arguments alone.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phalanx {

struct Distinct {
  std::vector<std::int64_t> keys;
  std::vector<std::uint32_t> counts;
};

// Fills `places` with the place among the distinct ids of each id of the arrays laid end to end.
// REQUIRES: places.size() is the sum of the arrays' sizes. Throws std::length_error for 2^31 ids or more.
Distinct unique(std::span<const std::span<const std::int64_t>> arrays, std::span<std::int64_t> places);

// Adds weight * rows (n, dim) to rows of `sums`: row i to row places[i]. One part after the other, in order.
void add_weighted(std::span<const std::int64_t> places, const float* rows, std::size_t dim, float weight, float* sums);

// Sorts positions by the server that owns their id, keeping their order within one server. `offsets` gets the start
// of each server's part and the end of the last one: servers + 1 numbers. REQUIRES: 1 <= servers <= 1024.
void split_by_owner(std::span<const std::int64_t> keys, std::uint64_t salt, int servers,
                    std::span<std::int64_t> order, std::span<std::int64_t> offsets);

}  // namespace phalanx
