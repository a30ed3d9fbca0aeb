// Python's view of the server's engine, as control calls it. No logic here.
//
// Every call that takes a lock of the engine lets go of Python's first: the engine's threads call Python under theirs.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "bind_buffer.h"
#include "server_engine.h"

namespace nb = nanobind;
using namespace phalanx;
using Released = nb::call_guard<nb::gil_scoped_release>;

namespace {

// A Python function that threads without Python's lock may call, and drop.
std::shared_ptr<nb::object> shared(nb::object function) {
  return {new nb::object(std::move(function)), [](nb::object* kept) {
            const nb::gil_scoped_acquire acquired;
            delete kept;
          }};
}

void raise(const Refusal& refusal) {
  const nb::object errors = nb::module_::import_("phalanx.errors");
  PyErr_SetString(nb::object(errors.attr(refusal.error.c_str())).ptr(), refusal.what());
}

// --- clocks ----------------------------------------------------------------------------------------------------------

ServerMode mode_of(const std::optional<std::string>& name) {
  if (!name) return ServerMode::kNone;
  return *name == "sync" ? ServerMode::kSync : *name == "bounded" ? ServerMode::kBounded : ServerMode::kAsync;
}

std::optional<std::string> name_of(ServerMode mode) {
  switch (mode) {
    case ServerMode::kNone: return std::nullopt;
    case ServerMode::kSync: return "sync";
    case ServerMode::kBounded: return "bounded";
    case ServerMode::kAsync: break;
  }
  return "async";
}

using Counts = std::tuple<std::optional<std::string>, std::int64_t, std::int64_t, std::vector<std::int64_t>,
                          std::vector<bool>>;

void make_clocks(Clocks* at, const Counts& counts, double report_s) {
  auto [mode, bound, version, pushed, live] = counts;
  new (at) Clocks({mode_of(mode), bound, version, std::move(pushed), std::move(live)}, report_s);
}

Counts counts_of(const Clocks& clocks) {
  const ClockCounts counts = clocks.counts();
  return {name_of(counts.mode), counts.bound, counts.version, counts.pushed, counts.live};
}

WaitReport report_to(nb::object report) {
  return [report = shared(std::move(report))](const std::string& waits_for, bool is_connected) {
    const nb::gil_scoped_acquire acquired;
    (*report)(waits_for, is_connected);
  };
}

template <void (Clocks::*kWait)(std::int64_t, const WaitReport&)>
void wait(Clocks& clocks, std::int64_t step, nb::object report) {
  const WaitReport tell = report_to(std::move(report));
  const nb::gil_scoped_release released;
  (clocks.*kWait)(step, tell);
}

void bind_clocks(nb::module_& module) {
  nb::class_<Clocks>(module, "ServerClocks", "Pushes of each worker; see phalanx.ps.server.clocks.Clocks.")
      .def("__init__", &make_clocks, nb::arg("counts"), nb::arg("report_s"))
      .def("counts", &counts_of, Released())
      .def("_set_mode", [](Clocks& clocks, const std::string& mode, std::int64_t bound) {
             clocks.set_mode(mode_of(mode), bound);
           }, nb::arg("mode"), nb::arg("bound"), Released())
      .def("push", &Clocks::push, nb::arg("worker"), Released())
      .def("apply", &Clocks::apply, nb::arg("version"), Released())
      .def("join", &Clocks::join, nb::arg("worker"), Released())
      .def("leave", &Clocks::leave, nb::arg("worker"), Released())
      .def("connect", &Clocks::connect, nb::arg("worker"), Released())
      .def("disconnect", &Clocks::disconnect, nb::arg("worker"), nb::arg("now"), Released())
      .def("expire", &Clocks::expire, nb::arg("now"), nb::arg("grace_s"), Released())
      .def("lose_missing", &Clocks::lose_missing, nb::arg("waited_s"), nb::arg("now"), Released())
      .def("stop", &Clocks::stop, Released())
      .def("next_step", &Clocks::next_step, nb::arg("worker"), Released())
      .def_prop_ro("complete", &Clocks::complete, Released())
      .def_prop_ro("missing", &Clocks::missing, Released())
      .def("_disconnected", &Clocks::disconnected, Released())
      .def("check", &Clocks::check, Released())
      .def("_wait", &wait<&Clocks::wait>, nb::arg("step"), nb::arg("report"))
      .def("_wait_steps", &Clocks::wait_steps, nb::arg("steps"), nb::arg("seconds"), Released());
}

// --- gate ------------------------------------------------------------------------------------------------------------

void make_gate(Gate* at, nb::object clock, nb::object expired, double report_s) {
  const std::shared_ptr<nb::object> seconds = shared(std::move(clock)), told = shared(std::move(expired));
  new (at) Gate(
      [seconds] {
        const nb::gil_scoped_acquire acquired;
        return nb::cast<double>((*seconds)());
      },
      [told](const std::string& token) {
        const nb::gil_scoped_acquire acquired;
        (*told)(token);
      },
      report_s);
}

void enter_alone(Gate& gate, int worker, std::int64_t step, nb::object report) {
  const WaitReport tell = report_to(std::move(report));
  const nb::gil_scoped_release released;
  gate.enter_alone(worker, step, tell);
}

void bind_gate(nb::module_& module) {
  nb::class_<Gate>(module, "WriteGate", "Who may change a server now; see phalanx.ps.server.write_freeze.WriteFreeze.")
      .def("__init__", &make_gate, nb::arg("clock"), nb::arg("expired"), nb::arg("report_s"))
      .def("enter", [](Gate& gate, int worker, std::int64_t step) { gate.enter(worker, step); }, nb::arg("worker"),
           nb::arg("step"), Released())
      .def("leave", &Gate::leave, Released())
      .def("enter_alone", &enter_alone, nb::arg("worker"), nb::arg("step"), nb::arg("report"))
      .def("enter_frozen", &Gate::enter_frozen, nb::arg("token"), Released())
      .def("leave_alone", &Gate::leave_alone, Released())
      .def("freeze", &Gate::freeze, nb::arg("token"), nb::arg("seconds"),
           nb::arg("steps") = std::vector<std::int64_t>(), nb::arg("holder") = "a snapshot that begins", Released())
      .def("holds_back", &Gate::holds_back, nb::arg("worker"), nb::arg("step"), Released())
      .def("resume", &Gate::resume, nb::arg("token"), Released());
}

// --- log -------------------------------------------------------------------------------------------------------------

std::uint64_t append(ServerLog& log, nb::list buffers) {
  std::vector<std::unique_ptr<Buffer>> views;
  std::vector<Bytes> parts;
  for (const nb::handle buffer : buffers) {
    parts.emplace_back(views.emplace_back(std::make_unique<Buffer>(buffer))->bytes());
  }
  const nb::gil_scoped_release released;
  return log.append(parts);
}

void open_segment(ServerLog& log, const std::string& path) {
  try {
    const nb::gil_scoped_release released;
    log.open(path);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw nb::python_error();
  }
}

void bind_log(nb::module_& module) {
  nb::class_<ServerLog>(module, "ServerLog", "The newest segment of a log; see phalanx.ps.server.log.Log.")
      .def(nb::init<std::string, bool>(), nb::arg("directory"), nb::arg("is_durable"))
      .def("append", &append, nb::arg("buffers"))
      .def("sync", &ServerLog::sync, nb::arg("position"), Released())
      .def("open", &open_segment, nb::arg("path"))
      .def("close", &ServerLog::close, Released())
      .def_prop_ro("position", &ServerLog::position, Released())
      .def_prop_ro("syncs", &ServerLog::syncs, Released());
}

// --- engine ----------------------------------------------------------------------------------------------------------

// A push from the log: reads arrays, and keeps them for as long as it lives.
class LoggedPush {
 public:
  DataRequest request;

