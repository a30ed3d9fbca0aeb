// Python's view of a client's partitioned requests. No logic here: arrays in, bytes out, the GIL released for copies.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "client_link.h"
#include "partition.h"

namespace nb = nanobind;
using phalanx::KeyPartition;
using phalanx::PartitionedRequest;
using phalanx::SentPart;
using phalanx::SentRequest;

namespace {

using Bytes = OutColumn<std::uint8_t>;

template <class T>
const T* data_or_null(const std::optional<Column<T>>& column, std::size_t size) {
  if (column && column->size() != size) throw nb::value_error("a column has not one value for each key");
  return column ? column->data() : nullptr;
}

std::byte* bytes_at(const Bytes& memory, std::uint64_t size) {
  if (memory.size() != size) throw nb::value_error("the memory has another length than the payload");
  return reinterpret_cast<std::byte*>(memory.data());
}

void add_push(PartitionedRequest& request, const KeyPartition& partition, std::optional<Column<std::uint64_t>> pulls,
              Rows values, int kind, std::optional<double> lr, std::optional<Column<std::uint32_t>> counts,
              std::optional<Column<float>> shows, std::optional<Column<float>> clicks, bool is_narrow) {
  const std::size_t keys = partition.keys().size();
  if (values.shape(0) != keys) throw nb::value_error("values have not one row for each key");
  if (pulls && pulls->size() != partition.servers()) throw nb::value_error("pulls have not one number for each server");
  PartitionedRequest::Push push{&partition};
  push.pulls = pulls ? pulls->data() : nullptr;
  push.kind = static_cast<phalanx::UpdateKind>(kind);
  push.has_lr = lr.has_value();
  push.lr = lr.value_or(0);
  push.dim = values.shape(1);
  push.values = values.data();
  push.is_narrow = is_narrow;
  push.counts = data_or_null(counts, keys);
  push.shows = data_or_null(shows, keys);
  push.clicks = data_or_null(clicks, keys);
  request.add_push(push);
}

nb::list rows(const PartitionedRequest& request, Bytes payload) {
  std::byte* base = bytes_at(payload, request.rows_bytes(0));
  const nb::object owner = nb::cast(payload);
  const std::vector<std::uint64_t> places = request.row_places(0);
  nb::list out;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (request.is_narrow(i)) throw nb::value_error("rows of bfloat16 are no float32");
    static float nothing;
    const std::size_t count = request.partition_of(i).count(0);
    float* data = count == 0 ? &nothing : reinterpret_cast<float*>(base + places[i]);
    out.append(nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {count, request.dim_of(i)}, owner));
  }
  return out;
}

// Checks that there is a (keys, dim) array for each pull.
std::vector<float*> places_of(const PartitionedRequest& request, const std::vector<OutRows>& into) {
  if (into.size() != request.pulls()) throw nb::value_error("there is not one array for each pull");
  std::vector<float*> places;
  for (std::size_t i = 0; i < into.size(); ++i) {
    if (into[i].shape(0) != request.partition_of(i).keys().size() || into[i].shape(1) != request.dim_of(i)) {
      throw nb::value_error("rows are not (keys, dim)");
    }
    places.push_back(into[i].data());
  }
  return places;
}

void merge(const PartitionedRequest& request, const std::vector<std::pair<int, Bytes>>& payloads,
           const std::vector<OutRows>& into) {
  const std::vector<float*> places = places_of(request, into);
  std::vector<std::pair<int, const std::byte*>> parts;
  for (const auto& [server, payload] : payloads) {
    parts.emplace_back(server, bytes_at(payload, request.rows_bytes(server)));
  }
  const nb::gil_scoped_release release;
  for (const auto& [server, rows] : parts) request.merge(server, rows, places);
}

void merge_replies(const PartitionedRequest& request, const SentRequest& sent, const std::vector<OutRows>& into) {
  const std::vector<float*> places = places_of(request, into);
  for (const SentPart& part : sent.parts) {
    if (part.rows.size() != request.rows_bytes(part.server)) throw nb::value_error("rows of another request");
  }
  const nb::gil_scoped_release release;
  for (const SentPart& part : sent.parts) request.merge(part.server, part.rows.data(), places);
}

}  // namespace

void bind_partition(nb::module_& module) {
  nb::class_<KeyPartition>(module, "KeyPartition", "Which of a table's ids go to which server.")
      .def("__init__", [](KeyPartition* at, Column<std::int64_t> keys, std::uint64_t salt, int servers) {
             const nb::gil_scoped_release release;
             new (at) KeyPartition(view(keys), salt, servers);
           }, nb::arg("keys").noconvert(), nb::arg("salt"), nb::arg("servers"), nb::keep_alive<1, 2>())
      .def_prop_ro("size", [](const KeyPartition& partition) { return partition.keys().size(); });

  nb::class_<PartitionedRequest>(module, "PartitionedRequest", "A pull or push, cut by server; see csrc/partition.h.")
      .def(nb::init<>())
      .def("add_push", &add_push, nb::arg("partition"), nb::arg("pulls").noconvert().none(),
           nb::arg("values").noconvert(), nb::arg("kind"), nb::arg("lr").none(), nb::arg("counts").noconvert().none(),
           nb::arg("shows").noconvert().none(), nb::arg("clicks").noconvert().none(), nb::arg("is_narrow"),
           nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
           nb::keep_alive<1, 9>())
      .def("add_pull", &PartitionedRequest::add_pull, nb::arg("partition"), nb::arg("dim"), nb::arg("is_narrow"),
           nb::keep_alive<1, 2>())
      .def("counts", &PartitionedRequest::counts, nb::arg("server"))
      .def("read_servers", &PartitionedRequest::read_servers)
      .def("heads", [](const PartitionedRequest& request, int server, bool with_keys) {
             const std::string heads = request.heads(server, with_keys);
             return nb::bytes(heads.data(), heads.size());
           }, nb::arg("server"), nb::arg("with_keys"))
      .def("payload_bytes", &PartitionedRequest::payload_bytes, nb::arg("server"), nb::arg("with_keys"))
      .def("write", [](const PartitionedRequest& request, int server, bool with_keys, Bytes memory) {
             std::byte* payload = bytes_at(memory, request.payload_bytes(server, with_keys));
             const nb::gil_scoped_release release;
             request.write(server, with_keys, payload);
           }, nb::arg("server"), nb::arg("with_keys"), nb::arg("memory").noconvert())
      .def("rows_bytes", &PartitionedRequest::rows_bytes, nb::arg("server"))
      .def("rows", &rows, nb::arg("payload").noconvert())
      .def("merge_parts", &merge, nb::arg("payloads"), nb::arg("into"))
      .def("merge_replies", &merge_replies, nb::arg("sent"), nb::arg("into"));
}
