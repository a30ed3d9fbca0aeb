#include "shm_group.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "mix.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

constexpr WaitPolicy kOwnCores = {2e-6, 1e-3};
constexpr WaitPolicy kSharedCores = {0, 5e-5};  // who yields takes turns from those who work

constexpr int kSleepMs = 50;       // until a sleeper looks around again
constexpr auto kLookEvery = 200ms;
constexpr std::int64_t kSameWaitNs = 20'000'000;  // who comes back within it waits on

WaitPolicy wait_policy_of(int ranks) {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return kSharedCores;
  return CPU_COUNT(&cores) >= ranks ? kOwnCores : kSharedCores;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::chrono::steady_clock::duration seconds(double s) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(s));
}

const char* verb_of(Kind kind) {
  constexpr const char* kNames[] = {"all_reduce", "reduce",    "reduce_scatter", "all_gather", "gather", "scatter",
                                    "broadcast",  "all_to_all", "barrier",        "send",       "recv"};
  return kNames[static_cast<std::size_t>(kind)];
}

// `all_reduce sum of 12 float32`
std::string described(const CallSignature& signature) {
  const auto kind = static_cast<Kind>(signature.kind);
  std::string text = verb_of(kind);
  if (kind == Kind::kBarrier) return text;
  if (kind <= Kind::kReduceScatter) text += std::string(" ") + name_of(static_cast<Reduce>(signature.reduce));
  if (kind != Kind::kAllToAll) text += " of " + std::to_string(signature.count);
  text += std::string(" ") + name_of(static_cast<Type>(signature.type));
  if (kind == Kind::kReduce || kind == Kind::kGather) text += " to rank " + std::to_string(signature.root);
  if (kind == Kind::kBroadcast || kind == Kind::kScatter) text += " from rank " + std::to_string(signature.root);
  return text;
}

std::int64_t nanoseconds(std::chrono::steady_clock::time_point moment) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(moment.time_since_epoch()).count();
}

bool is_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

thread_local std::string calls_label;

std::uint64_t digest_of(const std::string& label) {
  std::uint64_t digest = 0;
  for (const char letter : label) digest = mix64(digest + static_cast<unsigned char>(letter) + 1);
  return digest;
}

constexpr const char* kAdvice =
    " What some ranks skip all ranks must skip (draw it from a generator of one seed), or compute and multiply by 0; "
    "models that one backward pass trains belong in one module.";

}  // namespace

void Group::label_calls(const std::string& label) { calls_label = label; }

const std::string& Group::label_of_calls() { return calls_label; }

Group::Group(int fd, int rank, int size, const std::string& name, double timeout_s)
    : region_(fd, rank, size, name),
      mail_(region_),
      pid_(::getpid()),
      wait_policy_(wait_policy_of(size)),
      timeout_s_(timeout_s) {
  wait_times_.main_s.resize(static_cast<std::size_t>(size));
  wait_times_.entered_s.resize(static_cast<std::size_t>(size));
}

Group::~Group() { close(); }

void Group::close() {
  if (::getpid() != pid_) return;  // a forked child ends nothing: the rank is its parent
  {
    const std::lock_guard guard(lock_);
    if (!broken_) fail_all(std::make_exception_ptr(std::runtime_error("the process group was ended before this was done")));
  }
  region_.ring(region_.rank());
  region_.me().has_left_group.store(1, std::memory_order_release);
  region_.ring_others();
}

CounterReached Group::writable() {
  ++round_;
  return {&region_, &Member::left, round_ - 2};
}

void Group::enter(const CallSignature& signature, bool has_more) {
  Member& me = region_.me();
  me.rounds[round_ & 1].signature = signature;
  me.rounds[round_ & 1].entered_at = nanoseconds(Clock::now());
  me.rounds[round_ & 1].has_more = has_more;
  if (signature.label != 0) std::strncpy(me.rounds[round_ & 1].label, calls_.front()->label.c_str(), kLabelBytes - 1);
  me.entered.store(round_, std::memory_order_release);
  region_.ring_others();
}

CounterReached Group::everyone_entered() const { return {&region_, &Member::entered, round_}; }

// Everyone has entered the round: whoever did so last kept the others waiting.
void Group::note_last() {
  const std::int64_t entered_at = region_.me().rounds[round_ & 1].entered_at;
  std::int64_t last_at = entered_at;
  int last = region_.rank();
  for (int r = 0; r < region_.size(); ++r) {
    const std::int64_t at = region_.member(r).rounds[round_ & 1].entered_at;
    if (at > last_at) last = r, last_at = at;
  }
  const auto index = static_cast<std::size_t>(last);
  wait_times_.entered_s[index] += static_cast<double>(last_at - entered_at) * 1e-9;
  const std::int64_t waits_since = main_waits_since_.load(std::memory_order_relaxed);
  const std::int64_t since = std::max(entered_at, waits_since);
  if (waits_since != 0 && last_at > since) wait_times_.main_s[index] += static_cast<double>(last_at - since) * 1e-9;
}