  LoggedPush(std::uint64_t client, std::uint64_t seq, std::uint64_t step, double weight) {
    request.is_push = true;
    request.client = client;
    request.seq = seq;
    request.step = step;
    request.weight = weight;
  }

  // (salt, kind, keys, values, lr or None, counts, shows, clicks or None) of each table
  void add(const nb::list& updates) {
    for (const nb::handle update : updates) {
      TablePush& sent = request.pushes.emplace_back();
      sent.table = nb::cast<std::uint64_t>(update[0]);
      sent.kind = static_cast<UpdateKind>(nb::cast<std::uint8_t>(update[1]));
      sent.keys = column<std::int64_t>(update[2]);
      const Rows values = nb::cast<Rows>(update[3], false);
      kept_.push_back(nb::borrow(update[3]));
      sent.values = {values.data(), values.size()};
      sent.rows = static_cast<std::uint32_t>(values.shape(0));
      if ((sent.has_lr = !update[4].is_none())) sent.lr = nb::cast<double>(update[4]);
      sent.counts = data_or_null<std::uint32_t>(update[5]);
      sent.shows = data_or_null<float>(update[6]);
      sent.clicks = data_or_null<float>(update[7]);
    }
  }

 private:
  template <class T>
  std::span<const T> column(nb::object array) {
    const Column<T> numbers = nb::cast<Column<T>>(array, false);
    kept_.push_back(std::move(array));
    return {numbers.data(), numbers.size()};
  }

  // Null where there is none; a column that is there may be empty.
  template <class T>
  const T* data_or_null(nb::object array) {
    static const T kNothing{};
    if (array.is_none()) return nullptr;
    const std::span<const T> numbers = column<T>(std::move(array));
    return numbers.empty() ? &kNothing : numbers.data();
  }

