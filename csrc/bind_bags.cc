// Python's view of gradients of bags. No logic here: arrays in, sums out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "bags.h"
#include "bind.h"
#include "bind_array.h"

namespace nb = nanobind;

namespace {

void add_bag_gradients(Column<std::int64_t> places, Column<std::int64_t> starts, std::optional<Column<float>> weights,
                       std::int64_t padding, bool is_mean, Rows gradients, OutRows sums) {
  const phalanx::Bags bags{view(places), view(starts), weights ? weights->data() : nullptr, padding, is_mean};
  if (bags.starts.empty() || gradients.shape(0) + 1 != bags.starts.size() || gradients.shape(1) != sums.shape(1) ||
      (weights && weights->size() != bags.places.size())) {
    throw nb::value_error("a gradient for each bag, and a weight for each id");
  }
  if (bags.starts.front() < 0 || bags.starts.back() > static_cast<std::int64_t>(bags.places.size()) ||
      !std::is_sorted(bags.starts.begin(), bags.starts.end())) {
    throw nb::value_error("starts of bags must not decrease, and must lie among the ids");
  }
  nb::gil_scoped_release release;
  phalanx::add_bag_gradients(bags, gradients.data(), gradients.shape(1), sums.data());
}

}  // namespace

void bind_bags(nb::module_& module) {
  module.def("add_bag_gradients", &add_bag_gradients, nb::arg("places").noconvert(), nb::arg("starts").noconvert(),
             nb::arg("weights").none().noconvert(), nb::arg("padding"), nb::arg("is_mean"),
             nb::arg("gradients").noconvert(), nb::arg("sums").noconvert(),
             "Adds to the rows of sums what they get of the gradients of the bags they are in.");
}