void Group::leave_round() {
  note_last();
  region_.me().left.store(round_, std::memory_order_release);
  region_.ring_others();
}

void Group::compare(const CallSignature& signature) const {
  const auto text_of = [&](int rank) {
    const Member::Round& round = region_.member(rank).rounds[round_ & 1];
    return phalanx::described(round.signature) + (round.signature.label != 0 ? std::string(" for ") + round.label : "");
  };
  for (int r = 0; r < region_.size(); ++r) {
    const CallSignature& other = region_.member(r).rounds[round_ & 1].signature;
    if (other == signature) continue;
    const std::string ours = text_of(region_.rank()), theirs = text_of(r);
    throw Disagreement("In call " + std::to_string(signature.sequence) + " of the group " +
                       region_.name_of(region_.rank()) + " made " + ours + ", and " + region_.name_of(r) + " made " +
                       theirs + (ours == theirs ? " cut into parts of other lengths" : "") +
                       ". All ranks of a group must make the same calls in the same order." +
                       (other.label != signature.label ? kAdvice : ""));
  }
}

CallSignature Group::signature_of(Kind kind, Type type, std::size_t count, Reduce how, int root) {
  return {static_cast<std::uint32_t>(kind), static_cast<std::uint32_t>(type), static_cast<std::uint32_t>(how), root,
          count, 0, 0, digest_of(calls_label)};
}

CallSignature Group::signature_of(Kind kind, Type type, const Sizes& counts, Reduce how) {
  CallSignature signature = this->signature_of(kind, type, std::accumulate(counts.begin(), counts.end(), std::size_t{0}), how);
  for (const std::size_t count : counts) signature.parts = mix64(signature.parts + count);
  return signature;
}

void Group::require_own_process() const {
  if (::getpid() != pid_)
    throw std::logic_error("a forked process cannot use the process group of its parent: only the parent is a rank");
}

Group::Clock::time_point Group::deadline() const { return Clock::now() + seconds(timeout_s_); }

Group::Op Group::post(Kind kind, std::byte* memory, std::size_t bytes, int peer, int tag) {
  require_own_process();
  auto op = std::make_shared<Operation>();
  op->kind = kind;
  op->begun = Clock::now();
  op->memory = memory;
  op->bytes = bytes;
  op->peer = peer;
  op->tag = tag;
  op->deadline = deadline();
  const std::lock_guard guard(lock_);
  op->number = ++messages_made_;
  if (!broken_ && region_.failure() != Failure::kNone) check_liveness(Clock::now());  // another rank's
  if (broken_) {
    finish(op, broken_);
    return op;
  }
  try {
    mail_.add(op);
  } catch (const Disagreement& error) {
    region_.fail(Failure::kDisagreement, error.what());
    finish(op, std::current_exception());
    fail_all(std::current_exception());
  }
  advance();
  return op;
}

Group::Op Group::send(std::byte* memory, std::size_t bytes, int to, int tag) {
  return post(Kind::kSend, memory, bytes, to, tag);
}

Group::Op Group::receive(std::byte* memory, std::size_t bytes, int from, int tag) {
  return post(Kind::kReceive, memory, bytes, from, tag);
}

void Group::finish(const Op& op, std::exception_ptr error) {
  op->error = error;
  op->is_done.store(true, std::memory_order_release);
}

void Group::fail_all(std::exception_ptr error) {
  broken_ = error;
  for (const Op& op : calls_) finish(op, error);
  for (const Op& op : mail_.pending()) finish(op, error);
  calls_.clear();
  mail_.clear();
  announce_ends();
}

// Another thread of this rank may sleep on what has ended, or wait with `progress` until nobody else waits.
void Group::announce_ends() {
  region_.ring(region_.rank());
  { const std::lock_guard guard(way_lock_); }  // who has looked and not slept yet is asleep now, and is woken
  way_is_free_.notify_all();
}

void Group::advance() {
  bool has_ended = false;
  try {
    while (!calls_.empty() && calls_.front()->task.advance()) {
      finish(calls_.front(), nullptr);
      calls_.pop_front();
      has_ended = true;
    }
    has_ended |= mail_.advance();
  } catch (const Disagreement& error) {
    region_.fail(Failure::kDisagreement, error.what());
    fail_all(std::current_exception());
    has_ended = true;
  }
  if (has_ended) announce_ends();
}

std::string Group::described(const Op& op) const {
  std::string text = verb_of(op->kind);
  if (op->kind == Kind::kSend) return text + " number " + std::to_string(op->number);
  if (op->kind == Kind::kReceive) return text + " number " + std::to_string(op->number);
  if (!op->label.empty()) text += " for " + op->label;
  return text + ", call " + std::to_string(op->number) + " of the group,";
}

