// Python's view of the wire's client end. No logic here: one call for the frames of all servers, one for their replies,
// and the locks of links, which are Python's.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_array.h"
#include "link_group.h"

namespace nb = nanobind;
using phalanx::DueReply;
using phalanx::LinkGroup;
using phalanx::PartitionedRequest;
using phalanx::RequestMemory;
using phalanx::RequestTerms;
using phalanx::SentFrame;
using phalanx::SentPart;
using phalanx::SentRequest;
using phalanx::ServerFrame;

namespace {

using Bytes = OutColumn<std::uint8_t>;
using Request = std::shared_ptr<SentRequest>;

// What Python keeps of each link, which lives as long as the group.
struct Group {
  LinkGroup group;
  std::vector<nb::object> buffers, writing;
};

// Keeps an object of Python alive. REQUIRES: whoever lets go of it last holds the GIL.
std::shared_ptr<void> kept(nb::object object) {
  return {object.release().ptr(), [](void* pointer) { Py_DECREF(static_cast<PyObject*>(pointer)); }};
}

nb::object array_in(std::span<std::byte> bytes, std::shared_ptr<RequestMemory> memory) {
  auto holder = std::make_unique<std::shared_ptr<RequestMemory>>(std::move(memory));
  nb::capsule owner(holder.get(), [](void* p) noexcept { delete static_cast<std::shared_ptr<RequestMemory>*>(p); });
  (void)holder.release();
  auto* data = reinterpret_cast<std::uint8_t*>(bytes.data());
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {bytes.size()}, owner));
}

void add_link(Group& self, int fd, Bytes buffer, std::size_t start, std::size_t end, std::uint64_t client,
              std::uint64_t seq, std::uint64_t room, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& due,
              nb::object writing) {
  if (start > end || end > buffer.size()) throw nb::value_error("what was read ahead lies outside of its buffer");
  LinkGroup::Link& link = self.group.links().emplace_back();
  link.fd = fd;
  link.ahead = {std::as_writable_bytes(view(buffer)), start, end};
  link.client = client;
  link.seq = seq;
  link.room = room;
  for (const auto& [of_request, rows_bytes] : due) link.due.push_back({of_request, rows_bytes, nullptr, 0});
  self.buffers.push_back(nb::cast(buffer));
  self.writing.push_back(std::move(writing));
}

void lend_memory(Group& self, int server, Bytes memory, std::uint64_t segment, int descriptor, nb::object owner) {
  self.group.link(server).memory.push_back(std::make_shared<RequestMemory>(
      RequestMemory{std::as_writable_bytes(view(memory)), segment, descriptor, kept(std::move(owner))}));
}

// The locks under which frames of these parts are written, as far as they could be had.
class WritingLocks {
 public:
  explicit WritingLocks(std::vector<nb::object>& of_links) : of_links_(of_links) {}
  WritingLocks(const WritingLocks&) = delete;
  WritingLocks& operator=(const WritingLocks&) = delete;

  bool take(const SentRequest& request) {
    for (const SentPart& part : request.parts) {
      if (!nb::cast<bool>(lock_of(part.server).attr("acquire")(false))) return false;
      taken_.push_back(part.server);
    }
    return true;
  }

  // Leaves a lock to the caller.
  void leave(int server) { std::erase(taken_, server); }

  ~WritingLocks() {
    for (const int server : taken_) lock_of(server).attr("release")();
  }

 private:
  nb::object& lock_of(int server) { return of_links_[static_cast<std::size_t>(server)]; }

  std::vector<nb::object>& of_links_;
  std::vector<int> taken_;
};

// Appends (server, errno, what was not written, whether any was) of each frame that is not out whole, whose link's lock
// is left to the caller, and the owners of memory that servers have now. False if a link has no room, or is written to.
// (server, bytes) of memory that parts lack go to `lacking`; nothing is sent then.
bool send_request(Group& self, const Request& sent, const PartitionedRequest& request, int kind, std::uint64_t step,
                  double weight, bool keep, nb::list lacking, nb::list incomplete, nb::list handed) {
  LinkGroup& group = self.group;
  const RequestTerms terms{static_cast<phalanx::FrameKind>(kind), step, weight, keep};
  if (!group.has_room(*sent)) return false;
  for (const auto& lack : group.lacking_memory(*sent)) lacking.append(nb::cast(lack));
  if (nb::len(lacking) != 0) return false;
  WritingLocks locks(self.writing);
  if (!locks.take(*sent)) return false;
  group.begin(sent);
  std::vector<ServerFrame> frames;
  for (const SentPart& part : sent->parts) frames.push_back(group.frame_of(part));
  std::vector<SentFrame> outcomes;
  {
    const nb::gil_scoped_release release;
    for (const ServerFrame& frame : frames) outcomes.push_back(phalanx::send_frame(request, terms, frame));
  }
  for (std::size_t i = 0; i < frames.size(); ++i) {
    const SentPart& part = sent->parts[i];
    const SentFrame& out = outcomes[i];
    if (part.memory && part.memory->descriptor >= 0 && out.error == 0 && out.has_begun) {
      part.memory->descriptor = -1;
      handed.append(nb::borrow(static_cast<PyObject*>(part.memory->owner.get())));
    }
    if (out.error == 0 && out.rest.empty()) continue;
    locks.leave(part.server);
    incomplete.append(nb::make_tuple(part.server, out.error, nb::bytes(out.rest.data(), out.rest.size()), out.has_begun));
  }
  return true;
}

