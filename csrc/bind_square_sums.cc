// Python's view of sums of squares. No logic here: addresses in, numbers out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "square_sums.h"

namespace nb = nanobind;

namespace {

using Doubles = Column<double>;
using OutDoubles = OutColumn<double>;

std::vector<phalanx::Numbers> numbers_of(const std::vector<std::uintptr_t>& data,
                                         const std::vector<std::size_t>& counts,
                                         const std::vector<std::uint32_t>& types, std::size_t others) {
  if (counts.size() != data.size() || types.size() != data.size() || others != data.size()) {
    throw std::invalid_argument("square sums need one address, count and type of each array, and room for its sum");
  }
  std::vector<phalanx::Numbers> arrays;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const auto type = static_cast<phalanx::Type>(types[i]);
    if (type > phalanx::Type::kFloat16) throw std::invalid_argument("square sums are of numbers with a fraction");
    arrays.push_back({type, reinterpret_cast<const void*>(data[i]), counts[i]});
  }
  return arrays;
}

void largest_magnitudes(const std::vector<std::uintptr_t>& data, const std::vector<std::size_t>& counts,
                        const std::vector<std::uint32_t>& types, int threads, OutDoubles largest) {
  const auto arrays = numbers_of(data, counts, types, largest.size());
  nb::gil_scoped_release release;
  phalanx::largest_magnitudes(arrays, threads, view(largest));
}

void square_sums(const std::vector<std::uintptr_t>& data, const std::vector<std::size_t>& counts,
                 const std::vector<std::uint32_t>& types, int threads, Doubles first_shifts, Doubles second_shifts,
                 OutDoubles first, OutDoubles second) {
  const auto arrays = numbers_of(data, counts, types, first.size());
  if (first_shifts.size() != first.size() || second_shifts.size() != first.size() || second.size() != first.size()) {
    throw std::invalid_argument("square sums need two shifts for each array, and room for two sums");
  }
  std::vector<phalanx::Shifts> shifts;
  for (std::size_t i = 0; i < first.size(); ++i) shifts.push_back({first_shifts.data()[i], second_shifts.data()[i]});
  nb::gil_scoped_release release;
  phalanx::square_sums(arrays, shifts, threads, view(first), view(second));
}

}  // namespace

void bind_square_sums(nb::module_& module) {
  module.def("largest_magnitudes", &largest_magnitudes, nb::arg("data"), nb::arg("counts"), nb::arg("types"),
             nb::arg("threads"), nb::arg("largest").noconvert(), "Fills `largest` with that of each array.");
  module.def("square_sums", &square_sums, nb::arg("data"), nb::arg("counts"), nb::arg("types"), nb::arg("threads"),
             nb::arg("first_shifts").noconvert(), nb::arg("second_shifts").noconvert(), nb::arg("first").noconvert(),
             nb::arg("second").noconvert(), "Fills `first` and `second` with the sums of squares of each array.");
}
