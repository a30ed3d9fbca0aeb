// Python's view of the wire's client end. No logic here: one call for the frames of all servers, one for their replies,
// and the attributes and locks of Python's that go with them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "client_link.h"

namespace nb = nanobind;
using phalanx::ClientLink;
using phalanx::DueReply;
using phalanx::PartitionedRequest;
using phalanx::ReadAhead;
using phalanx::RequestMemory;
using phalanx::RequestTerms;
using phalanx::SentFrame;
using phalanx::SentPart;
using phalanx::SentRequest;
using phalanx::ServerFrame;

namespace {

using Bytes = OutColumn<std::uint8_t>;
using Request = std::shared_ptr<SentRequest>;

// A link, and what Python has of it: the channel with what was read ahead, and the lock under which frames are written.
struct Link {
  ClientLink link;
  nb::object channel, writing;
  Bytes buffer;
};

// Keeps an object of Python alive. REQUIRES: whoever lets go of it last holds the GIL.
std::shared_ptr<void> shared(nb::handle object) {
  return {object.inc_ref().ptr(), [](void* pointer) { Py_DECREF(static_cast<PyObject*>(pointer)); }};
}

nb::object object_of(const std::shared_ptr<void>& owner) { return nb::borrow(static_cast<PyObject*>(owner.get())); }

nb::object array_in(std::span<std::byte> bytes, std::shared_ptr<RequestMemory> memory) {
  auto holder = std::make_unique<std::shared_ptr<RequestMemory>>(std::move(memory));
  nb::capsule owner(holder.get(), [](void* p) noexcept { delete static_cast<std::shared_ptr<RequestMemory>*>(p); });
  (void)holder.release();
  auto* data = reinterpret_cast<std::uint8_t*>(bytes.data());
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {bytes.size()}, owner));
}

void make_link(Link* at, nb::object channel, Bytes buffer, std::uint64_t client, std::uint64_t seq,
               std::uint64_t most_bytes, nb::object writing) {
  ClientLink link;
  link.fd = nb::cast<int>(channel.attr("fileno")());
  link.client = client;
  link.seq = seq;
  link.most_bytes = most_bytes;
  new (at) Link{std::move(link), std::move(channel), std::move(writing), std::move(buffer)};
}

ReadAhead read_ahead(const Link& self) {
  const auto start = nb::cast<std::size_t>(self.channel.attr("ahead_start"));
  const auto end = nb::cast<std::size_t>(self.channel.attr("ahead_end"));
  if (start > end || end > self.buffer.size()) throw nb::value_error("what was read ahead lies outside of its buffer");
  return {std::as_writable_bytes(view(self.buffer)), start, end};
}

void lend_memory(Link& self, Bytes memory, nb::object lease) {
  const nb::object segment = lease.attr("segment"), descriptor = segment.attr("descriptor");
  self.link.memory.push_back(std::make_shared<RequestMemory>(RequestMemory{
      std::as_writable_bytes(view(memory)), nb::cast<std::uint64_t>(segment.attr("number")),
      descriptor.is_none() ? -1 : nb::cast<int>(descriptor), shared(lease)}));
}

// (what Python knows of the request, server) of the first part under way, or None.
nb::object first_due(const Link& self) {
  if (self.link.due.empty()) return nb::none();
  const ClientLink::Due& due = self.link.due.front();
  return nb::make_tuple(object_of(due.owner), due.get().server);
}

// Appends what stands for the first part under way to Python's queue, unless that part was answered meanwhile. Both or
// neither, whatever signal comes.
bool hand_over(Link& self, nb::handle owner, nb::handle queue, nb::handle pending) {
  if (self.link.due.empty() || self.link.due.front().owner.get() != owner.ptr()) return false;
  queue.attr("append")(pending);
  self.link.hand_over();
  return true;
}

