// A client's socket to one server, as native code and Python share it: the number of the newest request, the pulls and
// pushes of native code under way, and whether anybody reads.
//
// At any time either native code or Python has all requests under way on a link. Python takes those of native code over
// whenever it has to know them (ps/wire/client/link.py), and native code sends when Python has none.
//
// Ownership: sockets and buffers are the caller's; memory belongs to whoever has its RequestMemory. Thread-safety: calls
// are made under the lock of the client's connections; `send_frame` and `receive_replies` of wire_client.h need no lock.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
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
  enum class State { kUnsent, kUnderWay, kAnswered, kTakenOver };

  int server = 0;
  std::uint64_t seq = 0, payload_bytes = 0, rows_bytes = 0;
  std::shared_ptr<RequestMemory> memory;  // while it is under way, and while rows of the reply lie there

  State state = State::kUnsent;
  ReplyHead reply;  // once it is answered, and so are the rows
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

  // Throws std::out_of_range if the server has none.
  const SentPart& part_of(int server) const;

  // Whether every server has done what was asked.
  bool is_done_by_all() const;
};

struct ClientLink {
  // A part under way.
  struct Due {
    std::shared_ptr<SentRequest> request;
    std::size_t part = 0;
    std::shared_ptr<void> owner;  // what Python knows of the request

    SentPart& get() const { return request->parts[part]; }
  };

  int fd = -1;
  std::uint64_t client = 0, seq = 0;
  std::uint64_t most_bytes = 0;  // payload that may be on its way; one request alone may be larger
  std::uint64_t due_bytes = 0;
  std::deque<Due> due;
  std::vector<std::shared_ptr<RequestMemory>> memory;  // lent by Python; free is what nobody else has

  bool is_reading = false;    // somebody takes frames off the socket
  bool was_read = false;      // so it was, since Python's thread looked last
  bool has_waiter = false;    // somebody wants to know when that ends
  bool has_ended = false;     // the socket can be read no more
  bool has_answered = false;  // the answer to any request came

  bool has_room(std::uint64_t bytes) const { return due.empty() || due_bytes + bytes <= most_bytes; }
  std::shared_ptr<RequestMemory> free_memory(std::uint64_t bytes) const;

  // Numbers a part, gives it memory and expects its reply. REQUIRES: shared memory that it needs is free.
  void begin(const std::shared_ptr<SentRequest>& request, std::size_t part, std::shared_ptr<void> owner);
  ServerFrame frame_of(const SentPart& part) const;

  // The reply to the first part under way, which `ahead` may have. REQUIRES: there is one.
  DueReply next_reply(const ReadAhead& ahead) const;

  // Gives a reply that arrived to the first part under way. False if it is not for that, or lies in other memory.
  bool take(const DueReply& reply);

  // From now on Python has the first part under way, and lends memory anew.
  void hand_over();
};

}  // namespace phalanx
