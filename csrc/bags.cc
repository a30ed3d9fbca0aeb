#include "bags.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace phalanx {
namespace {

constexpr std::size_t kAhead = 8;
constexpr std::size_t kMostInBlocks = 256;  // values of a row above which rows are taken one after the other

using Four [[gnu::vector_size(4 * sizeof(float))]] = float;

Four load(const float* values) {
  Four four;
  std::memcpy(&four, values, sizeof four);
  return four;
}

void store(const Four& four, float* values) { std::memcpy(values, &four, sizeof four); }

// The ids of one bag.
struct Bag {
  std::size_t first;
  std::size_t last;
};

Bag bag_of(const Bags& bags, std::size_t number) {
  return {static_cast<std::size_t>(bags.starts[number]), static_cast<std::size_t>(bags.starts[number + 1])};
}

// The number of ids of a mean.
float count_of(const Bags& bags, const Bag& bag) {
  const auto ids = bags.places.subspan(bag.first, bag.last - bag.first);
  return static_cast<float>(std::max<std::ptrdiff_t>(
      static_cast<std::ptrdiff_t>(ids.size()) - std::count(ids.begin(), ids.end(), bags.padding), 1));
}

// Calls use(id, row) with each id of a bag and where its row begins in `rows`; has the rows to come fetched.
template <class Value, class Use>
[[gnu::always_inline]] inline void for_each_row(const Bags& bags, const Bag& bag, Value* rows, std::size_t dim,
                                                const Use& use) {
  const std::int64_t* const places = bags.places.data();
  const std::size_t size = bags.places.size();
  const std::int64_t padding = bags.padding;
  const auto row_at = [=](std::size_t i) { return rows + static_cast<std::size_t>(places[i]) * dim; };
  for (std::size_t i = bag.first; i < bag.last; ++i) {
    if (i + kAhead < size) __builtin_prefetch(row_at(i + kAhead), std::is_const_v<Value> ? 0 : 1);
    if (places[i] != padding) use(i, row_at(i));
  }
}

// Four times so many values of the rows, which stay in registers over a bag.
template <std::size_t kFours>
void pool_block(const Bags& bags, const Bag& bag, const float* rows, std::size_t dim, float* pooled) {
  Four sums[kFours]{};
  for_each_row(bags, bag, rows, dim, [&](std::size_t, const float* row) {
    for (std::size_t k = 0; k < kFours; ++k) sums[k] += load(row + 4 * k);
  });
  for (std::size_t k = 0; k < kFours; ++k) store(sums[k], pooled + 4 * k);
}

void pool_rest(const Bags& bags, const Bag& bag, const float* rows, std::size_t count, std::size_t dim, float* pooled) {
  std::fill_n(pooled, count, 0.0F);
  for_each_row(bags, bag, rows, dim, [&](std::size_t, const float* row) {
    for (std::size_t j = 0; j < count; ++j) pooled[j] += row[j];
  });
}

template <std::size_t kFours>
void add_block(const Bags& bags, const Bag& bag, float factor, const float* gradient, std::size_t dim, float* sums) {
  Four values[kFours];
  for (std::size_t k = 0; k < kFours; ++k) values[k] = load(gradient + 4 * k);
  const float* const weights = bags.weights;
  for_each_row(bags, bag, sums, dim, [&](std::size_t i, float* sum) {
    const float weight = weights == nullptr ? factor : factor * weights[i];
    for (std::size_t k = 0; k < kFours; ++k) store(load(sum + 4 * k) + weight * values[k], sum + 4 * k);
  });
}

void add_rest(const Bags& bags, const Bag& bag, float factor, const float* gradient, std::size_t count, std::size_t dim,
              float* sums) {
  const float* const weights = bags.weights;
  for_each_row(bags, bag, sums, dim, [&](std::size_t i, float* sum) {
    const float weight = weights == nullptr ? factor : factor * weights[i];
    for (std::size_t j = 0; j < count; ++j) sum[j] += weight * gradient[j];
  });
}

}  // namespace

void pool_bags(const Bags& bags, const float* rows, std::size_t dim, float* pooled) {
  for (std::size_t number = 0; number + 1 < bags.starts.size(); ++number, pooled += dim) {
    const Bag bag = bag_of(bags, number);
    std::size_t j = 0;
    for (; j + 16 <= dim; j += 16) pool_block<4>(bags, bag, rows + j, dim, pooled + j);
    if (j + 8 <= dim) pool_block<2>(bags, bag, rows + j, dim, pooled + j), j += 8;
    if (j + 4 <= dim) pool_block<1>(bags, bag, rows + j, dim, pooled + j), j += 4;
    if (j < dim) pool_rest(bags, bag, rows + j, dim - j, dim, pooled + j);
    if (!bags.is_mean) continue;
    const float count = count_of(bags, bag);
    for (j = 0; j < dim; ++j) pooled[j] /= count;
  }
}

void add_bag_gradients(const Bags& bags, const float* gradients, std::ptrdiff_t stride, std::size_t dim, float* sums) {
  for (std::size_t number = 0; number + 1 < bags.starts.size(); ++number, gradients += stride) {
    const Bag bag = bag_of(bags, number);
    const float factor = bags.is_mean ? 1.0F / count_of(bags, bag) : 1.0F;
    const std::size_t in_blocks = dim <= kMostInBlocks ? dim : 0;
    std::size_t j = 0;
    for (; j + 16 <= in_blocks; j += 16) add_block<4>(bags, bag, factor, gradients + j, dim, sums + j);
    if (j + 8 <= in_blocks) add_block<2>(bags, bag, factor, gradients + j, dim, sums + j), j += 8;
    if (j + 4 <= in_blocks) add_block<1>(bags, bag, factor, gradients + j, dim, sums + j), j += 4;
    if (j < dim) add_rest(bags, bag, factor, gradients + j, dim - j, dim, sums + j);
  }
}

}  // namespace phalanx
