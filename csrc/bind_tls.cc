// Python's view of TLS by the system's OpenSSL. No logic here.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <memory>
#include <vector>

#include "bind.h"
#include "bind_buffer.h"
#include "wire_tls.h"

namespace nb = nanobind;
using phalanx::TlsContext;
using phalanx::TlsStream;
using Released = nb::call_guard<nb::gil_scoped_release>;

namespace {

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const phalanx::TlsError& broken) {
    PyErr_SetString(nb::module_::import_("phalanx.ps.wire.tls_stream").attr("TlsError").ptr(), broken.what());
  }
}

[[noreturn]] void raise_blocking() {
  PyErr_SetNone(PyExc_BlockingIOError);
  throw nb::python_error();
}

std::size_t receive_some(TlsStream& stream, nb::handle memory) {
  const Buffer into(memory, true);
  std::size_t count;
  {
    const nb::gil_scoped_release release;
    count = stream.receive_some(into.bytes());
  }
  if (count == 0) raise_blocking();
  return count;
}

std::size_t send_some(TlsStream& stream, nb::list parts) {
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<iovec> from;
  for (const nb::handle part : parts) {
    const std::span<std::byte> bytes = buffers.emplace_back(std::make_unique<Buffer>(part))->bytes();
    from.push_back({bytes.data(), bytes.size()});
  }
  std::size_t count;
  {
    const nb::gil_scoped_release release;
    count = stream.send_some(from);
  }
  if (count == 0) raise_blocking();
  return count;
}

nb::bytes peer_certificate(const TlsStream& stream) {
  const std::vector<std::uint8_t> der = stream.peer_certificate();
  return nb::bytes(der.data(), der.size());
}

}  // namespace

void bind_tls(nb::module_& module) {
  nb::register_exception_translator(translate);

  nb::class_<TlsContext>(module, "TlsContext", "What the TLS streams of one end share; see csrc/wire_tls.h.")
      .def_static("client", [] { return TlsContext::client(); })
      .def_static("server", [](nb::bytes certificate, nb::bytes key) {
             const Buffer certificate_der(certificate), key_der(key);
             return TlsContext::server(certificate_der.bytes(), key_der.bytes());
           }, nb::arg("certificate"), nb::arg("key"));

  nb::class_<TlsStream>(module, "TlsStream", "One end of a TLS connection; see csrc/wire_tls.h.")
      .def(nb::init<std::shared_ptr<TlsContext>, int>(), nb::arg("context"), nb::arg("fd"))
      .def("shake_hands", &TlsStream::shake_hands, Released())
      .def("peer_certificate", &peer_certificate)
      .def("receive", &receive_some, nb::arg("memory"))
      .def("send", &send_some, nb::arg("parts"));
}
