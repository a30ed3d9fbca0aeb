// Who may change a server now: any number of pushes beside each other, or one change of another kind; and freezes.
//
// Thread-safety: all methods may be called from any thread.

#pragma once

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
  // `clock` gives seconds and never goes back; `expired` is told the token of a freeze that its deadline ended.
  Gate(std::function<double()> clock, std::function<void(const std::string&)> expired);

  // A push begins and ends. It waits while a freeze keeps this step of its worker back.
  void enter(int worker, std::int64_t step);
  void leave();

  // Any other change: nothing else changes meanwhile.
  void enter_alone(int worker, std::int64_t step);
  void leave_alone();

  // Holds changes back for at most so many seconds, but those of each worker below its step in `steps`; renews a freeze
  // of the same token. A freeze ends by itself, so that a coordinator that died cannot stop training for good.
  // Throws Refusal while another snapshot holds them.
  void freeze(const std::string& token, double seconds, const std::vector<std::int64_t>& steps);
  void resume(const std::string& token);
  // Like `enter_alone`, inside the freeze of this token. Throws Refusal if it is over.
  void enter_frozen(const std::string& token);

 private:
  struct Freeze {
    std::string token;
    double until;
    std::vector<std::int64_t> steps;
  };
  using Lock = std::unique_lock<std::mutex>;

  bool is_frozen();
  bool is_held_back(int worker, std::int64_t step);
  void wait(Lock& locked);

  const std::function<double()> clock_;
  const std::function<void(const std::string&)> expired_;
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
  PushPermit(Gate& gate, int worker, std::int64_t step) : gate_(gate) { gate_.enter(worker, step); }
  PushPermit(const PushPermit&) = delete;
  ~PushPermit() { gate_.leave(); }

 private:
  Gate& gate_;
};

}  // namespace phalanx
