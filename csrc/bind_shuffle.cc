// Python's view of the permutation. No logic here: arguments in, arrays out, the GIL released in between.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "bind.h"
#include "bind_array.h"
#include "shuffle.h"

namespace nb = nanobind;

namespace {

nb::object shuffled(std::uint64_t n, std::uint64_t seed, std::uint64_t start, std::size_t count, std::uint64_t step) {
  auto elements = std::make_unique<std::int64_t[]>(count);
  {
    nb::gil_scoped_release release;
    phalanx::Permutation(n, seed).fill({elements.get(), count}, start, step);
  }
  return array_of(std::move(elements), count);
}

}  // namespace

void bind_shuffle(nb::module_& module) {
  module.def("shuffled", &shuffled, nb::arg("n"), nb::arg("seed"), nb::arg("start"), nb::arg("count"),
             nb::arg("step") = 1,
             nb::sig("def shuffled(n: int, seed: int, start: int, count: int, step: int = 1) -> "
                     "numpy.typing.NDArray[numpy.int64]"),
             "Elements at start, start + step, ... of the permutation of [0, n) that `seed` picks.");
}
