// Python's view of the collectives over shared memory. No logic here: addresses and counts in, operations out, the GIL
// released in between.
//
// Tensors come as addresses, not arrays: bfloat16 has no NumPy type, and a call must cost microseconds. The caller has
// checked that they are contiguous, in memory of the CPU and as long as the counts say, and keeps them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "bind.h"
#include "shm_group.h"

namespace nb = nanobind;
using phalanx::Group;
using phalanx::Operation;
using phalanx::Reduce;
using phalanx::Type;

namespace {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Counts = std::vector<std::size_t>;
using Op = Group::Op;

std::byte* at(Address address) { return reinterpret_cast<std::byte*>(address); }

Group::Buffers all_at(const Addresses& addresses) {
  Group::Buffers buffers;
  for (const Address address : addresses) buffers.push_back(at(address));
  return buffers;
}

Type type_of(int code) { return static_cast<Type>(code); }
Reduce reduce_of(int code) { return static_cast<Reduce>(code); }

void translate(const std::exception_ptr& error, void*) {
  const auto raise = [](const char* type, const char* text) {
    PyErr_SetString(nb::module_::import_("phalanx.errors").attr(type).ptr(), text);
  };
  try {
    std::rethrow_exception(error);
  } catch (const phalanx::PeerLost& lost) {
    raise("PeerLostError", lost.what());
  } catch (const phalanx::Disagreement& disagreement) {
    raise("ConfigError", disagreement.what());
  }
}

}  // namespace

void bind_shm(nb::module_& module) {
  nb::register_exception_translator(translate);
  using Free = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<Operation>(module, "SharedOperation", "One call of a SharedGroup.")
      .def_prop_ro("is_done", [](const Operation& op) { return op.is_done.load(std::memory_order_acquire); })
      .def_prop_ro("peer", [](const Operation& op) { return op.peer; });

  nb::class_<Group>(module, "SharedGroup", nb::is_weak_referenceable(),
                    "Collectives and messages between the ranks of one host; see csrc/shm_group.h.")
      .def(nb::init<int, int, int, const std::string&, double>(), nb::arg("fd"), nb::arg("rank"), nb::arg("size"),
           nb::arg("name"), nb::arg("timeout_s"))
      .def("all_reduce", [](Group& g, Address data, std::size_t count, int type, int reduce) -> Op {
             return g.all_reduce(at(data), count, type_of(type), reduce_of(reduce));
           }, Free())
      .def("reduce", [](Group& g, Address data, std::size_t count, int type, int reduce, int root) -> Op {
             return g.reduce_to(at(data), count, type_of(type), reduce_of(reduce), root);
           }, Free())
      .def("reduce_scatter", [](Group& g, const Addresses& in, Address out, Counts counts, int type, int reduce) -> Op {
             return g.reduce_scatter(all_at(in), at(out), std::move(counts), type_of(type), reduce_of(reduce));
           }, Free())
      .def("all_gather", [](Group& g, Address in, const Addresses& out, Counts counts, int type) -> Op {
             return g.all_gather(at(in), all_at(out), std::move(counts), type_of(type));
           }, Free())
      .def("gather", [](Group& g, Address in, const Addresses& out, std::size_t count, int type, int root) -> Op {
             return g.gather(at(in), all_at(out), count, type_of(type), root);
           }, Free())
      .def("scatter", [](Group& g, const Addresses& in, Address out, std::size_t count, int type, int root) -> Op {
             return g.scatter(all_at(in), at(out), count, type_of(type), root);
           }, Free())
      .def("broadcast", [](Group& g, Address data, std::size_t count, int type, int root) -> Op {
             return g.broadcast(at(data), count, type_of(type), root);
           }, Free())
      .def("all_to_all", [](Group& g, const Addresses& in, Counts in_counts, const Addresses& out, Counts out_counts,
                            int type) -> Op {
             return g.all_to_all(all_at(in), std::move(in_counts), all_at(out), std::move(out_counts), type_of(type));
           }, Free())
      .def("barrier", &Group::barrier, Free())
      .def("send", [](Group& g, Address memory, std::size_t bytes, int to, int tag) -> Op {
             return g.send(at(memory), bytes, to, tag);
           }, Free())
      .def("receive", [](Group& g, Address memory, std::size_t bytes, int from, int tag) -> Op {
             return g.receive(at(memory), bytes, from, tag);
           }, Free())
      .def("wait", &Group::wait, nb::arg("operation"), nb::arg("timeout_s") = 0.0, Free())
      .def("ends_within", &Group::ends_within, nb::arg("operation"), nb::arg("patience_s"), Free())
      .def("missing_from", &Group::missing_from, Free())
      .def("missing_ranks", &Group::missing_ranks, Free())
      .def("waited_for", &Group::waited_for, Free())
      .def("under_way", [](Group& group) {
             phalanx::UnderWay found;
             {
               const nb::gil_scoped_release release;
               found = group.under_way();
             }
             nb::list calls;
             for (const phalanx::CallUnderWay& call : found.calls)
               calls.append(nb::make_tuple(call.verb, call.detail, call.label, call.number, call.age_s, call.missing));
             return nb::make_tuple(found.made, found.ended, calls);
           })
      .def("wait_times", [](Group& group) {
             phalanx::WaitTimes times;
             {
               const nb::gil_scoped_release release;
               times = group.wait_times();
             }
             return nb::make_tuple(times.in_calls_s, times.main_s, times.entered_s);
           })
      .def("disagree", &Group::disagree, nb::arg("text"), Free())
      .def("progress", &Group::progress, Free())
      .def("close", &Group::close, Free())
      .def("set_timeout", &Group::set_timeout)
      .def_static("label_calls", &Group::label_calls, nb::arg("label"))
      .def_static("bytes_for", &phalanx::Region::bytes_for);
}
