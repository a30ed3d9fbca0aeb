// Python's view of the table. No logic here: settings and arrays in, arrays out, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "table.h"

namespace nb = nanobind;
using phalanx::EmbeddingTable;

namespace {

template <class T>
const T* data_or_null(const std::optional<Column<T>>& column) {
  return column ? column->data() : nullptr;
}

template <class Kind>
Kind kind_of(nb::handle settings, const std::map<std::string, Kind>& kinds) {
  return kinds.at(settings.is_none() ? "any" : nb::str(settings.attr("kind")).c_str());
}

// Reads fields of a settings object, given as name, place, name, place...; a place keeps its value where the kind lacks
// the field.
template <class T, class... More>
void read(nb::handle settings, const char* field, T& into, More&&... more) {
  if (nb::hasattr(settings, field)) into = nb::cast<T>(settings.attr(field));
  if constexpr (sizeof...(more) > 0) read(settings, more...);
}

phalanx::InitSpec read_init(nb::handle init) {
  using enum phalanx::InitKind;
  phalanx::InitSpec spec;
  spec.kind =
      kind_of<phalanx::InitKind>(init, {{"uniform", kUniform}, {"normal", kNormal}, {"constant", kConstant}});
  read(init, "scale", spec.scale, "std", spec.scale, "value", spec.scale);
  return spec;
}

phalanx::EntrySpec read_entry(nb::handle entry) {
  using enum phalanx::EntryKind;
  phalanx::EntrySpec spec;
  spec.kind = kind_of<phalanx::EntryKind>(
      entry, {{"any", kAny}, {"count", kCount}, {"probability", kProbability}, {"show_click", kShowClick}});
  read(entry, "count", spec.count, "p", spec.probability, "show_weight", spec.show_weight, "click_weight",
       spec.click_weight, "decay", spec.decay, "drop_below", spec.drop_below);
  return spec;
}

phalanx::FileDtype read_file_dtype(nb::handle name) {
  using enum phalanx::FileDtype;
  const std::map<std::string, phalanx::FileDtype> dtypes{{"float32", kFloat32}, {"bfloat16", kBfloat16}, {"int8", kInt8}};
  return dtypes.at(nb::cast<std::string>(name));
}

phalanx::TableSpec read_spec(nb::handle spec, nb::handle layout, std::uint64_t salt, std::string folder) {
  phalanx::TableSpec read;
  read.salt = salt;
  read.seed = nb::cast<std::uint64_t>(spec.attr("seed"));
  read.dim = nb::cast<std::size_t>(spec.attr("dim"));
  read.has_statistics = nb::cast<bool>(layout.attr("has_statistics"));
  read.is_bfloat16 = nb::cast<std::size_t>(layout.attr("value_bytes")) == 2;
  if (!spec.attr("max_bytes").is_none()) read.max_bytes = nb::cast<std::uint64_t>(spec.attr("max_bytes"));
  read.folder = std::move(folder);
  read.file_dtype = read_file_dtype(spec.attr("file_dtype"));
  const nb::handle rule = spec.attr("rule");
  read.rule = {nb::cast<std::string>(rule.attr("kind")),
               nb::cast<std::map<std::string, double>>(rule.attr("numbers")())};
  read.initial_state = nb::cast<std::vector<float>>(rule.attr("initial_state")(read.dim).attr("tolist")());
  read.init = read_init(spec.attr("init"));
  read.entry = read_entry(spec.attr("entry"));
  read.entry.unseen_days = nb::cast<std::uint64_t>(spec.attr("row_days"));
  read.entry.waiting_days = nb::cast<std::uint64_t>(spec.attr("waiting_days"));
  return read;
}

void make(EmbeddingTable* at, nb::handle spec, nb::handle layout, std::uint64_t salt, std::string folder) {
  new (at) EmbeddingTable(read_spec(spec, layout, salt, std::move(folder)));
}

void raise(const char* error, const std::exception& thrown) {
  PyErr_SetString(nb::module_::import_("phalanx.errors").attr(error).ptr(), thrown.what());
}

// Types and gaps are the signatures' matter and callers have checked the rest; this is what memory depends on.
template <class Rows>
void require_shape(const EmbeddingTable& table, const Column<std::int64_t>& keys, const Rows& rows) {
  if (rows.shape(0) != keys.size() || rows.shape(1) != table.spec().dim) throw nb::value_error("rows are not (keys, dim)");
}

template <class T>
void require_size(const Column<std::int64_t>& keys, const std::optional<Column<T>>& column) {
  if (column && column->size() != keys.size()) throw nb::value_error("a column has not one value for each key");
}

void pull(const EmbeddingTable& table, Column<std::int64_t> keys, OutRows out) {
  require_shape(table, keys, out);
  nb::gil_scoped_release release;
  table.pull(view(keys), out.data());
}

std::uint64_t push(EmbeddingTable& table, Column<std::int64_t> keys, Rows gradients, std::optional<double> lr,
                   std::optional<Column<std::uint32_t>> counts, std::optional<Column<float>> shows,
                   std::optional<Column<float>> clicks) {
  require_shape(table, keys, gradients);
  require_size(keys, counts);
  require_size(keys, shows);
  require_size(keys, clicks);
  nb::gil_scoped_release release;
  const double rate = lr ? *lr : table.spec().rule["lr"];
  return table.push(view(keys),
                    {gradients.data(), rate, data_or_null(counts), data_or_null(shows), data_or_null(clicks)});
}

void add(EmbeddingTable& table, Column<std::int64_t> keys, Rows deltas) {
  require_shape(table, keys, deltas);
  nb::gil_scoped_release release;
  table.add(view(keys), deltas.data());
}

void assign(EmbeddingTable& table, Column<std::int64_t> keys, Rows values) {
  require_shape(table, keys, values);
  nb::gil_scoped_release release;
  table.assign(view(keys), values.data());
}

// The columns that `read` returns, as arrays.
template <class Read>
nb::tuple arrays_of(const EmbeddingTable& table, Read read) {
  phalanx::ShardColumns columns;
  {
    nb::gil_scoped_release release;
    columns = read();
  }
  const std::size_t n = columns.keys.size();
  return nb::make_tuple(array_of(std::move(columns.keys)), array_of(std::move(columns.ticks)),
                        array_of(std::move(columns.rows), n, table.spec().width()),
                        array_of(std::move(columns.waiting_keys)), array_of(std::move(columns.waiting_ticks)),
                        array_of(std::move(columns.waiting_counts)), array_of(std::move(columns.days)),
                        array_of(std::move(columns.removed)), columns.decays, columns.tick, columns.is_complete);
}

nb::tuple read_shard(const EmbeddingTable& table, int shard, std::uint64_t since) {
  return arrays_of(table, [&] { return table.read(shard, since); });
}

nb::tuple read_moment(const EmbeddingTable& table, std::uint64_t moment, int shard) {
  return arrays_of(table, [&] { return table.read_moment(moment, shard); });
}

void restore_shard(EmbeddingTable& table, int shard, Column<std::int64_t> keys, Column<std::uint64_t> ticks, Rows rows,
             Column<std::int64_t> waiting_keys, Column<std::uint64_t> waiting_ticks,
             Column<std::uint32_t> waiting_counts, Column<std::uint64_t> days, Column<std::int64_t> removed,
             std::uint64_t decays, std::uint64_t tick, bool is_complete) {
  nb::gil_scoped_release release;
  table.restore(shard, {view(keys), view(ticks), rows.data(), view(waiting_keys), view(waiting_ticks),
                        view(waiting_counts), view(days), view(removed), decays, tick, is_complete});
}

nb::object keys(const EmbeddingTable& table, int shard) {
  std::vector<std::int64_t> ids;
  {
    nb::gil_scoped_release release;
    ids = table.keys(shard);
  }
  return array_of(std::move(ids));
}

}  // namespace

