// Python's view of bags. No logic here: arrays in, sums out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "bags.h"
#include "bind.h"
#include "bind_array.h"

namespace nb = nanobind;

namespace {

using StridedRows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using BagsArgument =
    std::tuple<Column<std::int64_t>, Column<std::int64_t>, std::int64_t, bool, std::optional<Column<float>>>;

// The bags of a table, of which there are as many as `of_bags` has rows; those have the dim of `of_rows`.
template <class OfBags, class OfRows>
phalanx::Bags bags_of(const BagsArgument& argument, const OfBags& of_bags, const OfRows& of_rows) {
  const auto& [places, starts, padding, is_mean, weights] = argument;
  const phalanx::Bags bags{view(places), view(starts), weights ? weights->data() : nullptr, padding, is_mean};
  if (of_bags.shape(0) + 1 != bags.starts.size() || of_bags.shape(1) != of_rows.shape(1) ||
      (weights && weights->size() != bags.places.size())) {
    throw nb::value_error("a row of one dim for each bag, and a weight for each id");
  }
  if (bags.starts.front() < 0 || bags.starts.back() > static_cast<std::int64_t>(bags.places.size()) ||
      !std::is_sorted(bags.starts.begin(), bags.starts.end())) {
    throw nb::value_error("starts of bags must not decrease, and must lie among the ids");
  }
  return bags;
}

void pool_bags(const std::vector<BagsArgument>& all, const std::vector<Rows>& rows,
               const std::vector<OutRows>& pooled) {
  if (rows.size() != all.size() || pooled.size() != all.size()) throw nb::value_error("rows and results of each table");
  std::vector<phalanx::Bags> bags;
  for (std::size_t i = 0; i < all.size(); ++i) {
    bags.push_back(bags_of(all[i], pooled[i], rows[i]));
    if (bags[i].weights != nullptr) throw nb::value_error("bags are pooled without weights");
  }
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < all.size(); ++i) {
    phalanx::pool_bags(bags[i], rows[i].data(), rows[i].shape(1), pooled[i].data());
  }
}

void add_bag_gradients(const std::vector<BagsArgument>& all, const std::vector<StridedRows>& gradients,
                       const std::vector<OutRows>& sums) {
  if (gradients.size() != all.size() || sums.size() != all.size()) {
    throw nb::value_error("gradients and sums of each table");
  }
  std::vector<phalanx::Bags> bags;
  for (std::size_t i = 0; i < all.size(); ++i) {
    bags.push_back(bags_of(all[i], gradients[i], sums[i]));
    if (gradients[i].size() > 0 && gradients[i].shape(1) > 1 && gradients[i].stride(1) != 1) {
      throw nb::value_error("the values of a gradient must lie side by side");
    }
  }
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < all.size(); ++i) {
    phalanx::add_bag_gradients(bags[i], gradients[i].data(), gradients[i].stride(0), sums[i].shape(1), sums[i].data());
  }
}

}  // namespace

void bind_bags(nb::module_& module) {
  module.def("pool_bags", &pool_bags, nb::arg("bags").noconvert(), nb::arg("rows").noconvert(),
             nb::arg("pooled").noconvert(), "Writes the pooled rows of the bags of several tables.");
  module.def("add_bag_gradients", &add_bag_gradients, nb::arg("bags").noconvert(), nb::arg("gradients").noconvert(),
             nb::arg("sums").noconvert(),
             "Adds to the rows of sums, for several tables, what they get of the gradients of the bags they are in.");
}
