// The pushes of each worker of a job, and who waits for whose: sync, async and bounded training as rules about counts.
//
// Thread-safety: all methods may be called from any thread. A wait ends when the counts it waits for come, when a worker
// is lost, or when the server stops; what happens wakes those alone whose wait it can end.
// A worker that is none of the job's is a std::out_of_range.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server_request.h"

namespace phalanx {

enum class ServerMode { kNone, kSync, kAsync, kBounded };

struct ClockCounts {
  ServerMode mode = ServerMode::kNone;
  std::int64_t bound = 0;
  std::int64_t version = 0;  // steps of mode sync that are in the tables
  std::vector<std::int64_t> pushed;
  std::vector<bool> live;
};

class Clocks {
 public:
  // A worker is live from the start until it leaves, so nobody runs ahead of one that has not come yet.
  Clocks(ClockCounts counts, double report_s);

  void set_mode(ServerMode mode, std::int64_t bound);
  void push(int worker);
  void take_back(int worker);  // its newest push counts no more; nobody has read rows with it
  void apply(std::int64_t version);
  void join(int worker);
  void leave(int worker);
  void connect(int worker);
  void disconnect(int worker, double now);
  std::vector<int> expire(double now, double grace_s);
  void lose_missing(double waited_s, double now);
  void stop();

  ClockCounts counts() const;
  ServerMode mode() const;
  std::int64_t version() const;
  std::int64_t next_step(int worker) const;
  std::int64_t complete() const;  // steps that every live worker has pushed
  std::vector<int> missing() const;
  std::vector<int> disconnected() const;

  void check() const;  // throws Refusal when a worker is lost or the server stops; so do all waits
  void wait(std::int64_t step, const WaitReport& report);       // until rows for this step may be read
  void wait_turn(std::int64_t step, const WaitReport& report);  // until a push of this step may be taken
  // Until each worker has pushed so many or has left; returns the workers that have not after these seconds.
  std::vector<int> wait_steps(const std::vector<std::int64_t>& steps, double seconds);

 private:
  using Clock = std::chrono::steady_clock;
  using Waiters = std::multimap<std::int64_t, std::condition_variable*>;  // by the count that ends their wait

  void wait_for(Waiters& waiters, std::int64_t needed, const WaitReport& report);
  bool has_come(const Waiters& waiters, std::int64_t needed) const;
  std::string behind(std::int64_t needed, bool& is_connected) const;
  std::int64_t complete_now() const;
  std::vector<int> missing_now() const;
  std::vector<int> behind_steps(const std::vector<std::int64_t>& steps) const;
  void advance();
  void fail(const std::string& error, const std::string& message);
  static void wake(const Waiters& waiters, std::int64_t count);
  void raise_error() const;

  mutable std::mutex lock_;
  ClockCounts counts_;
  const std::chrono::duration<double> report_s_;
  std::vector<bool> connected_;
  std::vector<std::optional<double>> disconnected_at_;
  std::optional<Refusal> error_;
  Waiters for_version_;
  Waiters for_complete_;
  std::condition_variable stepped_;  // of those who save
  int savers_ = 0;
};

}  // namespace phalanx
