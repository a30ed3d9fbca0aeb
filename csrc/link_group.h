// The links of a client to all servers, while nothing but whole pulls and pushes uses them: one number, one piece of
// memory and one place among the requests under way for each server's part, without an object of Python for it.
//
// Python lends the links and takes them back for whatever is out of the ordinary (ps/stores/fan_out.py).
//
// Ownership: sockets and buffers are the caller's; memory belongs to whoever has its RequestMemory. Thread-safety: one
// thread at a time, but for `send` and `receive_replies` of wire_client.h, which may run beside calls for other requests.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "partition.h"
#include "wire_client.h"
#include "wire_data.h"

namespace phalanx {

// Where a request's payload and its reply's rows lie.
struct RequestMemory {
  std::span<std::byte> bytes;
  std::uint64_t segment = 0;    // number of a shared segment; 0: memory of the client alone
  int descriptor = -1;          // of the segment, where the server does not have it yet
  std::shared_ptr<void> owner;  // frees it
};

// A server's part of a pull or push.
struct SentPart {
  int server = 0;
  std::uint64_t seq = 0, payload_bytes = 0, rows_bytes = 0;
  std::shared_ptr<RequestMemory> memory;  // until the reply has come, and while rows of it lie there

  bool has_reply = false;
  ReplyHead reply;
  std::span<std::byte> rows;

  bool needs_shared() const;
  std::uint64_t memory_bytes() const { return aligned(payload_bytes) + rows_bytes; }
};

// A pull or push on its way to all its servers.
class SentRequest {
 public:
  // The parts of these servers, in ascending order.
  SentRequest(const PartitionedRequest& request, std::span<const int> servers);

  std::vector<SentPart> parts;

  const SentPart& part_of(int server) const;  // REQUIRES: it has one
  std::vector<int> unanswered() const;  // servers of parts that were sent
  // Whether every server has done what was asked.
  bool is_done_by_all() const;
};

class LinkGroup {
 public:
  // A request under way on a link: a part, or one that Python remembers.
  struct Due {
    std::uint64_t seq = 0, rows_bytes = 0;
    std::shared_ptr<SentRequest> request;  // null for Python's
    std::size_t part = 0;
  };

  struct Link {
    int fd = -1;
    ReadAhead ahead;
    std::uint64_t client = 0, seq = 0;
    std::uint64_t room = 0;  // payload that may be on its way; one request alone may be larger
    std::deque<Due> due;
    std::uint64_t due_bytes = 0;
    bool has_answered = false;
    std::vector<std::shared_ptr<RequestMemory>> memory;  // lent by Python; free is what nobody else has

    bool has_room(std::uint64_t bytes) const { return due.empty() || due_bytes + bytes <= room; }
    std::shared_ptr<RequestMemory> free_memory(std::uint64_t bytes) const;
  };

  enum class Take { kTaken, kForPython, kBroken };

  std::vector<Link>& links() { return links_; }
  Link& link(int server) { return links_.at(static_cast<std::size_t>(server)); }

  bool has_room(const SentRequest& request);
  // (server, bytes) of the shared memory that parts lack.
  std::vector<std::pair<int, std::uint64_t>> lacking_memory(const SentRequest& request);
  // Numbers the parts, gives them memory, and expects their replies. REQUIRES: none lacks any.
  void begin(const std::shared_ptr<SentRequest>& request);
  ServerFrame frame_of(const SentPart& part);

  // The next reply due on each of these links that has one.
  std::vector<DueReply> due_on(std::span<const int> servers);
  // Gives a reply that arrived to its part. kBroken: it does not lie in the memory of the request.
  Take take(int server, const DueReply& reply);
  // From now on Python remembers all that is under way, and lends memory anew.
  void hand_over();

 private:
  std::vector<Link> links_;
};

}  // namespace phalanx
