// Python's view of the slot parser. No logic here: text in, arrays out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "slots.h"

namespace nb = nanobind;

namespace {

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
  return nb::make_tuple(found.rows, array_of(std::move(found.label)), array_of(std::move(found.dense)),
                        array_of(std::move(found.ids)), array_of(std::move(found.offsets)), found.broken, first);
}

nb::object hash_texts(std::string_view slot, const std::vector<std::string>& texts, std::uint64_t hash_space) {
  std::vector<std::int64_t> ids;
  ids.reserve(texts.size());
  const std::uint64_t seed = phalanx::slot_seed(slot);
  for (const auto& text : texts) ids.push_back(phalanx::id_of_text(seed, text, hash_space));
  return array_of(std::move(ids));
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
