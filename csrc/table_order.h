// The order in which the changes of a table go through its lanes.

#pragma once

#include <atomic>
#include <cstdint>

namespace phalanx {

// The place of a change among those of its table. Every place that was given must be used or given up: later changes
// wait for it.
struct Turn {
  std::uint64_t number = 0;  // 1, 2, ...
  std::uint64_t tick = 0;    // of the table; it jumps where a table was restored
};

// Lets changes through a lane one after the other, by their numbers. Threads that come too early wait.
class LaneOrder {
 public:
  bool is_turn_of(std::uint64_t number) const { return through_.load() + 1 == shortened(number); }

  // Waits until the change before this one is through.
  void wait_for(std::uint64_t number) const {
    for (int i = 0; i < kSpins; ++i) {
      if (is_turn_of(number)) return;
    }
    for (std::uint32_t through = through_.load(); through + 1 != shortened(number); through = through_.load()) {
      through_.wait(through);
    }
  }

  // Says that this change is through, whose turn it is.
  void pass(std::uint64_t number) {
    // In one order with the count of waiting threads that `notify_all` reads, or one of them might not be woken.
    through_.store(shortened(number), std::memory_order_seq_cst);
    through_.notify_all();
  }

 private:
  static constexpr int kSpins = 1000;  // about a microsecond

  // 32 bits, because the system waits for words of that size; numbers that meet here are close to each other.
  static std::uint32_t shortened(std::uint64_t number) { return static_cast<std::uint32_t>(number); }

  alignas(64) std::atomic<std::uint32_t> through_ = 0;
};

}  // namespace phalanx
