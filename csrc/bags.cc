#include "bags.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace phalanx {
namespace {

constexpr std::size_t kAhead = 8;
constexpr std::size_t kBlock = 16;  // values of a row, a cache line, that stay in registers over a bag

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

void pool_block(const Bags& bags, const Bag& bag, const float* rows, std::size_t dim, float* pooled) {
  Four a{};
  Four b{};
  Four c{};
  Four d{};
  for_each_row(bags, bag, rows, dim, [&](std::size_t, const float* row) {
    a += load(row);
    b += load(row + 4);
    c += load(row + 8);
    d += load(row + 12);
  });
  store(a, pooled);
  store(b, pooled + 4);
  store(c, pooled + 8);
  store(d, pooled + 12);
}

void pool_rest(const Bags& bags, const Bag& bag, const float* rows, std::size_t count, std::size_t dim, float* pooled) {
  std::fill_n(pooled, count, 0.0F);
  for_each_row(bags, bag, rows, dim, [&](std::size_t, const float* row) {
    for (std::size_t j = 0; j < count; ++j) pooled[j] += row[j];
  });
}

void add_block(const Bags& bags, const Bag& bag, float factor, const float* gradient, std::size_t dim, float* sums) {
  const Four a = load(gradient);
  const Four b = load(gradient + 4);
  const Four c = load(gradient + 8);
  const Four d = load(gradient + 12);
  const float* const weights = bags.weights;
  for_each_row(bags, bag, sums, dim, [&](std::size_t i, float* sum) {
    const float weight = weights == nullptr ? factor : factor * weights[i];
    store(load(sum) + weight * a, sum);
    store(load(sum + 4) + weight * b, sum + 4);
    store(load(sum + 8) + weight * c, sum + 8);
    store(load(sum + 12) + weight * d, sum + 12);
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
    for (; j + kBlock <= dim; j += kBlock) pool_block(bags, bag, rows + j, dim, pooled + j);
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
    std::size_t j = 0;
    for (; j + kBlock <= dim; j += kBlock) add_block(bags, bag, factor, gradients + j, dim, sums + j);
    if (j < dim) add_rest(bags, bag, factor, gradients + j, dim - j, dim, sums + j);
  }
}

}  // namespace phalanx
