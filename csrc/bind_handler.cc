#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "python_handler.h"
#include "wire_socket.h"

namespace nb = nanobind;

namespace phalanx {
namespace {

// The arrays are the request's: valid until it is answered.
template <class T>
nb::object array_at(const T* data, std::size_t count) {
  static const T nothing{};
  const T* first = count == 0 ? &nothing : data;
  return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<1>>(first, {count}), nb::rv_policy::reference);
}

template <class T>
nb::object column_at(const T* data, std::size_t count) {
  return data == nullptr ? nb::none() : array_at(data, count);
}

nb::tuple tuple_of(const TablePush& push) {
  return nb::make_tuple(push.table, static_cast<int>(push.kind), push.pull,
                        push.pull == 0 ? array_at(push.keys.data(), push.keys.size()) : nb::none(),
                        array_at(push.values.data(), push.values.size()), push.rows,
                        push.has_lr ? nb::cast(push.lr) : nb::none(), column_at(push.counts, push.rows),
                        column_at(push.shows, push.rows), column_at(push.clicks, push.rows));
}

bool is_phalanx_error(const nb::python_error& error) {
  return nb::isinstance(error.value(), nb::module_::import_("phalanx.errors").attr("PhalanxError"));
}

}  // namespace

DataReply PythonHandler::answer(const DataRequest& request, Caller& caller) {
  const nb::gil_scoped_acquire acquire;
  nb::list pushes, pulls;
  for (const TablePush& push : request.pushes) pushes.append(tuple_of(push));
  for (const TablePull& pull : request.pulls) {
    pulls.append(nb::make_tuple(pull.table, array_at(pull.keys.data(), pull.keys.size())));
  }
  const nb::object rows = nb::cpp_function([&caller](std::size_t count, std::size_t dim) {
    float* data = caller.rows(count, dim);
    return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {count, dim}), nb::rv_policy::reference);
  });
  const nb::object report = nb::cpp_function([&caller](const std::string& waits_for, bool is_connected) {
    const nb::gil_scoped_release release;
    caller.report_wait(waits_for, is_connected);
  });
  try {
    const nb::tuple reply = nb::cast<nb::tuple>(answer_(request.is_push, request.client, request.seq, request.step,
                                                        request.weight, request.keep, pushes, pulls, rows, report));
    return {static_cast<DataStatus>(nb::cast<int>(reply[0])), nb::cast<std::uint64_t>(reply[1]),
            nb::cast<std::uint64_t>(reply[2])};
  } catch (const nb::python_error& error) {
    const std::string text = nb::str(error.value()).c_str();
    if (error.matches(PyExc_ConnectionAbortedError)) throw ConnectionEnded(text);
    if (!is_phalanx_error(error)) throw;
    throw Refusal(nb::cast<std::string>(nb::getattr(error.type(), "__name__")), text);
  }
}

}  // namespace phalanx
