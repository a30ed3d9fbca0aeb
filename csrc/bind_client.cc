// Python's view of the wire's client end. No logic here: one call for the frames of all servers, one for their replies.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "wire_client.h"

namespace nb = nanobind;
using phalanx::DueReply;
using phalanx::PartitionedRequest;
using phalanx::RequestTerms;
using phalanx::SentFrame;
using phalanx::ServerFrame;

namespace {

using Bytes = OutColumn<std::uint8_t>;

// (server, with_keys, fd, client, seq, number of a segment or 0, memory, the segment's descriptor or -1)
using FrameFields = std::tuple<int, bool, int, std::uint64_t, std::uint64_t, std::uint64_t, Bytes, int>;

ServerFrame frame_of(const FrameFields& fields) {
  const auto& [server, with_keys, fd, client, seq, segment, memory, descriptor] = fields;
  return {server, with_keys, fd, client, seq, segment, std::as_writable_bytes(view(memory)), descriptor};
}

void require_room(const PartitionedRequest& request, const ServerFrame& frame) {
  const std::uint64_t count = request.payload_bytes(frame.server, frame.with_keys);
  if (count > frame.memory.size() || (!frame.is_shared() && count > phalanx::kChunkBytes)) {
    throw nb::value_error("the payload does not fit");
  }
}

// Returns (errno, what was not written, whether any was) of each.
nb::list send_frames(const PartitionedRequest& request, int kind, std::uint64_t step, double weight, bool keep,
                     const std::vector<FrameFields>& fields) {
  const RequestTerms terms{static_cast<phalanx::FrameKind>(kind), step, weight, keep};
  std::vector<ServerFrame> frames;
  for (const FrameFields& of_frame : fields) {
    frames.push_back(frame_of(of_frame));
    require_room(request, frames.back());
  }
  std::vector<SentFrame> sent;
  {
    const nb::gil_scoped_release release;
    for (const ServerFrame& frame : frames) sent.push_back(phalanx::send_frame(request, terms, frame));
  }
  nb::list out;
  for (const SentFrame& frame : sent) {
    out.append(nb::make_tuple(frame.error, nb::bytes(frame.rest.data(), frame.rest.size()), frame.has_begun));
  }
  return out;
}

// (fd, buffer, its first and last byte that were read and not taken, seq, bytes of rows)
using DueFields = std::tuple<int, Bytes, std::size_t, std::size_t, std::uint64_t, std::uint64_t>;

DueReply due_of(const DueFields& fields) {
  const auto& [fd, buffer, start, end, seq, rows_bytes] = fields;
  if (start > end || end > buffer.size()) throw nb::value_error("what was read ahead lies outside of its buffer");
  DueReply due;
  due.fd = fd;
  due.ahead = {std::as_writable_bytes(view(buffer)), start, end};
  due.seq = seq;
  due.rows_bytes = rows_bytes;
  return due;
}

// Appends (state, start, end, errno, status, number, dropped, whether the rows are shared, where they lie) of each.
void receive_replies(const std::vector<DueFields>& fields, double patience_s, double hold_s, nb::list out) {
  std::vector<DueReply> replies;
  for (const DueFields& of_reply : fields) replies.push_back(due_of(of_reply));
  const auto ms = [](double seconds) {
    return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
  };
  bool has_news;
  {
    const nb::gil_scoped_release release;
    has_news = phalanx::receive_replies(replies, ms(patience_s), ms(hold_s));
  }
  for (const DueReply& reply : replies) {
    out.append(nb::make_tuple(static_cast<int>(reply.state), reply.ahead.start, reply.ahead.end, reply.error,
                              static_cast<int>(reply.head.status), reply.head.number, reply.head.dropped,
                              reply.is_shared, reply.rows_at));
  }
  if (!has_news && PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

void bind_client(nb::module_& module) {
  module.def("send_frames", &send_frames, nb::arg("request"), nb::arg("kind"), nb::arg("step"), nb::arg("weight"),
             nb::arg("keep"), nb::arg("frames"));
  module.def("receive_replies", &receive_replies, nb::arg("replies"), nb::arg("patience_s"), nb::arg("hold_s"),
             nb::arg("out"));
}
