#include "bags.h"

#include <algorithm>

namespace phalanx {
namespace {

constexpr std::size_t kAhead = 8;

float factor_of(const Bags& bags, std::size_t first, std::size_t last) {
  if (!bags.is_mean) return 1.0F;
  const auto ids = bags.places.subspan(first, last - first);
  const auto count = static_cast<std::ptrdiff_t>(ids.size()) - std::count(ids.begin(), ids.end(), bags.padding);
  return 1.0F / static_cast<float>(std::max<std::ptrdiff_t>(count, 1));
}

}  // namespace

void add_bag_gradients(const Bags& bags, const float* gradients, std::size_t dim, float* sums) {
  for (std::size_t bag = 0; bag + 1 < bags.starts.size(); ++bag, gradients += dim) {
    const auto first = static_cast<std::size_t>(bags.starts[bag]);
    const auto last = static_cast<std::size_t>(bags.starts[bag + 1]);
    const float factor = factor_of(bags, first, last);
    for (std::size_t i = first; i < last; ++i) {
      if (i + kAhead < bags.places.size()) {
        __builtin_prefetch(sums + static_cast<std::size_t>(bags.places[i + kAhead]) * dim, 1);
      }
      if (bags.places[i] == bags.padding) continue;
      const float weight = bags.weights == nullptr ? factor : factor * bags.weights[i];
      float* const sum = sums + static_cast<std::size_t>(bags.places[i]) * dim;
      for (std::size_t j = 0; j < dim; ++j) sum[j] += weight * gradients[j];
    }
  }
}

}  // namespace phalanx
