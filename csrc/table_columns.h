// What a shard of a table holds, as arrays.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace phalanx {

// What a shard holds; `rows` is (keys, width). See `Columns` in ps/table/arrays.py.
struct ShardColumns {
  std::vector<std::int64_t> keys;
  std::vector<std::uint64_t> ticks;
  std::unique_ptr<float[]> rows;
  std::vector<std::int64_t> waiting_keys;
  std::vector<std::uint64_t> waiting_ticks;
  std::vector<std::uint32_t> waiting_counts;
  std::vector<std::uint64_t> days;
  std::vector<std::int64_t> removed;
  std::uint64_t decays = 0;
  std::uint64_t tick = 0;
  bool is_complete = false;
};

// The same, lent by the caller.
struct ShardView {
  std::span<const std::int64_t> keys;
  std::span<const std::uint64_t> ticks;
  const float* rows;
  std::span<const std::int64_t> waiting_keys;
  std::span<const std::uint64_t> waiting_ticks;
  std::span<const std::uint32_t> waiting_counts;
  std::span<const std::uint64_t> days;
  std::span<const std::int64_t> removed;
  std::uint64_t decays;
  std::uint64_t tick;
  bool is_complete;
};

}  // namespace phalanx
