#include "table_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace phalanx {
namespace {

constexpr std::uint32_t kMostUsed = 0x7FFFFFFF - 2 * kLine;

bool is_full(std::uint32_t used, std::uint32_t capacity) {
  return (std::uint64_t{used} + 1) * 4 > std::uint64_t{capacity} * 3;
}

}  // namespace

LaneIndex::LaneIndex() : LaneIndex({}, 0) {}

LaneIndex::LaneIndex(const std::array<Part, kParts>& parts, std::uint32_t typical) : parts_(parts) {
  for (Part& part : parts_) {
    part.start = size_;
    part.capacity = kLine;
    if (part.used > 0) part.capacity += (2 * std::max(part.used, typical) + kLine - 1) / kLine * kLine;
    size_ += part.capacity;
  }
  memory_ = Pages(size_ * sizeof(Entry), true);
  entries_ = reinterpret_cast<Entry*>(memory_.data());
  std::memset(static_cast<void*>(entries_), 0xFF, size_ * sizeof(Entry));  // every row kEmpty
}

Entry* LaneIndex::insert(std::uint64_t hash, Entry* place) {
  Part& part = parts_[part_of(hash)];
  if (is_full(part.used, part.capacity)) {
    grow();
    place = find(hash);
  }
  ++part.used;
  place->hash = hash;
  return place;
}

void LaneIndex::erase(std::uint64_t hash) {
  Part& part = parts_[part_of(hash)];
  Entry* const first = entries_ + part.start;
  const std::uint64_t capacity = part.capacity;
  std::uint64_t hole = static_cast<std::uint64_t>(find(hash) - first);
  if (first[hole].is_empty()) return;
  --part.used;
  for (std::uint64_t next = (hole + 1) % capacity; !first[next].is_empty(); next = (next + 1) % capacity) {
    // An entry may fill the hole unless its home lies behind it.
    const std::uint64_t home_of_next = static_cast<std::uint64_t>(home(first[next].hash) - first);
    const std::uint64_t walked = (next + capacity - home_of_next) % capacity;
    if (walked >= (next + capacity - hole) % capacity) {
      first[hole] = first[next];
      hole = next;
    }
  }
  first[hole].row = Entry::kEmpty;
}

void LaneIndex::erase_part(int number) {
  for (Entry& entry : places(number)) entry.row = Entry::kEmpty;
  parts_[number].used = 0;
}

void LaneIndex::grow() {
  std::uint64_t total = 0, filled = 0;
  for (const Part& part : parts_) {
    if (part.used > kMostUsed) throw std::length_error("a shard is full; use more servers");
    total += part.used;
    filled += part.used > 0;
  }
  LaneIndex grown(parts_, static_cast<std::uint32_t>(total / std::max<std::uint64_t>(filled, 1)));
  for (std::size_t i = 0; i < size_; ++i) {
    if (!entries_[i].is_empty()) *grown.find(entries_[i].hash) = entries_[i];
  }
  *this = std::move(grown);
}

}  // namespace phalanx
