// The server's side of a connection, as far as it answers pulls and pushes; everything else is for Python.
//
// Python's thread of a client calls `serve` without the GIL. It comes back when another frame than a pull or push is
// next, with that frame unread, and when the server stops.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "server_request.h"
#include "wire_data.h"
#include "wire_frame.h"
#include "wire_segments.h"
#include "wire_socket.h"

namespace phalanx {

// Bytes that all connections of a process may hold together. Thread-safety: any thread.
class MemoryBudget {
 public:
  explicit MemoryBudget(std::uint64_t limit) : limit_(limit) {}

  // Counts bytes in; waits until they fit, for at most so long. False if they do not.
  bool take(std::uint64_t count, std::chrono::milliseconds patience = {});
  void give(std::uint64_t count);

  std::uint64_t limit() const { return limit_; }
  std::uint64_t used() const;

 private:
  const std::uint64_t limit_;
  std::uint64_t used_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable given_;
};

// What the sessions of a server share.
struct ServerContext {
  // `handler`: answers pulls and pushes; null where there are no tables.
  ServerContext(DataHandler* handler, std::string name, std::uint64_t max_frame_bytes, MemoryBudget& budget)
      : handler(handler), name(std::move(name)), max_frame_bytes(max_frame_bytes), budget(budget) {}

  DataHandler* const handler;
  const std::string name;
  const std::uint64_t max_frame_bytes;
  MemoryBudget& budget;
  // How long a request waits for room in the budget. It must end: the room may be held by pushes that wait for this one.
  std::chrono::milliseconds patience = std::chrono::seconds(5);
  std::atomic<bool> is_stopping = false;  // whether no session begins another request
  std::function<void(const std::string&)> log_failure = [](const std::string&) {};
};

// Header kind and object of a reply.
struct Answer {
  FrameKind kind;
  std::string object;
};

// Answers a request whose arrays are in `payload`; the rows of a reply come from `caller`. `at`: where in the shared
// segment they lie. A failure of the handler is an answer too; throws ConnectionEnded alone.
Answer answer(ServerContext& context, const std::string& peer, DataFrame& frame, std::span<const std::byte> payload,
              Caller& caller, std::uint64_t at);

// Memory of a payload, which gets pages as bytes really come.
class PayloadMemory {
 public:
  PayloadMemory() = default;
  ~PayloadMemory() { clear(); }
  PayloadMemory(const PayloadMemory&) = delete;
  PayloadMemory& operator=(const PayloadMemory&) = delete;

  // Keeps what is there; the rest is not initialised. Throws std::bad_alloc.
  void grow(std::size_t size);
  void clear();
  std::span<std::byte> first(std::size_t size) const { return {data_, size}; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// What one request holds of the budget, until it is answered.
class BudgetShare {
 public:
  explicit BudgetShare(MemoryBudget& budget) : budget_(budget) {}
  ~BudgetShare() { budget_.give(count_); }
  BudgetShare(const BudgetShare&) = delete;
  BudgetShare& operator=(const BudgetShare&) = delete;

  // What never fits beside the rest of this request is not waited for.
  bool take(std::uint64_t count, std::chrono::milliseconds patience) {
    if (count > budget_.limit() - count_) return false;
    const bool fits = budget_.take(count, patience);
    count_ += fits ? count : 0;
    return fits;
  }

 private:
  MemoryBudget& budget_;
  std::uint64_t count_ = 0;
};

class DataSession {
 public:
  // REQUIRES: context and segments live as long as this.
  DataSession(ServerContext& context, AttachedSegments& segments, std::uint64_t client, std::string peer)
      : context_(context), segments_(segments), client_(client), peer_(std::move(peer)) {}

  // Answers pulls and pushes until another frame is next; false if the server stops.
  // Throws FrameError or ConnectionEnded if nothing can be read any more.
  bool serve(FrameSocket& socket);

 private:
  void serve_frame(FrameSocket& socket, const FrameHeader& header, DataFrame& frame);
  SharedMemory shared_memory(FrameSocket& socket, const FrameHeader& header, const DataFrame& frame);
  std::span<const std::byte> read_payload(FrameSocket& socket, const FrameHeader& header, BudgetShare& share);
  void discard(FrameSocket& socket, std::uint64_t count);
  void send(FrameSocket& socket, const FrameHeader& header, const Answer& answer,
            std::span<const std::span<const std::byte>> payload);

  ServerContext& context_;
  AttachedSegments& segments_;
  const std::uint64_t client_;
  const std::string peer_;
  std::vector<std::byte> object_;
  PayloadMemory payload_;  // kept for the next request while it is small
};

// The payload in chunks, each with its checksum, as parts to write; these point into `checksums`.
std::vector<std::span<const std::byte>> chunks(std::span<const std::span<const std::byte>> payload,
                                               std::deque<std::uint32_t>& checksums);

}  // namespace phalanx