// Appends what Python has to do: (server, errno) of a frame that is for it, (server, why) of a link that can be read no
// more, and (server, status, number, dropped, where the rows lie in shared memory or -1, else the rows) of a reply to a
// request that Python remembers.
void receive(Group& self, const std::vector<int>& servers, double patience_s, double hold_s, nb::list out) {
  for (const int server : servers) {
    if (self.group.link(server).due.empty()) throw nb::value_error("nothing is due from a server");
  }
  std::vector<DueReply> replies = self.group.due_on(servers);
  const auto ms = [](double seconds) {
    return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
  };
  bool has_news;
  {
    const nb::gil_scoped_release release;
    has_news = phalanx::receive_replies(replies, ms(patience_s), ms(hold_s));
  }
  for (std::size_t i = 0; i < servers.size(); ++i) {
    const DueReply& reply = replies[i];
    self.group.link(servers[i]).ahead = reply.ahead;
    if (reply.state == DueReply::State::kForPython) out.append(nb::make_tuple(servers[i], reply.error));
    if (reply.state != DueReply::State::kArrived) continue;
    const LinkGroup::Take taken = self.group.take(servers[i], reply);
    if (taken == LinkGroup::Take::kBroken) {
      out.append(nb::make_tuple(servers[i], "a reply lies in memory it does not have"));
    } else if (taken == LinkGroup::Take::kForPython) {
      const auto* rows = reinterpret_cast<const char*>(reply.ahead.buffer.data()) + (reply.is_shared ? 0 : reply.rows_at);
      const bool has_rows = !reply.is_shared && reply.head.status <= phalanx::DataStatus::kAgain;
      const auto at = reply.is_shared ? static_cast<std::int64_t>(reply.rows_at) : -1;
      out.append(nb::make_tuple(servers[i], static_cast<int>(reply.head.status), reply.head.number, reply.head.dropped, at,
                                nb::bytes(rows, has_rows ? reply.rows_bytes : 0)));
    }
  }
  if (!has_news && PyErr_CheckSignals() != 0) throw nb::python_error();
}

// (number, bytes of payload, memory of the request, its owner or None)
nb::object part_of(const SentRequest& sent, int server) {
  const SentPart& part = sent.part_of(server);
  const bool is_shared = part.memory->segment != 0;
  nb::object owner = nb::none();
  if (is_shared) owner = nb::borrow(static_cast<PyObject*>(part.memory->owner.get()));
  return nb::make_tuple(part.seq, part.payload_bytes, array_in(part.memory->bytes, part.memory), owner);
}

// (status, number, dropped, rows)
nb::object reply_of(const SentRequest& sent, int server) {
  const SentPart& part = sent.part_of(server);
  return nb::make_tuple(static_cast<int>(part.reply.status), part.reply.number, part.reply.dropped,
                        array_in(part.rows, part.memory));
}

void numbers(const SentRequest& sent, OutColumn<std::uint64_t> by_server) {
  for (const SentPart& part : sent.parts) {
    if (static_cast<std::size_t>(part.server) >= by_server.size()) throw nb::value_error("there is no place for a server");
    by_server.data()[part.server] = part.reply.number;
  }
}

}  // namespace

void bind_client(nb::module_& module) {
  nb::class_<SentRequest>(module, "SentRequest", "A pull or push on its way to all its servers; see csrc/link_group.h.")
      .def("__init__", [](SentRequest* at, const PartitionedRequest& request, const std::vector<int>& servers) {
             new (at) SentRequest(request, servers);
           }, nb::arg("request"), nb::arg("servers"))
      .def_prop_ro("size", [](const SentRequest& sent) { return sent.parts.size(); })
      .def("unanswered", &SentRequest::unanswered)
      .def("is_done_by_all", &SentRequest::is_done_by_all)
      .def("has_reply", [](const SentRequest& sent, int server) { return sent.part_of(server).has_reply; },
           nb::arg("server"))
      .def("part", &part_of, nb::arg("server"))
      .def("reply", &reply_of, nb::arg("server"))
      .def("numbers", &numbers, nb::arg("by_server").noconvert());

  nb::class_<Group>(module, "LinkGroup", "The links of a client to all servers, lent by Python; see csrc/link_group.h.")
      .def(nb::init<>())
      .def("add", &add_link, nb::arg("fd"), nb::arg("buffer").noconvert(), nb::arg("start"), nb::arg("end"),
           nb::arg("client"), nb::arg("seq"), nb::arg("room"), nb::arg("due"), nb::arg("writing"))
      .def("lend_memory", &lend_memory, nb::arg("server"), nb::arg("memory").noconvert(), nb::arg("segment"),
           nb::arg("descriptor"), nb::arg("owner"))
      .def("send", &send_request, nb::arg("sent"), nb::arg("request"), nb::arg("kind"), nb::arg("step"),
           nb::arg("weight"), nb::arg("keep"), nb::arg("lacking"), nb::arg("incomplete"), nb::arg("handed"))
      .def("receive", &receive, nb::arg("servers"), nb::arg("patience_s"), nb::arg("hold_s"), nb::arg("out"))
      .def("hand_over", [](Group& self) { self.group.hand_over(); })
      .def("state", [](Group& self, int server) {
             const LinkGroup::Link& link = self.group.link(server);
             return nb::make_tuple(link.seq, link.ahead.start, link.ahead.end, link.has_answered);
           }, nb::arg("server"));
}
