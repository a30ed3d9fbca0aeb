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

// The bytes of a str or bytes object, which live as long as it does.
std::string_view view_of(nb::handle text) {
  if (PyBytes_Check(text.ptr())) {
    char* bytes = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(text.ptr(), &bytes, &size) != 0) throw nb::python_error();
    return {bytes, static_cast<std::size_t>(size)};
  }
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (bytes == nullptr) throw nb::python_error();
  return {bytes, static_cast<std::size_t>(size)};
}

nb::object hash_texts(std::string_view salt, const nb::list& texts, std::uint64_t hash_space) {
  std::vector<std::int64_t> ids;
  ids.reserve(texts.size());
  const std::uint64_t seed = phalanx::seed_of_salt(salt);
  for (const nb::handle text : texts) ids.push_back(phalanx::id_of_text(seed, view_of(text), hash_space));
  return array_of(std::move(ids));
}

}  // namespace

void bind_slots(nb::module_& module) {
  nb::class_<phalanx::SlotParser>(module, "SlotParser", "Parses lines of click logs into arrays.")
      .def(
          "__init__",
          [](phalanx::SlotParser* self, bool has_label, std::vector<std::string> dense,
             std::vector<std::string> sparse, std::vector<std::string> salts, std::uint64_t hash_space,
             bool is_columns) {
            if (salts.size() != sparse.size()) throw nb::value_error("salts must be as many as sparse");
            new (self) phalanx::SlotParser(
                {has_label, std::move(dense), std::move(sparse), std::move(salts), hash_space}, is_columns);
          },
          nb::arg("has_label"), nb::arg("dense"), nb::arg("sparse"), nb::arg("salts"), nb::arg("hash_space"),
          nb::arg("is_columns"))
      .def("parse", &parse, nb::arg("text"),
           nb::sig("def parse(self, text: bytes) -> tuple[int, numpy.typing.NDArray[numpy.float32], "
                   "numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.int64], "
                   "numpy.typing.NDArray[numpy.int64], int, tuple[int, int, int, bytes] | None]"),
           "Rows, label, dense, ids and offsets of whole lines; how many were broken and what the first is.");
  module.def("hash_texts", &hash_texts, nb::arg("salt"), nb::arg("texts"), nb::arg("hash_space") = 0,
             nb::sig("def hash_texts(salt: str, texts: list[str | bytes], hash_space: int = 0) -> "
                     "numpy.typing.NDArray[numpy.int64]"),
             "Ids of texts hashed with a salt.");
}
