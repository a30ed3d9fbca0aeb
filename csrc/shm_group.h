// Collectives and messages of the ranks of one group on one host, over a Region.
//
// Every call returns an Operation at once, moved as far as it goes without waiting; `wait` or `progress` bring it to its
// end. Collectives are carried out in the order of the calls. A collective is made of rounds: every rank writes its
// slot and says so (entered), waits until all have, reads what it wants, and says that too (left); slots are used in
// turn, so a slot is written again only when all have left the round before the last. The first round of a collective
// carries what each rank called, and they compare.
//
// Ownership: buffers belong to the caller and stay until the operation is done. Thread-safety: all methods may be
// called from any thread; one lock is held while bytes move, never while waiting.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm_mail.h"
#include "shm_operation.h"
#include "shm_reduce.h"
#include "shm_region.h"
#include "shm_task.h"

namespace phalanx {

// How long a rank waits before it sleeps.
struct WaitPolicy {
  double spin_s;   // a yield costs little, and helps where ranks share a core
  double yield_s;  // then; after that a wake-up costs little beside what was waited
};

// A call that has begun and not ended, for reports.
struct CallUnderWay {
  std::string verb;    // all_reduce
  std::string detail;  // float32[12]; empty for barriers and messages
  std::string label;   // what it is for, as its rank says it
  std::uint64_t number;
  double age_s;
  std::vector<int> missing;  // ranks of the group that it waits for; empty where nothing is known to be missing
};

struct UnderWay {
  std::uint64_t made, ended;  // collectives
  std::vector<CallUnderWay> calls;
};

// Seconds that this rank spent on others so far. A round waits for the rank that enters it last.
struct WaitTimes {
  double in_calls_s = 0;           // the main thread waited for the end of collectives: for others, and for the bytes
  std::vector<double> main_s;      // of that until the last rank had entered, by that rank
  std::vector<double> entered_s;   // from its own entry to that of the last rank, by that rank; it may compute meanwhile
};

class Group {
 public:
  using Op = std::shared_ptr<Operation>;
  using Buffers = std::vector<std::byte*>;
  using Sizes = std::vector<std::size_t>;

  // REQUIRES: fd as in Region. `name` is how errors call this rank; `timeout_s` is of one operation.
  Group(int fd, int rank, int size, const std::string& name, double timeout_s);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // What the calls of this thread are for from now on, in words; ranks compare it as they compare shapes. It is of the
  // thread because torch makes the calls, far below who knows.
  static void label_calls(const std::string& label);
  static const std::string& label_of_calls();

  // Counts are of elements, and lists have one entry for each rank. Outputs may be the inputs, but for
  // all_to_all: how far it has read and how far it has written differ.
  Op all_reduce(std::byte* data, std::size_t count, Type type, Reduce how);
  Op reduce_to(std::byte* data, std::size_t count, Type type, Reduce how, int root);
  Op reduce_scatter(Buffers in, std::byte* out, Sizes counts, Type type, Reduce how);
  Op all_gather(std::byte* in, Buffers out, Sizes counts, Type type);
  Op gather(std::byte* in, Buffers out, std::size_t count, Type type, int root);   // `out` at the root only
  Op scatter(Buffers in, std::byte* out, std::size_t count, Type type, int root);  // `in` at the root only
  Op broadcast(std::byte* data, std::size_t count, Type type, int root);
  Op all_to_all(Buffers in, Sizes in_counts, Buffers out, Sizes out_counts, Type type);
  Op barrier();
  Op send(std::byte* memory, std::size_t bytes, int to, int tag);
  Op receive(std::byte* memory, std::size_t bytes, int from, int tag);  // from kAnyRank: whoever sends

  // Waits for the end, at most as long as the group's timeout from the call, or `timeout_s` from now when positive.
  // Throws PeerLost or Disagreement; then every operation of the group fails, on every rank.
  void wait(const Op& op, double timeout_s);
  // Waits no longer than `patience_s` and returns whether the end came; throws as `wait` does if it did.
  bool ends_within(const Op& op, double patience_s);
  // What an operation waits for, in words that name the call and the ranks that are missing from it; empty where nothing
  // is known to be missing.
  std::string missing_from(const Op& op);
  // The ranks of which it says that.
  std::vector<int> missing_ranks(const Op& op);
  // The collectives this rank has made so far, and what it waits for: the first collective that has not ended (the later
  // ones wait for it), and every message.
  UnderWay under_way();
  // Whom this rank waited for in collectives, and how long.
  WaitTimes wait_times();
  // A collective that the main thread of another rank waits in and this rank has not called, in words that name both;
  // empty where there is none. A rank whose main thread waits for that one elsewhere waits for ever.
  std::string waited_for();
  // Ends the group on every rank: operations under way and later ones throw Disagreement with this text.
  void disagree(const std::string& text);
  // As `wait`, for a thread in the background: sleeps rather than spins, gives way to `wait`, and does not throw.
  void progress(const Op& op);
  // Ends this rank's part: the others are told, and operations under way fail with std::runtime_error. Nothing in a
  // forked child, which is no rank.
  void close();
  void set_timeout(double timeout_s) { timeout_s_ = timeout_s; }