void bind_table(nb::module_& module) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const phalanx::TableFull& full) {
      raise("BackendError", full);
    } catch (const phalanx::DamagedRow& damaged) {
      raise("DataError", damaged);
    }
  });
  nb::class_<EmbeddingTable>(module, "EmbeddingTable", "A table of rows by 64-bit id; see phalanx.ps.table.table.RowTable.")
      .def("__init__", &make, nb::arg("spec"), nb::arg("layout"), nb::arg("salt"), nb::arg("folder"))
      .def("pull", &pull, nb::arg("keys").noconvert(), nb::arg("out").noconvert())
      .def("push", &push, nb::arg("keys").noconvert(), nb::arg("gradients").noconvert(),
           nb::arg("lr") = nb::none(), nb::arg("counts").noconvert() = nb::none(),
           nb::arg("shows").noconvert() = nb::none(), nb::arg("clicks").noconvert() = nb::none())
      .def("add", &add, nb::arg("keys").noconvert(), nb::arg("deltas").noconvert())
      .def("assign", &assign, nb::arg("keys").noconvert(), nb::arg("values").noconvert())
      .def("require_room", &EmbeddingTable::require_room, Released())
      .def("require_room_to_shrink", &EmbeddingTable::require_room_to_shrink, Released())
      .def("shrink", &EmbeddingTable::shrink, Released())
      .def("clear", &EmbeddingTable::clear, Released())
      .def("read_shard", &read_shard, nb::arg("shard"), nb::arg("since"))
      .def("restore_shard", &restore_shard, nb::arg("shard"), nb::arg("keys"), nb::arg("ticks"), nb::arg("rows"),
           nb::arg("waiting_keys"), nb::arg("waiting_ticks"), nb::arg("waiting_counts"), nb::arg("days"),
           nb::arg("removed"), nb::arg("decays"), nb::arg("tick"), nb::arg("is_complete"))
      .def("keys", &keys, nb::arg("shard"))
      .def("begin_moment", &EmbeddingTable::begin_moment, nb::arg("since"), Released())
      .def("read_moment", &read_moment, nb::arg("moment"), nb::arg("shard"))
      .def("end_moment", &EmbeddingTable::end_moment, nb::arg("moment"), Released())
      .def_prop_ro("rows", &EmbeddingTable::rows)
      .def_prop_ro("bytes", &EmbeddingTable::bytes, Released())
      .def_prop_ro("stored", &EmbeddingTable::stored)
      .def_prop_ro("file_bytes", &EmbeddingTable::file_bytes, Released())
      .def_prop_ro("file_reads", &EmbeddingTable::file_reads, Released())
      .def_prop_ro("moved", &EmbeddingTable::moved, Released())
      .def_prop_ro("pushed", &EmbeddingTable::pushed)
      .def_prop_ro("dropped", &EmbeddingTable::dropped)
      .def_prop_ro("evicted", &EmbeddingTable::evicted)
      .def_prop_ro("pulled", &EmbeddingTable::pulled)
      .def_prop_ro("missed", &EmbeddingTable::missed)
      .def_prop_ro("tick", &EmbeddingTable::tick);
}
