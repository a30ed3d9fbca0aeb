#include "server_clocks.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

namespace phalanx {
namespace {

std::size_t place(int worker) { return static_cast<std::size_t>(worker); }

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

std::string short_number(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", number);
  return text;
}

}  // namespace

Clocks::Clocks(ClockCounts counts, double report_s)
    : counts_(std::move(counts)), report_s_(report_s), connected_(counts_.pushed.size(), false),
      disconnected_at_(counts_.pushed.size()) {}

// --- what happened ---------------------------------------------------------------------------------------------------

void Clocks::set_mode(ServerMode mode, std::int64_t bound) {
  const std::lock_guard locked(lock_);
  counts_.mode = mode;
  counts_.bound = bound;
}

void Clocks::push(int worker) {
  const std::lock_guard locked(lock_);
  ++counts_.pushed.at(place(worker));
  advance();
}

void Clocks::take_back(int worker) {
  const std::lock_guard locked(lock_);
  --counts_.pushed.at(place(worker));
}

void Clocks::apply(std::int64_t version) {
  const std::lock_guard locked(lock_);
  counts_.version = version;
  wake(for_version_, version);
}

// A worker that had left is live again; in mode sync it continues with the current step, in mode bounded beside the
// slowest: nobody waits for steps that were made while it was away.
void Clocks::join(int worker) {
  const std::lock_guard locked(lock_);
  disconnected_at_.at(place(worker)).reset();
  if (counts_.live.at(place(worker))) return;
  std::int64_t& pushed = counts_.pushed.at(place(worker));
  if (counts_.mode == ServerMode::kSync) pushed = std::max(pushed, counts_.version);
  if (counts_.mode == ServerMode::kBounded) pushed = std::max(pushed, complete_now());
  counts_.live.at(place(worker)) = true;
  advance();
}

void Clocks::leave(int worker) {
  const std::lock_guard locked(lock_);
  counts_.live.at(place(worker)) = false;
  disconnected_at_.at(place(worker)).reset();
  advance();
}

void Clocks::connect(int worker) {
  const std::lock_guard locked(lock_);
  connected_.at(place(worker)) = true;
  disconnected_at_.at(place(worker)).reset();
}

void Clocks::disconnect(int worker, double now) {
  const std::lock_guard locked(lock_);
  connected_.at(place(worker)) = false;
  std::optional<double>& since = disconnected_at_.at(place(worker));
  if (counts_.live.at(place(worker)) && !since) since = now;
}

std::vector<int> Clocks::expire(double now, double grace_s) {
  const std::lock_guard locked(lock_);
  std::vector<int> lost;
  std::vector<std::string> names;
  for (int worker = 0; place(worker) < disconnected_at_.size(); ++worker) {
    const std::optional<double>& since = disconnected_at_.at(place(worker));
    if (!since || now - *since < grace_s) continue;
    lost.push_back(worker);
    names.push_back("worker " + std::to_string(worker) + " (at step " +
                    std::to_string(counts_.pushed.at(place(worker))) + ")");
  }
  if (!lost.empty()) {
    fail("PeerLostError", "Training needs every worker until it leaves, but lost " + joined(names) +
                              ": the connection closed without a `leave`. Read that worker's log for why; a script "
                              "ends with fleet.stop_worker().");
  }
  return lost;
}

void Clocks::lose_missing(double waited_s, double now) {
  const std::lock_guard locked(lock_);
  std::vector<std::string> names;
  for (const int worker : missing_now()) {
    disconnected_at_.at(place(worker)) = now;
    names.push_back("worker " + std::to_string(worker));
  }
  fail("PeerLostError", "Training needs every worker until it leaves, and " + joined(names) + " did not come in the " +
                            short_number(waited_s) +
                            " s since the last that came. Read that worker's log for why; if it needs longer to come "
                            "to its first table, set PHALANX_COLLECTIVE_TIMEOUT_S for the servers.");
}

void Clocks::stop() {
  const std::lock_guard locked(lock_);
  fail("ClosedError", "This server is stopping. Start the job again to continue.");
}

// --- questions -------------------------------------------------------------------------------------------------------

ClockCounts Clocks::counts() const {
  const std::lock_guard locked(lock_);
  return counts_;
}

ServerMode Clocks::mode() const {
  const std::lock_guard locked(lock_);
  return counts_.mode;
}

std::int64_t Clocks::version() const {
  const std::lock_guard locked(lock_);
  return counts_.version;
}

std::int64_t Clocks::next_step(int worker) const {
  const std::lock_guard locked(lock_);
  return counts_.pushed.at(place(worker));
}

std::int64_t Clocks::complete() const {
  const std::lock_guard locked(lock_);
  return complete_now();
}

std::vector<int> Clocks::missing() const {
  const std::lock_guard locked(lock_);
  return missing_now();
}

std::vector<int> Clocks::disconnected() const {
  const std::lock_guard locked(lock_);
  std::vector<int> gone;
  for (int worker = 0; place(worker) < disconnected_at_.size(); ++worker)
    if (disconnected_at_.at(place(worker))) gone.push_back(worker);
  return gone;
}

// --- waits -----------------------------------------------------------------------------------------------------------

void Clocks::check() const {
  const std::lock_guard locked(lock_);
  raise_error();
}

void Clocks::wait(std::int64_t step, const WaitReport& report) {
  const ClockCounts now = [&] {
    const std::lock_guard locked(lock_);
    raise_error();
    return ClockCounts{counts_.mode, counts_.bound, 0, {}, {}};
  }();
  if (now.mode == ServerMode::kSync) wait_for(for_version_, step, report);
  if (now.mode == ServerMode::kBounded) wait_for(for_complete_, step - now.bound, report);
}

void Clocks::wait_turn(std::int64_t step, const WaitReport& report) {
  {
    const std::lock_guard locked(lock_);
    raise_error();
    if (counts_.mode != ServerMode::kSync) return;
  }
  wait_for(for_version_, step, report);
}

std::vector<int> Clocks::wait_steps(const std::vector<std::int64_t>& steps, double seconds) {
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::unique_lock locked(lock_);
  ++savers_;
  stepped_.wait_until(locked, until, [&] { return error_ || behind_steps(steps).empty(); });
  --savers_;
  raise_error();
  return behind_steps(steps);
}

// --- inside ----------------------------------------------------------------------------------------------------------

void Clocks::wait_for(Waiters& waiters, std::int64_t needed, const WaitReport& report) {
  std::unique_lock locked(lock_);
  std::condition_variable come;
  while (!has_come(waiters, needed)) {
    raise_error();
    const auto entry = waiters.emplace(needed, &come);
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(report_s_);
    const bool is_over = come.wait_until(locked, until, [&] { return error_ || has_come(waiters, needed); });
    waiters.erase(entry);
    if (is_over) continue;
    bool is_connected = true;
    const std::string names = behind(needed, is_connected);
    locked.unlock();
    report(names, is_connected);
    locked.lock();
  }
  raise_error();
}

bool Clocks::has_come(const Waiters& waiters, std::int64_t needed) const {
  return (&waiters == &for_version_ ? counts_.version : complete_now()) >= needed;
}

std::string Clocks::behind(std::int64_t needed, bool& is_connected) const {
  std::vector<std::string> names;
  for (int worker = 0; place(worker) < counts_.pushed.size(); ++worker) {
    if (!counts_.live.at(place(worker)) || counts_.pushed.at(place(worker)) >= needed) continue;
    const char* const gone = connected_.at(place(worker)) ? "" : ", not connected";
    is_connected = is_connected && connected_.at(place(worker));
    names.push_back("worker " + std::to_string(worker) + " (at step " +
                    std::to_string(counts_.pushed.at(place(worker))) + gone + ")");
  }
  return joined(names);
}

// With no live worker, the steps that any worker has pushed.
std::int64_t Clocks::complete_now() const {
  std::int64_t least = std::numeric_limits<std::int64_t>::max(), most = 0;
  bool is_any_live = false;
  for (std::size_t worker = 0; worker < counts_.pushed.size(); ++worker) {
    most = std::max(most, counts_.pushed[worker]);
    if (!counts_.live[worker]) continue;
    least = std::min(least, counts_.pushed[worker]);
    is_any_live = true;
  }
  return is_any_live ? least : most;
}

std::vector<int> Clocks::missing_now() const {
  std::vector<int> absent;
  for (int worker = 0; place(worker) < counts_.pushed.size(); ++worker)
    if (counts_.live[place(worker)] && !connected_[place(worker)] && !disconnected_at_[place(worker)])
      absent.push_back(worker);
  return absent;
}

std::vector<int> Clocks::behind_steps(const std::vector<std::int64_t>& steps) const {
  std::vector<int> late;
  for (int worker = 0; place(worker) < std::min(steps.size(), counts_.pushed.size()); ++worker)
    if (counts_.live[place(worker)] && counts_.pushed[place(worker)] < steps[place(worker)]) late.push_back(worker);
  return late;
}

// REQUIRES: lock_ is held, and the steps that are complete may have become more.
void Clocks::advance() {
  if (!for_complete_.empty()) wake(for_complete_, complete_now());
  if (savers_ > 0) stepped_.notify_all();
}

void Clocks::fail(const std::string& error, const std::string& message) {
  if (error_) return;
  error_.emplace(error, message);
  for (const Waiters* const waiters : {&for_version_, &for_complete_})
    wake(*waiters, std::numeric_limits<std::int64_t>::max());
  stepped_.notify_all();
}

void Clocks::wake(const Waiters& waiters, std::int64_t count) {
  for (auto waiter = waiters.begin(); waiter != waiters.end() && waiter->first <= count; ++waiter)
    waiter->second->notify_one();
}

void Clocks::raise_error() const {
  if (error_) throw *error_;
}

}  // namespace phalanx