// The locks under which frames of these links are written, as far as they could be taken.
class WritingLocks {
 public:
  WritingLocks() = default;
  WritingLocks(const WritingLocks&) = delete;
  WritingLocks& operator=(const WritingLocks&) = delete;
  ~WritingLocks() {
    for (const nb::object& lock : taken_) {
      if (lock.is_valid()) lock.attr("release")();
    }
  }

  bool take(const Link& link) {
    if (!nb::cast<bool>(link.writing.attr("acquire")(false))) return false;
    taken_.push_back(link.writing);
    return true;
  }

  // Leaves the lock of one to the caller.
  nb::object leave(std::size_t index) { return std::exchange(taken_[index], nb::object()); }

 private:
  std::vector<nb::object> taken_;
};

// Frames that are not out whole, the shortest rest first, and the locks of their links.
class UnfinishedFrames {
 public:
  void add(int server, int fd, SentFrame frame, nb::object lock) {
    const auto behind = std::find_if(frames_.begin(), frames_.end(), [&](const Unfinished& other) {
      return other.frame.rest.size() > frame.rest.size();
    });
    frames_.insert(behind, {server, fd, std::move(frame), std::move(lock)});
  }

  // (server, errno, what was not written), or None
  nb::object first() const {
    if (frames_.empty()) return nb::none();
    const auto& [server, fd, frame, lock] = frames_.front();
    return nb::make_tuple(server, frame.error, nb::bytes(frame.rest.data(), frame.rest.size()));
  }

  void release_first() {
    const Unfinished first = std::move(frames_.front());
    frames_.pop_front();
    first.lock.attr("release")();
  }

  // Breaks the links of frames that nobody finishes: what follows would be read as the rest of them.
  void drop() {
    while (!frames_.empty()) {
      ::shutdown(frames_.front().fd, SHUT_RDWR);
      release_first();
    }
  }

 private:
  struct Unfinished {
    int server, fd;
    SentFrame frame;
    nb::object lock;
  };

  std::deque<Unfinished> frames_;
};

// The server has the memory's descriptor.
void forget_descriptor(RequestMemory& memory) {
  object_of(memory.owner).attr("segment").attr("descriptor") = nb::none();
  ::close(std::exchange(memory.descriptor, -1));
}

// Sends all parts, as far as sockets take them, or none and returns False: if a link has no room, or is written to, or
// memory lacks, of which (server, bytes) go to `lacking`.
bool send_parts(const Request& sent, nb::object owner, const PartitionedRequest& request, const std::vector<Link*>& links,
                int kind, std::uint64_t step, double weight, bool keep, nb::list lacking, UnfinishedFrames& unfinished) {
  const RequestTerms terms{static_cast<phalanx::FrameKind>(kind), step, weight, keep};
  WritingLocks locks;
  for (const SentPart& part : sent->parts) {
    Link& to = *links.at(static_cast<std::size_t>(part.server));
    if (part.state != SentPart::State::kUnsent) throw nb::value_error("the request was sent before");
    if (to.link.has_ended || !to.link.has_room(part.payload_bytes) || !locks.take(to)) return false;
    if (part.needs_shared() && !to.link.free_memory(part.memory_bytes())) {
      lacking.append(nb::make_tuple(part.server, part.memory_bytes()));
    }
  }
  if (nb::len(lacking) != 0) return false;
  const std::shared_ptr<void> kept = shared(owner);
  std::vector<ServerFrame> frames;
  frames.reserve(sent->parts.size());
  for (std::size_t i = 0; i < sent->parts.size(); ++i) {
    ClientLink& to = links[static_cast<std::size_t>(sent->parts[i].server)]->link;
    if (to.is_reading) to.has_waiter = true;  // else Python's thread might read this link from now on
    to.begin(sent, i, kept);
    frames.push_back(to.frame_of(sent->parts[i]));
  }
  std::vector<SentFrame> outcomes;
  outcomes.reserve(frames.size());
  {
    const nb::gil_scoped_release release;
    for (const ServerFrame& frame : frames) outcomes.push_back(phalanx::send_frame(request, terms, frame));
  }
  for (std::size_t i = 0; i < frames.size(); ++i) {
    SentFrame& out = outcomes[i];
    if (frames[i].descriptor >= 0 && out.has_begun) forget_descriptor(*sent->parts[i].memory);
    if (out.error == 0 && out.rest.empty()) continue;
    unfinished.add(frames[i].server, frames[i].fd, std::move(out), locks.leave(i));
  }
  return true;
}

