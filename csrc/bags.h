// Pooled rows of bags, and what the rows of bags get of the gradients of the bags.
//
// Thread-safety: functions of their arguments alone.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace phalanx {

struct Bags {
  std::span<const std::int64_t> places;  // of each id, the place of its row
  std::span<const std::int64_t> starts;  // of each bag among the ids, and the end of the last one
  const float* weights;                  // of each id; null for 1
  std::int64_t padding;                  // the place that counts in no bag; -1 for none
  bool is_mean;
};

// Writes the sums of the rows (n, dim) of each bag, over the number of its ids for a mean, to `pooled` (bags, dim). Rows are
// added in the order of the ids. REQUIRES: no weights; starts as below.
void pool_bags(const Bags& bags, const float* rows, std::size_t dim, float* pooled);

// Adds to each row of `sums` the gradients (bags, dim) of the bags it is in, one after the other: times the id's weight, and
// over the number of ids of a mean. The gradients of two bags lie `stride` numbers apart.
// REQUIRES: starts that do not decrease, from 0 to at most places.size().
void add_bag_gradients(const Bags& bags, const float* gradients, std::ptrdiff_t stride, std::size_t dim, float* sums);

}  // namespace phalanx