 private:
  using Clock = std::chrono::steady_clock;

  CollectiveTask all_reduce_task(std::byte* data, std::size_t count, Type type, Reduce how, CallSignature signature);
  CollectiveTask reduce_at_once_task(std::byte* data, std::size_t count, Type type, Reduce how, CallSignature signature);
  CollectiveTask reduce_to_task(std::byte* data, std::size_t count, Type type, Reduce how, CallSignature signature);
  CollectiveTask reduce_scatter_task(Buffers in, std::byte* out, Sizes counts, Type type, Reduce how, CallSignature signature);
  CollectiveTask all_gather_task(std::byte* in, Buffers out, Sizes bytes, CallSignature signature);
  CollectiveTask gather_task(std::byte* in, Buffers out, std::size_t bytes, CallSignature signature);
  CollectiveTask scatter_task(Buffers in, std::byte* out, std::size_t bytes, CallSignature signature);
  CollectiveTask broadcast_task(std::byte* data, std::size_t bytes, CallSignature signature);
  CollectiveTask all_to_all_task(Buffers in, Sizes in_bytes, Buffers out, Sizes out_bytes, CallSignature signature);
  CollectiveTask barrier_task(CallSignature signature);

  // The parts of a round, in this order.
  CounterReached writable();                       // co_await: this rank's slot of the next round is free
  void enter(const CallSignature& signature, bool has_more = false);
  CounterReached everyone_entered() const;         // co_await
  void compare(const CallSignature& signature) const;   // throws Disagreement
  void leave_round();
  void note_last();
  std::byte* slot(int rank) const { return region_.slot(rank, round_); }

  CallSignature signature_of(Kind kind, Type type, std::size_t count, Reduce how = Reduce::kSum, int root = 0);
  CallSignature signature_of(Kind kind, Type type, const Sizes& counts, Reduce how = Reduce::kSum);  // of a cut: one count for each rank
  template <class Make>
  Op call(CallSignature signature, Make task_of);
  Op post(Kind kind, std::byte* memory, std::size_t bytes, int peer, int tag);
  void require_own_process() const;
  Clock::time_point deadline() const;
  std::vector<int> missing_ranks_locked(const Op& op) const;

  // REQUIRES of these: the lock is held.
  void advance();
  void finish(const Op& op, std::exception_ptr error);
  void fail_all(std::exception_ptr error);
  void announce_ends();
  void check_liveness(Clock::time_point now);
  void check_operation(const Op& op, Clock::time_point now);
  bool may_come_from(const Operation& message, int rank) const;
  std::string described(const Op& op) const;
  CallUnderWay report(const Op& op, Clock::time_point now) const;

  void shorten(const Op& op, Clock::time_point deadline);
  bool is_done_after_advance(const Op& op);
  bool await_end(const Op& op, Clock::time_point limit);
  void begin_main_wait(const Op& op, Clock::time_point start);
  void end_main_wait(Clock::time_point start);
  void sleep_on(const Op& op);

  Region region_;
  Mail mail_;
  const int pid_;
  const WaitPolicy wait_policy_;
  std::atomic<double> timeout_s_;

  std::mutex lock_;
  std::deque<Op> calls_;  // collectives not at their end, in order
  std::uint64_t calls_made_ = 0, messages_made_ = 0;
  std::uint32_t round_ = 0;
  std::exception_ptr broken_;
  Clock::time_point looked_;

  WaitTimes wait_times_;
  // Nanoseconds of the clock, and since when the main thread waits for the end of a collective: 0 while it does not.
  std::atomic<std::int64_t> main_waits_since_ = 0, main_in_calls_ = 0;
  // Of its last wait; only the main thread looks at them.
  std::int64_t wait_began_ = 0, wait_left_ = 0;
  std::uint64_t waited_call_ = 0;

  std::mutex way_lock_;
  std::condition_variable way_is_free_;
  int waiters_ = 0;
};

}  // namespace phalanx
