// Where the row of an id is: open addressing with linear probing, one part per virtual shard, for a lane of shards.
//
// A lane holds every 16th shard. Its parts lie in one piece of memory and grow together, to twice the entries they
// hold, when one of them is three quarters full: so by about a half each time, and an entry costs 21 to 32 bytes.
// A part is not a power of two long; a hash finds its home by multiplying. A home is a whole cache line of four
// entries, so that most searches read one line, the one that was asked for ahead. Erasing moves later entries back, so
// there are no tombstones. Not thread-safe: its lane's lock guards it.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "table_hash.h"
#include "table_memory.h"

namespace phalanx {

inline constexpr int kLaneBits = 4;
inline constexpr int kLanes = 1 << kLaneBits;
inline constexpr int kParts = kShards / kLanes;

constexpr int lane_of(std::uint64_t hash) noexcept { return shard_of(hash) & (kLanes - 1); }
constexpr int part_of(std::uint64_t hash) noexcept { return shard_of(hash) >> kLaneBits; }

struct Entry {
  static constexpr std::uint32_t kEmpty = 0xFFFFFFFF;
  static constexpr std::uint32_t kWaiting = 0xFF000000;  // plus a count: an id that has no row yet

  std::uint64_t hash;
  std::uint32_t row;
  std::uint32_t tick;  // of the last change, counted from the oldest tick told apart

  bool is_empty() const { return row == kEmpty; }
  bool has_row() const { return row < kWaiting; }
  bool is_waiting() const { return row >= kWaiting && row != kEmpty; }
  std::uint32_t waited() const { return row - kWaiting; }
};

static_assert(sizeof(Entry) == 16);

inline constexpr std::uint32_t kLine = 4;  // entries of a cache line

class LaneIndex {
 public:
  LaneIndex();

  // The line where the search for a hash begins.
  Entry* home(std::uint64_t hash) const {
    const Part& part = parts_[part_of(hash)];
    const auto scaled = static_cast<unsigned __int128>(hash << kShardBits) * (part.capacity / kLine);
    return entries_ + part.start + static_cast<std::uint64_t>(scaled >> 64) * kLine;
  }

  // The entry of a hash, or the empty place where it would go.
  Entry* find(std::uint64_t hash) const {
    Entry* line = home(hash);
    Entry* found = find_in(line, hash);
    while (found == nullptr) {
      line = line_after(line, hash);
      found = find_in(line, hash);
    }
    return found;
  }

  // The same if the search ends in this line of the hash's part, else null.
  static Entry* find_in(Entry* line, std::uint64_t hash) {
    unsigned same = 0;
    for (unsigned i = 0; i < kLine; ++i) same |= static_cast<unsigned>(line[i].hash == hash) << i;
    Entry* const found = line + std::countr_zero(same | 1u << (kLine - 1));
    if (found->hash == hash && !found->is_empty()) return found;  // an empty place may keep a hash
    unsigned empty = 0;
    for (unsigned i = 0; i < kLine; ++i) empty |= static_cast<unsigned>(line[i].is_empty()) << i;
    return empty != 0 ? line + std::countr_zero(empty) : nullptr;
  }

  Entry* line_after(Entry* line, std::uint64_t hash) const {
    const Part& part = parts_[part_of(hash)];
    line += kLine;
    return line == entries_ + part.start + part.capacity ? entries_ + part.start : line;
  }

  // Puts a hash that has no entry at the empty `place` that `find` gave; the entry may lie elsewhere, after growing.
  // Its row is still empty: the caller sets it at once.
  Entry* insert(std::uint64_t hash, Entry* place);
  void erase(std::uint64_t hash);
  void erase_part(int part);

  std::uint32_t used(int part) const { return parts_[part].used; }
  // Every place of a part, the empty ones too; moved by insert and erase.
  std::span<Entry> places(int part) const { return {entries_ + parts_[part].start, parts_[part].capacity}; }
  std::size_t bytes() const { return size_ * sizeof(Entry); }

 private:
  struct Part {
    std::uint64_t start = 0;
    std::uint32_t capacity = 0;  // whole lines
    std::uint32_t used = 0;
  };

  // Room for twice the entries of each part, or twice the `typical` number where a part has some but fewer.
  LaneIndex(const std::array<Part, kParts>& parts, std::uint32_t typical);
  void grow();

  Pages memory_;
  Entry* entries_ = nullptr;
  std::size_t size_ = 0;
  std::array<Part, kParts> parts_;
};

}  // namespace phalanx
