// Python's view of the wire's server end: sessions that answer pulls and pushes without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "wire_session.h"
#include "wire_tls.h"

namespace nb = nanobind;
using phalanx::AttachedSegments;
using phalanx::DataHandler;
using phalanx::DataSession;
using phalanx::MemoryBudget;
using phalanx::ServerContext;

namespace {

using Bytes = Column<std::uint8_t>;

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const phalanx::FrameError& broken) {
    PyErr_SetString(nb::module_::import_("phalanx.ps.wire.frame").attr("FrameError").ptr(), broken.what());
  } catch (const phalanx::ConnectionEnded& ended) {
    PyErr_SetString(PyExc_ConnectionAbortedError, ended.what());
  }
}

std::span<const std::byte> raw_of(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

nb::object bytes_of(const phalanx::SharedMemory& memory) {
  auto kept = std::make_unique<phalanx::SharedMemory>(memory);
  const std::span<std::byte> bytes = memory->bytes();
  nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<phalanx::SharedMemory*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(bytes.data(), {bytes.size()}, owner));
}

// A client whose frames Python reads and writes.
class PythonCaller : public phalanx::Caller {
 public:
  PythonCaller(phalanx::ReplyRows& reply, nb::callable report) : reply_(reply), report_(std::move(report)) {}

  float* rows(std::size_t count, std::size_t dim) override { return reply_.add(count, dim); }

  void report_wait(const std::string& waits_for, bool is_connected) override {
    const nb::gil_scoped_acquire acquire;
    try {
      report_(waits_for, is_connected);
    } catch (nb::python_error& error) {
      throw phalanx::ConnectionEnded(nb::str(error.value()).c_str());
    }
  }

 private:
  phalanx::ReplyRows& reply_;
  nb::callable report_;
};

nb::tuple answer(ServerContext& context, const std::string& peer, std::uint64_t client, int kind, std::uint64_t seq,
                 nb::bytes object, Bytes payload, nb::callable report) {
  const phalanx::FrameHeader header{static_cast<phalanx::FrameKind>(kind), 0, client, seq,
                                    static_cast<std::uint32_t>(object.size()), payload.size()};
  phalanx::DataFrame frame(header, raw_of(object));
  const std::span<const std::byte> bytes = std::as_bytes(view(payload));
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % 8 != 0) {
    throw nb::value_error("the payload starts between two numbers");
  }
  phalanx::ReplyRows rows({}, frame.narrow_rows());
  PythonCaller caller(rows, std::move(report));
  phalanx::Answer answered;
  std::vector<std::uint8_t> out;
  {
    const nb::gil_scoped_release release;
    answered = phalanx::answer(context, peer, frame, bytes, caller, 0);
    rows.finish();
    if (answered.kind == phalanx::FrameKind::kRows) {
      out.reserve(rows.payload_bytes());
      for (const std::span<const std::byte> piece : rows.pieces()) {
        const auto* data = reinterpret_cast<const std::uint8_t*>(piece.data());
        out.insert(out.end(), data, data + piece.size());
      }
    }
  }
  return nb::make_tuple(static_cast<int>(answered.kind), nb::bytes(answered.object.data(), answered.object.size()),
                        array_of(std::move(out)));
}

nb::tuple serve(DataSession& session, int fd, bool is_unix, OutColumn<std::uint8_t> ahead, std::size_t start,
                std::size_t end, std::vector<int> descriptors, phalanx::TlsStream* tls) {
  phalanx::Descriptors received(std::move(descriptors));
  phalanx::PlainStream plain = is_unix ? phalanx::PlainStream(fd, received) : phalanx::PlainStream(fd);
  phalanx::SocketStream& stream = tls == nullptr ? static_cast<phalanx::SocketStream&>(plain) : *tls;
  phalanx::FrameSocket socket(stream, {std::as_writable_bytes(view(ahead)), start, end}, received);
  bool has_more;
  {
    const nb::gil_scoped_release release;
    has_more = session.serve(socket);
  }
  return nb::make_tuple(has_more, socket.ahead().start, socket.ahead().end, received.take_all());
}

}  // namespace

void bind_wire(nb::module_& module) {
  nb::register_exception_translator(translate);

  nb::class_<MemoryBudget>(module, "MemoryBudget", "Bytes that all connections of a process may hold together.")
      .def(nb::init<std::uint64_t>(), nb::arg("limit"))
      .def("take", [](MemoryBudget& budget, std::uint64_t count) { return budget.take(count); }, nb::arg("count"))
      .def("give", &MemoryBudget::give, nb::arg("count"))
      .def_prop_ro("limit", &MemoryBudget::limit)
      .def_prop_ro("used", &MemoryBudget::used);

  nb::class_<AttachedSegments>(module, "AttachedSegments", "Shared memory that a client handed over.")
      .def(nb::init<>())
      .def("attach", [](AttachedSegments& segments, std::uint64_t number, std::uint64_t size, int fd) {
             return bytes_of(segments.attach(number, size, fd));
           }, nb::arg("number"), nb::arg("size"), nb::arg("fd"))
      .def("find", [](const AttachedSegments& segments, std::uint64_t number) {
             return bytes_of(segments.find(number));
           }, nb::arg("number"));

  nb::class_<DataHandler>(module, "DataHandler", "Answers pulls and pushes; see csrc/server_request.h.");

  nb::class_<ServerContext>(module, "ServerContext", "What the sessions of a server share.")
      .def("__init__", [](ServerContext* at, DataHandler* handler, const std::string& name,
                          std::uint64_t max_frame_bytes, MemoryBudget& budget, nb::callable log_failure) {
             new (at) ServerContext(handler, name, max_frame_bytes, budget);
             at->log_failure = [log = std::move(log_failure)](const std::string& text) {
               const nb::gil_scoped_acquire acquire;
               log(text);
             };
           }, nb::arg("handler").none(), nb::arg("name"), nb::arg("max_frame_bytes"), nb::arg("budget"),
           nb::arg("log_failure"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>())
      .def("stop", [](ServerContext& context) { context.is_stopping.store(true, std::memory_order_release); })
      .def("answer", &answer, nb::arg("peer"), nb::arg("client"), nb::arg("kind"), nb::arg("seq"), nb::arg("object"),
           nb::arg("payload").noconvert(), nb::arg("report_wait"));

  nb::class_<DataSession>(module, "DataSession", "A client's pulls and pushes; see csrc/wire_session.h.")
      .def(nb::init<ServerContext&, AttachedSegments&, std::uint64_t, std::string>(), nb::arg("context"),
           nb::arg("segments"), nb::arg("client"), nb::arg("peer"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("serve", &serve, nb::arg("fd"), nb::arg("is_unix"), nb::arg("ahead").noconvert(), nb::arg("start"),
           nb::arg("end"), nb::arg("descriptors"), nb::arg("tls").none() = nb::none());
}