// Whoever ended its part in order sends nothing any more; a message from any rank then comes from the others.
bool Group::may_come_from(const Operation& message, int rank) const {
  if (message.peer != kAnyRank) return message.peer == rank;
  if (!region_.has_left(rank)) return true;
  for (int r = 0; r < region_.size(); ++r)
    if (r != region_.rank() && !region_.has_left(r)) return false;
  return true;
}

void Group::check_operation(const Op& op, Clock::time_point now) {
  const bool is_message = op->kind >= Kind::kSend;
  for (int r = 0; r < region_.size(); ++r) {
    if (r == region_.rank()) continue;
    if (is_message ? !may_come_from(*op, r) : op->task.condition().holds_for(r)) continue;
    const bool is_late = now >= op->deadline;
    const std::string loss = region_.loss_of(r);
    if (loss.empty() && !is_late) continue;
    advance();  // It may have done its part before it was lost.
    if (op->is_done.load(std::memory_order_acquire) || (!is_message && op->task.condition().holds_for(r))) return;
    const std::string what = described(op) + " on " + region_.name_of(region_.rank());
    if (!loss.empty()) throw PeerLost(what + " lost " + region_.name_of(r) + ": " + loss + ". Its log says why.");
    throw PeerLost(what + ": Timed out waiting for " + region_.name_of(r) +
                   ", which lives. See what it is doing, or give the group a longer timeout.");
  }
}

void Group::check_liveness(Clock::time_point now) {
  looked_ = now;
  try {
    const Failure failure = region_.failure();  // read before its text, which is written before it
    if (failure == Failure::kDisagreement) throw Disagreement(region_.failure_text());
    if (failure == Failure::kLost) throw PeerLost(region_.failure_text());
    if (!calls_.empty()) check_operation(Op(calls_.front()), now);
    for (const Op& op : mail_.pending()) check_operation(op, now);
  } catch (const PeerLost& error) {
    region_.fail(Failure::kLost, error.what());
    fail_all(std::current_exception());
  } catch (const Disagreement&) {
    fail_all(std::current_exception());
  }
}

bool Group::is_done_after_advance(const Op& op) {
  if (op->is_done.load(std::memory_order_acquire)) return true;
  const std::lock_guard guard(lock_);
  advance();
  return op->is_done.load(std::memory_order_acquire);
}

void Group::sleep_on(const Op& op) {
  Member& me = region_.me();
  const std::uint32_t seen = me.bell.load(std::memory_order_acquire);
  me.sleeping.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool is_done = is_done_after_advance(op);
  if (!is_done) {
    const Clock::time_point now = Clock::now();
    const std::lock_guard guard(lock_);
    if (now - looked_ > kLookEvery || now >= op->deadline || region_.failure() != Failure::kNone) check_liveness(now);
    is_done = op->is_done.load(std::memory_order_acquire);
  }
  if (!is_done) region_.sleep(seen, kSleepMs);
  me.sleeping.fetch_sub(1, std::memory_order_relaxed);
}

// An operation ends in time only if those before it do.
void Group::shorten(const Op& op, Clock::time_point deadline) {
  const std::lock_guard guard(lock_);
  op->deadline = std::min(op->deadline, deadline);
  if (op->kind >= Kind::kSend) return;
  for (const Op& before : calls_)
    if (before->number < op->number) before->deadline = std::min(before->deadline, deadline);
}

bool Group::await_end(const Op& op, Clock::time_point limit) {
  if (op->is_done.load(std::memory_order_acquire)) return true;
  require_own_process();
  const Clock::time_point start = Clock::now();
  const bool is_main_in_call = op->kind < Kind::kSend && is_main_thread();
  {
    const std::lock_guard guard(way_lock_);
    ++waiters_;
  }
  if (is_main_in_call) begin_main_wait(op, start);
  bool is_done;
  while (!(is_done = is_done_after_advance(op))) {
    const Clock::time_point now = Clock::now();
    const std::chrono::duration<double> waited = now - start;
    if (waited.count() < wait_policy_.spin_s) {
      for (int i = 0; i < 8; ++i) pause();
    } else if (waited.count() < wait_policy_.yield_s) {
      ::sched_yield();
    } else if (now < limit) {
      sleep_on(op);
    } else {
      break;
    }
  }
  if (is_main_in_call) end_main_wait(start);
  const std::lock_guard guard(way_lock_);
  if (--waiters_ == 0) way_is_free_.notify_all();
  return is_done;
}

// A caller that waits a second at a time, to look at signals in between, waits on when it comes back.
void Group::begin_main_wait(const Op& op, Clock::time_point start) {
  region_.me().main_waits.store(1, std::memory_order_release);
  const std::int64_t now = nanoseconds(start);
  if (waited_call_ != op->number || now - wait_left_ > kSameWaitNs) wait_began_ = now;
  waited_call_ = op->number;
  main_waits_since_.store(wait_began_, std::memory_order_relaxed);
}

