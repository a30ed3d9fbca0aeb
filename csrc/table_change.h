// A change of a table that waits for its place in the order: its keys hashed and sorted by lane.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "table_index.h"
#include "table_lane.h"
#include "table_rules.h"

namespace phalanx {

// Keys of a call sorted by lane, keeping their order within one. Has room for so many keys at a time.
class KeysByLane {
 public:
  explicit KeysByLane(std::size_t room)
      : room_(room), words_(std::make_unique_for_overwrite<std::uint64_t[]>(2 * room)),
        numbers_(std::make_unique_for_overwrite<std::uint32_t[]>(2 * room)) {}

  // Sorts keys that begin at place `first` of their call.
  void sort(std::span<const std::int64_t> keys, std::size_t first, std::uint64_t salt) {
    std::uint64_t* const unsorted = words_.get() + room_;
    starts_.fill(0);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      unsorted[i] = hash_of(keys[i], salt);
      ++starts_[static_cast<std::size_t>(lane_of(unsorted[i])) + 1];
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) starts_[lane + 1] += starts_[lane];
    std::array<std::uint32_t, kLanes + 1> next = starts_;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t place = next[static_cast<std::size_t>(lane_of(unsorted[i]))]++;
      words_[place] = unsorted[i];
      numbers_[place] = static_cast<std::uint32_t>(first + i);
    }
  }

  Slice slice(std::size_t lane) {
    const std::size_t start = starts_[lane], size = starts_[lane + 1] - start;
    return {{words_.get() + start, size}, {numbers_.get() + start, size}, {numbers_.get() + room_ + start, size},
            departures_[lane]};
  }

  // Notes when a lane had all rows of its keys in memory; see Slice.
  void note_present(std::size_t lane, std::uint64_t departures) { departures_[lane] = departures; }

 private:
  std::size_t room_;
  std::unique_ptr<std::uint64_t[]> words_;    // hashes: sorted, then in the order of the call
  std::unique_ptr<std::uint32_t[]> numbers_;  // positions in the call, then rows
  std::array<std::uint32_t, kLanes + 1> starts_{};
  std::array<std::uint64_t, kLanes> departures_{};
};

enum class ChangeKind { kPush, kAdd, kAssign };

struct TableChange {
  ChangeKind kind;
  std::size_t count;  // of keys
  KeysByLane keys;
  Gradients gradients;  // of an addition or assignment the values alone
  UpdateRule rule;
};

}  // namespace phalanx
