// What a server's engine has answered so far, and what it is at: for those who watch the server.
//
// Thread-safety: any thread adds and reads; a reader may see a request in one count and not yet in another.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace phalanx {

class StopWatch {
 public:
  std::uint64_t nanoseconds() const {
    const auto passed = std::chrono::steady_clock::now() - start_;
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count());
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Of pulls, or of pushes.
struct KindCounts {
  std::atomic<std::uint64_t> requests = 0;
  std::atomic<std::uint64_t> keys = 0;
  std::atomic<std::uint64_t> nanoseconds = 0;  // from the whole request to the whole answer, waits for workers included
};

struct ServerCounts {
  KindCounts pulls;
  KindCounts pushes;
  std::atomic<std::uint64_t> waited_nanoseconds = 0;  // for other workers, a save, or a place in the order
  std::atomic<std::int64_t> active = 0;               // requests under way
  std::atomic<std::int64_t> waiting = 0;              // those of them that wait
};

// Counts one request from here to the end of the block.
class RequestScope {
 public:
  RequestScope(ServerCounts& counts, KindCounts& kind, std::uint64_t keys) : counts_(counts), kind_(kind), keys_(keys) {
    ++counts_.active;
  }
  RequestScope(const RequestScope&) = delete;
  ~RequestScope() {
    --counts_.active;
    ++kind_.requests;
    kind_.keys += keys_;
    kind_.nanoseconds += watch_.nanoseconds();
  }

 private:
  ServerCounts& counts_;
  KindCounts& kind_;
  const std::uint64_t keys_;
  const StopWatch watch_;
};

// Counts a wait from here to the end of the block.
class WaitScope {
 public:
  explicit WaitScope(ServerCounts& counts) : counts_(counts) { ++counts_.waiting; }
  WaitScope(const WaitScope&) = delete;
  ~WaitScope() {
    --counts_.waiting;
    counts_.waited_nanoseconds += watch_.nanoseconds();
  }

 private:
  ServerCounts& counts_;
  const StopWatch watch_;
};

}  // namespace phalanx