void Group::end_main_wait(Clock::time_point start) {
  region_.me().main_waits.store(0, std::memory_order_release);
  wait_left_ = nanoseconds(Clock::now());
  main_in_calls_.fetch_add(wait_left_ - nanoseconds(start), std::memory_order_relaxed);
  main_waits_since_.store(0, std::memory_order_relaxed);
}

void Group::wait(const Op& op, double timeout_s) {
  if (timeout_s > 0 && !op->is_done.load(std::memory_order_acquire)) shorten(op, Clock::now() + seconds(timeout_s));
  await_end(op, Clock::time_point::max());
  if (op->error) std::rethrow_exception(op->error);
}

bool Group::ends_within(const Op& op, double patience_s) {
  if (!await_end(op, Clock::now() + seconds(patience_s))) return false;
  if (op->error) std::rethrow_exception(op->error);
  return true;
}

std::vector<int> Group::missing_ranks(const Op& op) {
  const std::lock_guard guard(lock_);
  return missing_ranks_locked(op);
}

std::vector<int> Group::missing_ranks_locked(const Op& op) const {
  std::vector<int> ranks;
  if (op->is_done.load(std::memory_order_acquire)) return ranks;
  const bool is_message = op->kind >= Kind::kSend;
  if (!is_message && calls_.empty()) return ranks;
  const Op& first = is_message ? op : calls_.front();  // collectives end in order
  for (int r = 0; r < region_.size(); ++r)
    if (r != region_.rank() && (is_message ? may_come_from(*op, r) : !first->task.condition().holds_for(r))) ranks.push_back(r);
  return ranks;
}

std::string Group::missing_from(const Op& op) {
  const std::lock_guard guard(lock_);
  const std::vector<int> ranks = missing_ranks_locked(op);
  if (ranks.empty()) return "";
  std::string names;
  for (const int r : ranks) names += (names.empty() ? "" : ", ") + region_.name_of(r);
  const Op& first = op->kind >= Kind::kSend ? op : calls_.front();
  return described(first) + " on " + region_.name_of(region_.rank()) + " waits for " + names;
}

CallUnderWay Group::report(const Op& op, Clock::time_point now) const {
  CallUnderWay call{verb_of(op->kind), "", op->label, op->number, std::chrono::duration<double>(now - op->begun).count(),
                    missing_ranks_locked(op)};
  if (op->kind < Kind::kBarrier)
    call.detail = std::string(name_of(static_cast<Type>(op->signature.type))) + "[" + std::to_string(op->signature.count) + "]";
  return call;
}

UnderWay Group::under_way() {
  const std::lock_guard guard(lock_);
  const Clock::time_point now = Clock::now();
  UnderWay under_way{calls_made_, calls_made_ - calls_.size(), {}};
  if (!calls_.empty()) under_way.calls.push_back(report(calls_.front(), now));
  for (const Op& op : mail_.pending()) under_way.calls.push_back(report(op, now));
  return under_way;
}

WaitTimes Group::wait_times() {
  const std::lock_guard guard(lock_);
  WaitTimes times = wait_times_;
  times.in_calls_s = static_cast<double>(main_in_calls_.load(std::memory_order_relaxed)) * 1e-9;
  return times;
}

std::string Group::waited_for() {
  const std::lock_guard guard(lock_);
  if (broken_ || !calls_.empty()) return "";
  const std::uint32_t entered = region_.me().entered.load(std::memory_order_acquire);
  for (int r = 0; r < region_.size(); ++r) {
    const Member& other = region_.member(r);
    const std::uint32_t its = other.entered.load(std::memory_order_acquire);
    if (other.main_waits.load(std::memory_order_acquire) == 0 || static_cast<std::int32_t>(its - entered) <= 0) continue;
    const Member::Round& round = other.rounds[its & 1];  // stays what it is: the next round needs this rank
    return region_.name_of(r) + " waits in " + phalanx::described(round.signature) +
           (round.signature.label != 0 ? std::string(" for ") + round.label : "");
  }
  return "";
}

void Group::disagree(const std::string& text) {
  region_.fail(Failure::kDisagreement, text);
  const std::lock_guard guard(lock_);
  if (!broken_) check_liveness(Clock::now());
}

void Group::progress(const Op& op) {
  const auto is_done = [&] { return op->is_done.load(std::memory_order_acquire); };
  while (!is_done()) {
    {
      std::unique_lock guard(way_lock_);
      way_is_free_.wait(guard, [&] { return waiters_ == 0 || is_done(); });
    }
    if (!is_done()) sleep_on(op);
  }
}

}  // namespace phalanx