// Replies of several servers as they are read.
class Reading {
 public:
  // Takes the turn to read on each link that has a part of the request under way and that nobody reads. False if none.
  bool begin(const SentRequest& sent, const nb::list& links) {
    turns_.reserve(sent.parts.size());
    replies_.reserve(sent.parts.size());
    for (const SentPart& part : sent.parts) {
      if (part.state != SentPart::State::kUnderWay) continue;
      nb::object object = links[static_cast<std::size_t>(part.server)];
      Link& from = nb::cast<Link&>(object);
      if (from.link.is_reading || from.link.has_ended || from.link.due.empty()) continue;
      replies_.push_back(from.link.next_reply(read_ahead(from)));
      turns_.emplace_back(part.server, std::move(object));
      from.link.is_reading = from.link.was_read = true;
    }
    return !turns_.empty();
  }

  void receive(double patience_s, double hold_s) {
    const auto ms = [](double seconds) {
      return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
    };
    bool has_news;
    {
      const nb::gil_scoped_release release;
      has_news = phalanx::receive_replies(replies_, ms(patience_s), ms(hold_s));
    }
    if (!has_news && PyErr_CheckSignals() != 0) throw nb::python_error();
  }

  // Gives replies to their requests and ends the turns. Appends the servers for whose links somebody waits, and those
  // whose next frame is for Python.
  void end(nb::list waited, nb::list for_python) {
    while (!turns_.empty()) {
      const auto [server, object] = turns_.back();
      Link& from = nb::cast<Link&>(object);
      DueReply& reply = replies_.back();
      const bool is_taken = reply.state == DueReply::State::kArrived && from.link.take(reply);
      if (is_taken) reply.state = DueReply::State::kDue;  // or `end_last` would put it back
      if (reply.state != DueReply::State::kDue) for_python.append(server);
      if (std::exchange(from.link.has_waiter, false)) waited.append(server);
      end_last();
    }
  }

  // Ends the turns that are left; what arrived can be read again.
  void drop() {
    while (!turns_.empty()) end_last();
  }

 private:
  void end_last() {
    const nb::object object = std::move(turns_.back().second);
    DueReply reply = replies_.back();
    turns_.pop_back();
    replies_.pop_back();
    if (reply.state == DueReply::State::kArrived) reply.ahead.start -= reply.length;
    Link& from = nb::cast<Link&>(object);
    from.channel.attr("ahead_start") = reply.ahead.start;
    from.channel.attr("ahead_end") = reply.ahead.end;
    from.link.is_reading = false;
  }

  std::vector<std::pair<int, nb::object>> turns_;
  std::vector<DueReply> replies_;  // of the same links
};

// (number, payload, its lease or None)
nb::object part_of(const SentRequest& sent, int server) {
  const SentPart& part = sent.part_of(server);
  if (part.state != SentPart::State::kUnderWay) throw nb::value_error("the part is not under way");
  nb::object lease = part.memory->segment == 0 ? nb::none() : object_of(part.memory->owner);
  return nb::make_tuple(part.seq, array_in(part.memory->bytes.first(part.payload_bytes), part.memory), lease);
}

nb::object rows_of(const SentRequest& sent, int server) {
  const SentPart& part = sent.part_of(server);
  if (part.state != SentPart::State::kAnswered) throw nb::value_error("the part is not answered");
  return array_in(part.rows, part.memory);
}

