// Python's view of the slot parser. No logic here: text in, arrays out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "slots.h"

namespace nb = nanobind;

namespace {

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> as_array(std::vector<T>&& values) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  T* data = kept->data();
  const std::size_t size = kept->size();
  nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner);
}

nb::tuple parse(const phalanx::SlotParser& parser, nb::bytes text) {
  phalanx::SlotRows found;
  const std::string_view view(text.c_str(), text.size());
  {
    nb::gil_scoped_release release;
    found = parser.parse(view);
  }
  nb::object first = nb::none();
  if (found.first_broken) {
    const auto& line = *found.first_broken;
    first = nb::make_tuple(static_cast<int>(line.kind), line.line, line.field,
                           nb::bytes(line.found.data(), line.found.size()));
  }
  return nb::make_tuple(found.rows, as_array(std::move(found.label)), as_array(std::move(found.dense)),
                        as_array(std::move(found.ids)), as_array(std::move(found.offsets)), found.broken, first);
}

nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>> hash_texts(std::string_view slot,
                                                             const std::vector<std::string>& texts,
                                                             std::uint64_t hash_space) {
  std::vector<std::int64_t> ids;
  ids.reserve(texts.size());
  const std::uint64_t seed = phalanx::slot_seed(slot);
  for (const auto& text : texts) {
    const std::uint64_t hash = phalanx::hash_text(seed, text);
    ids.push_back(static_cast<std::int64_t>(hash_space ? hash % hash_space : hash));
  }
  return as_array(std::move(ids));
}

}  // namespace

void bind_slots(nb::module_& module) {
  nb::class_<phalanx::SlotParser>(module, "SlotParser", "Parses lines of click logs into arrays.")
      .def(
          "__init__",
          [](phalanx::SlotParser* self, bool has_label, std::vector<std::string> dense,
             std::vector<std::string> sparse, std::uint64_t hash_space, bool is_columns) {
            new (self) phalanx::SlotParser({has_label, std::move(dense), std::move(sparse), hash_space}, is_columns);
          },
          nb::arg("has_label"), nb::arg("dense"), nb::arg("sparse"), nb::arg("hash_space"), nb::arg("is_columns"))
      .def("parse", &parse, nb::arg("text"),
           nb::sig("def parse(self, text: bytes) -> tuple[int, numpy.typing.NDArray[numpy.float32], "
                   "numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.int64], "
                   "numpy.typing.NDArray[numpy.int64], int, tuple[int, int, int, bytes] | None]"),
           "Rows, label, dense, ids and offsets of whole lines; how many were broken and what the first is.");
  module.def("hash_texts", &hash_texts, nb::arg("slot"), nb::arg("texts"), nb::arg("hash_space") = 0,
             nb::sig("def hash_texts(slot: str, texts: list[str], hash_space: int = 0) -> "
                     "numpy.typing.NDArray[numpy.int64]"),
             "Ids of texts in a slot.");
}
