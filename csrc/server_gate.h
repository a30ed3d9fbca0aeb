// Who may change a server now: any number of pushes beside each other, or one change of another kind; and freezes.
//
// Thread-safety: all methods may be called from any thread.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server_request.h"

namespace phalanx {

class Gate {
 public:
  // `clock` gives seconds and never goes back; `expired` is told the token of a freeze that its deadline ended. Whoever
  // a freeze keeps back is told so every `report_s` seconds: the server is not silent meanwhile.
  Gate(std::function<double()> clock, std::function<void(const std::string&)> expired, double report_s);

  // A push begins and ends. It waits while a freeze keeps this step of its worker back.
  void enter(int worker, std::int64_t step, const WaitReport& report = {});
  void leave();

  // Any other change: nothing else changes meanwhile.
  void enter_alone(int worker, std::int64_t step, const WaitReport& report = {});
  void leave_alone();

  bool holds_back(int worker, std::int64_t step);  // whether a freeze does now

  // Holds changes back for at most so many seconds, but those of each worker below its step in `steps`; renews a freeze
  // of the same token. A freeze ends by itself, so that a coordinator that died cannot stop training for good.
  // `holder` is whom those that it keeps back wait for, in words. Throws Refusal while another snapshot holds them.
  void freeze(const std::string& token, double seconds, const std::vector<std::int64_t>& steps,
              const std::string& holder = "a snapshot that begins");
  void resume(const std::string& token);
  // Like `enter_alone`, inside the freeze of this token. Throws Refusal if it is over.
  void enter_frozen(const std::string& token);

 private:
  struct Freeze {
    std::string token;
    double until;
    std::vector<std::int64_t> steps;
    std::string holder;
  };
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  bool is_frozen();
  bool is_held_back(int worker, std::int64_t step);
  void wait(Lock& locked);
  void wait_late(Lock& locked, const WaitReport& report, Clock::time_point& reported);

  const std::function<double()> clock_;
  const std::function<void(const std::string&)> expired_;
  const std::chrono::duration<double> report_s_;
  std::mutex lock_;
  std::condition_variable changed_;
  int pushes_ = 0;           // under way
  bool is_taken_ = false;    // by another change
  int alone_waiting_ = 0;    // other changes that wait for pushes to end, which keep new ones out
  std::optional<Freeze> freeze_;
};

// A push that is let in for as long as this lives.
class PushPermit {
 public:
  PushPermit(Gate& gate, int worker, std::int64_t step, const WaitReport& report = {}) : gate_(gate) {
    gate_.enter(worker, step, report);
  }
  PushPermit(const PushPermit&) = delete;
  ~PushPermit() { gate_.leave(); }

 private:
  Gate& gate_;
};

}  // namespace phalanx
