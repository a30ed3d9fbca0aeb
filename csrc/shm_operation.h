// One call of the group: a collective, a message to send, or one to receive.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "shm_region.h"
#include "shm_task.h"

namespace phalanx {

enum class Kind : std::uint32_t {
  kAllReduce, kReduce, kReduceScatter, kAllGather, kGather, kScatter, kBroadcast, kAllToAll, kBarrier, kSend, kReceive
};

inline constexpr int kAnyRank = -1;

struct Operation {
  Kind kind;
  std::uint64_t number;  // of the collective in its group, or of this rank's message
  std::chrono::steady_clock::time_point begun;
  std::chrono::steady_clock::time_point deadline;
  CollectiveTask task;  // of a collective
  CallSignature signature;  // of a collective
  std::string label;  // what it is for, as its rank says it

  // Of a message. `memory` must stay until the end.
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  int peer = kAnyRank;  // any rank: set to the sender once known
  int tag = 0;

  std::atomic<bool> is_done = false;
  std::exception_ptr error;  // read after is_done
};

}  // namespace phalanx