  std::vector<nb::object> kept_;
};

void replay(ServerEngine& engine, std::uint64_t client, std::uint64_t seq, std::uint64_t step, double weight,
            nb::list updates) {
  LoggedPush logged(client, seq, step, weight);
  logged.add(updates);
  const nb::gil_scoped_release released;
  engine.replay(logged.request);
}

void make_engine(ServerEngine* at, std::shared_ptr<Gate> gate, nb::object failed) {
  const std::shared_ptr<nb::object> told = shared(std::move(failed));
  new (at) ServerEngine(std::move(gate), [told](const Refusal& error) {
    const nb::gil_scoped_acquire acquired;
    raise(error);
    (*told)(nb::python_error().value());
  });
}

void put_table(ServerEngine& engine, std::uint64_t salt, std::string name, std::string json_name,
               std::string dividing_rule, std::shared_ptr<EmbeddingTable> table) {
  engine.put_table(salt, {std::move(name), std::move(json_name), std::move(dividing_rule), std::move(table)});
}

// (client, worker, last request, its answer as JSON, dropped gradients or None) of each
using ClientCounts = std::tuple<std::uint64_t, int, std::uint64_t, std::string, std::optional<std::uint64_t>>;

std::vector<ClientCounts> clients_of(const ServerEngine& engine) {
  std::vector<ClientCounts> all;
  for (const auto& [number, client] : engine.clients())
    all.emplace_back(number, client.worker, client.last, client.reply.json, client.reply.dropped);
  return all;
}

void restore_client(ServerEngine& engine, std::uint64_t client, int worker, std::uint64_t last, std::string reply,
                    std::optional<std::uint64_t> dropped) {
  engine.restore_client(client, worker, last, {std::move(reply), dropped});
}

nb::dict counts_of_engine(const ServerEngine& engine) {
  const ServerCounts& counts = engine.counts();
  nb::dict all;
  for (const auto& [name, kind] : {std::pair("pull", &counts.pulls), std::pair("push", &counts.pushes)}) {
    const std::string prefix = name;
    all[(prefix + "_requests").c_str()] = kind->requests.load();
    all[(prefix + "_keys").c_str()] = kind->keys.load();
    all[(prefix + "_seconds").c_str()] = 1e-9 * static_cast<double>(kind->nanoseconds.load());
  }
  all["wait_seconds"] = 1e-9 * static_cast<double>(counts.waited_nanoseconds.load());
  all["active"] = counts.active.load();
  all["waiting"] = counts.waiting.load();
  return all;
}

void bind_engine(nb::module_& module) {
  nb::class_<ServerEngine, DataHandler>(module, "ServerEngine", "Pulls and pushes of a server, on all cores; see csrc/server_engine.h.")
      .def("__init__", &make_engine, nb::arg("gate"), nb::arg("failed"))
      .def("replay", &replay, nb::arg("client"), nb::arg("seq"), nb::arg("step"), nb::arg("weight"),
           nb::arg("updates"))
      .def("counts", &counts_of_engine)
      .def("put_table", &put_table, nb::arg("salt"), nb::arg("name"), nb::arg("json_name"), nb::arg("dividing_rule"),
           nb::arg("table"), Released())
      .def("set_clocks", &ServerEngine::set_clocks, nb::arg("clocks"), Released())
      .def("set_log", &ServerEngine::set_log, nb::arg("log"), Released())
      .def("set_budget", &ServerEngine::set_budget, nb::arg("bytes"), Released())
      .def("complete_steps", &ServerEngine::complete_steps, Released())
      .def("append_pending", &ServerEngine::append_pending, Released())
      .def("withhold", &ServerEngine::withhold, nb::arg("worker"), Released())
      .def("settle", &ServerEngine::settle, nb::arg("worker"), nb::arg("pushes"), Released())
      .def("withheld", &ServerEngine::withheld, Released())
      .def("restore_withheld", &ServerEngine::restore_withheld, nb::arg("worker"), Released())
      .def("admit", &ServerEngine::admit, nb::arg("client"), nb::arg("worker"), Released())
      .def("clients", &clients_of, Released())
      .def("restore_client", &restore_client, nb::arg("client"), nb::arg("worker"), nb::arg("last"), nb::arg("reply"),
           nb::arg("dropped").none(), Released())
      .def("worker_of", &ServerEngine::worker_of, nb::arg("client"), Released())
      .def("earlier_reply", &ServerEngine::earlier_reply, nb::arg("client"), nb::arg("seq"), Released())
      .def("record_reply", &ServerEngine::record_reply, nb::arg("client"), nb::arg("seq"), nb::arg("reply"),
           Released())
      .def("forget_pulls", &ServerEngine::forget_pulls, Released())
      .def("stop", &ServerEngine::stop, Released());
}

}  // namespace

void bind_server(nb::module_& module) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Refusal& refusal) {
      raise(refusal);
    }
  });
  bind_clocks(module);
  bind_gate(module);
  bind_log(module);
  bind_engine(module);
}
