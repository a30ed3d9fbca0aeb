#include "server_gate.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace phalanx {

Gate::Gate(std::function<double()> clock, std::function<void(const std::string&)> expired, double report_s)
    : clock_(std::move(clock)), expired_(std::move(expired)), report_s_(report_s) {}

void Gate::enter(int worker, std::int64_t step, const WaitReport& report) {
  Lock locked(lock_);
  for (Clock::time_point reported = Clock::now();;) {
    const bool is_late = is_held_back(worker, step);
    if (!is_late && !is_taken_ && alone_waiting_ == 0) break;
    if (is_late) wait_late(locked, report, reported);
    else wait(locked);
  }
  ++pushes_;
}

void Gate::leave() {
  const std::lock_guard locked(lock_);
  if (--pushes_ == 0) changed_.notify_all();
}

void Gate::enter_alone(int worker, std::int64_t step, const WaitReport& report) {
  Lock locked(lock_);
  Clock::time_point reported = Clock::now();
  for (bool kept_out = false;;) {
    const bool is_late = is_held_back(worker, step);
    if (!is_late && !is_taken_ && pushes_ == 0) break;
    // One that a freeze keeps back keeps nobody out: a push that the freeze lets through may end it.
    if (is_late && kept_out) changed_.notify_all();
    kept_out = !is_late;
    if (is_late) {
      wait_late(locked, report, reported);
      continue;
    }
    ++alone_waiting_;
    wait(locked);
    --alone_waiting_;
  }
  is_taken_ = true;
}

void Gate::leave_alone() {
  const std::lock_guard locked(lock_);
  is_taken_ = false;
  changed_.notify_all();
}

void Gate::freeze(const std::string& token, double seconds, const std::vector<std::int64_t>& steps,
                  const std::string& holder) {
  Lock locked(lock_);
  if (is_frozen() && freeze_->token != token) {
    throw Refusal("ConfigError", "Asked for a snapshot while snapshot " + freeze_->token +
                                     " begins. Save from one worker at a time.");
  }
  freeze_ = Freeze{token, clock_() + seconds, steps, holder};
  changed_.notify_all();
  changed_.wait(locked, [&] { return !is_taken_ && pushes_ == 0; });
}

void Gate::resume(const std::string& token) {
  const std::lock_guard locked(lock_);
  if (!freeze_ || freeze_->token != token) return;
  freeze_.reset();
  changed_.notify_all();
}

void Gate::enter_frozen(const std::string& token) {
  Lock locked(lock_);
  ++alone_waiting_;
  changed_.wait(locked, [&] { return !is_taken_ && pushes_ == 0; });
  --alone_waiting_;
  if (!is_frozen() || freeze_->token != token) {
    changed_.notify_all();
    throw Refusal("BackendError", "The moment of snapshot " + token +
                                      " is over: training was let go at its deadline, or this server was started again "
                                      "since. Save again; if it comes back, a server takes too long to answer.");
  }
  is_taken_ = true;
}

bool Gate::is_frozen() {
  if (freeze_ && clock_() >= freeze_->until) {
    expired_(freeze_->token);
    freeze_.reset();
    changed_.notify_all();
  }
  return freeze_.has_value();
}

bool Gate::is_held_back(int worker, std::int64_t step) {
  if (!is_frozen()) return false;
  const std::vector<std::int64_t>& steps = freeze_->steps;
  return worker < 0 || static_cast<std::size_t>(worker) >= steps.size() ||
         step >= steps[static_cast<std::size_t>(worker)];
}

bool Gate::holds_back(int worker, std::int64_t step) {
  const std::lock_guard locked(lock_);
  return is_held_back(worker, step);
}

void Gate::wait(Lock& locked) {
  if (!freeze_) return changed_.wait(locked);
  const std::chrono::duration<double> left(std::max(0.0, freeze_->until - clock_()));
  changed_.wait_for(locked, left);
}

// REQUIRES: a freeze keeps the caller back, and nobody waits for it: `report` may throw.
void Gate::wait_late(Lock& locked, const WaitReport& report, Clock::time_point& reported) {
  if (!report) return wait(locked);
  using Seconds = std::chrono::duration<double>;
  const Seconds left(std::max(0.0, freeze_->until - clock_())), silent = Clock::now() - reported;
  changed_.wait_for(locked, std::min<Seconds>(left, report_s_ - silent));
  if (!freeze_ || Clock::now() - reported < report_s_) return;
  const std::string holder = freeze_->holder;
  locked.unlock();
  report(holder, true);
  locked.lock();
  reported = Clock::now();
}

}  // namespace phalanx
