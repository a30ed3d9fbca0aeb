// Python's view of gradients of bags. No logic here: arrays in, sums out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

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
