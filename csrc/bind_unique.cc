// Python's view of distinct ids. No logic here: arrays in, arrays out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "unique.h"

namespace nb = nanobind;

namespace {

using Ids = Column<std::int64_t>;
using OutIds = OutColumn<std::int64_t>;

nb::tuple unique(const std::vector<Ids>& arrays, OutIds places) {
  std::vector<std::span<const std::int64_t>> views;
  for (const Ids& ids : arrays) views.push_back(view(ids));
  phalanx::Distinct found;
  {
    nb::gil_scoped_release release;
    found = phalanx::unique(views, view(places));
  }
  return nb::make_tuple(array_of(std::move(found.keys)), array_of(std::move(found.counts)));
}

void add_weighted(Ids places, Rows rows, float weight, OutRows sums) {
  nb::gil_scoped_release release;
  phalanx::add_weighted(view(places), rows.data(), rows.shape(1), weight, sums.data());
}

}  // namespace

void bind_unique(nb::module_& module) {
  module.def("unique", &unique, nb::arg("arrays"), nb::arg("places").noconvert(),
             "The distinct ids and their counts; fills `places` with the place of each id.");
  module.def("add_weighted", &add_weighted, nb::arg("places").noconvert(), nb::arg("rows").noconvert(),
             nb::arg("weight"), nb::arg("sums").noconvert(), "Adds weight * rows to the rows of sums at places.");
}
