// A collective as a coroutine: it runs until what it needs is not there yet, and is resumed when it is. So whichever
// thread has nothing better to do can move it on, and none ever blocks inside.

#pragma once

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "shm_region.h"

namespace phalanx {

// "One counter of every rank has reached a number"; the member pointer says which counter.
struct CounterReached {
  const Region* region = nullptr;
  std::atomic<std::uint32_t> Member::*counter = nullptr;
  std::uint32_t target = 0;

  bool holds_for(int rank) const { return reached(region->member(rank).*counter, target); }
  bool holds() const {
    for (int r = 0; region != nullptr && r < region->size(); ++r)
      if (!holds_for(r)) return false;
    return true;
  }
};

class CollectiveTask {
 public:
  struct promise_type {
    CounterReached condition;
    std::exception_ptr error;

    CollectiveTask get_return_object() { return CollectiveTask(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
    auto await_transform(CounterReached condition) {
      struct Awaiter {
        CounterReached condition;
        bool await_ready() const { return condition.holds(); }
        void await_suspend(std::coroutine_handle<promise_type> task) const { task.promise().condition = condition; }
        void await_resume() const {}
      };
      return Awaiter{condition};
    }
  };

  CollectiveTask() = default;
  CollectiveTask(CollectiveTask&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  CollectiveTask& operator=(CollectiveTask&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CollectiveTask() {
    if (handle_) handle_.destroy();
  }

  // Goes as far as it can; returns whether the end is reached. Throws what the coroutine threw.
  bool advance() {
    while (!handle_.done()) {
      if (!handle_.promise().condition.holds()) return false;
      handle_.resume();
    }
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return true;
  }
  const CounterReached& condition() const { return handle_.promise().condition; }

 private:
  explicit CollectiveTask(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

}  // namespace phalanx