// (status, number, dropped, rows), or None
nb::object reply_of(const SentRequest& sent, int server) {
  const SentPart& part = sent.part_of(server);
  if (part.state != SentPart::State::kAnswered) return nb::none();
  return nb::make_tuple(static_cast<int>(part.reply.status), part.reply.number, part.reply.dropped,
                        rows_of(sent, server));
}

void numbers(const SentRequest& sent, OutColumn<std::uint64_t> by_server) {
  for (const SentPart& part : sent.parts) {
    if (static_cast<std::size_t>(part.server) >= by_server.size()) throw nb::value_error("there is no place for a server");
    by_server.data()[part.server] = part.reply.number;
  }
}

}  // namespace

void bind_client(nb::module_& module) {
  nb::class_<SentRequest>(module, "SentRequest", "A pull or push on its way to all its servers; see csrc/client_link.h.")
      .def("__init__", [](SentRequest* at, const PartitionedRequest& request, const std::vector<int>& servers) {
             new (at) SentRequest(request, servers);
           }, nb::arg("request"), nb::arg("servers"))
      .def_prop_ro("size", [](const SentRequest& sent) { return sent.parts.size(); })
      .def("is_done_by_all", &SentRequest::is_done_by_all)
      .def("part", &part_of, nb::arg("server"))
      .def("reply", &reply_of, nb::arg("server"))
      .def("rows", &rows_of, nb::arg("server"))
      .def("numbers", &numbers, nb::arg("by_server").noconvert());

  nb::class_<Link>(module, "ClientLink", "A client's socket to one server; see csrc/client_link.h.")
      .def("__init__", &make_link, nb::arg("channel"), nb::arg("buffer").noconvert(), nb::arg("client"), nb::arg("seq"),
           nb::arg("most_bytes"), nb::arg("writing"))
      .def("lend_memory", &lend_memory, nb::arg("memory").noconvert(), nb::arg("lease"))
      .def("first_due", &first_due)
      .def("hand_over", &hand_over, nb::arg("owner"), nb::arg("queue"), nb::arg("pending"))
      .def_prop_rw("seq", [](const Link& self) { return self.link.seq; },
                   [](Link& self, std::uint64_t seq) { self.link.seq = seq; })
      .def_prop_rw("is_reading", [](const Link& self) { return self.link.is_reading; },
                   [](Link& self, bool value) { self.link.is_reading = value; })
      .def_prop_rw("was_read", [](const Link& self) { return self.link.was_read; },
                   [](Link& self, bool value) { self.link.was_read = value; })
      .def_prop_rw("has_waiter", [](const Link& self) { return self.link.has_waiter; },
                   [](Link& self, bool value) { self.link.has_waiter = value; })
      .def_prop_rw("has_ended", [](const Link& self) { return self.link.has_ended; },
                   [](Link& self, bool value) { self.link.has_ended = value; })
      .def_prop_rw("has_answered", [](const Link& self) { return self.link.has_answered; },
                   [](Link& self, bool value) { self.link.has_answered = value; });

  nb::class_<Reading>(module, "Reading", "Replies of several servers as they are read; see csrc/bind_client.cc.")
      .def(nb::init<>())
      .def("begin", &Reading::begin, nb::arg("sent"), nb::arg("links"))
      .def("receive", &Reading::receive, nb::arg("patience_s"), nb::arg("hold_s"))
      .def("end", &Reading::end, nb::arg("waited"), nb::arg("for_python"))
      .def("drop", &Reading::drop);

  nb::class_<UnfinishedFrames>(module, "UnfinishedFrames", "Frames that are not out whole; see csrc/bind_client.cc.")
      .def(nb::init<>())
      .def("first", &UnfinishedFrames::first)
      .def("release_first", &UnfinishedFrames::release_first)
      .def("drop", &UnfinishedFrames::drop);

  module.def("send_parts", &send_parts, nb::arg("sent"), nb::arg("owner"), nb::arg("request"), nb::arg("links"),
             nb::arg("kind"), nb::arg("step"), nb::arg("weight"), nb::arg("keep"), nb::arg("lacking"),
             nb::arg("unfinished"));
}
