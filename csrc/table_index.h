// Where the row of an id is: open addressing with linear probing, one part per virtual shard, for a lane of shards.
//
// A lane holds every 16th shard. Its parts lie in one piece of memory and grow together, to twice the entries they
// hold, when one of them is three quarters full: so by about a half each time, and an entry costs 21 to 32 bytes.
// A part is not a power of two long; a hash finds its home by multiplying. A home is a whole cache line of four
// entries, so that most searches read one line, the one that was asked for ahead. Erasing moves later entries back, so
// there are no tombstones.
//
// Growing takes new memory, which the system gives zeroed, so empty, as it is written, and moves the entries with the
// insertions and changes that follow, four lines of them for each new entry. A lane that loads evenly has moved all long
// before it is full again; one that does not moves the rest at once. Lines move in the order of their part from behind a
// line with an empty place to behind another: what probes from a line that has moved ended in one, so the home of a hash
// tells where its entry is. Not thread-safe: its lane's lock guards it.

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

// Which of so many equal pieces of its part a hash lies in.
constexpr std::uint64_t piece_of(std::uint64_t hash, std::uint64_t pieces) noexcept {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(hash << kShardBits) * pieces >> 64);
}

// When a call happens: the table's tick, and the oldest one that is told apart; an entry keeps the difference.
struct Time {
  std::uint64_t tick;
  std::uint64_t oldest;

  std::uint32_t shortened(std::uint64_t full) const {
    return full <= oldest ? 0 : static_cast<std::uint32_t>(full - oldest);
  }
};

struct Entry {
  static constexpr std::uint32_t kEmpty = 0;              // what fresh memory holds
  static constexpr std::uint32_t kStored = 0x80000000;   // plus a record: a row that is in the lane's file
  static constexpr std::uint32_t kWaiting = 0xFF000000;  // plus a count: an id that has no row yet

  std::uint64_t hash;
  std::uint32_t row;
  std::uint32_t tick;  // of the last change, counted from the oldest tick told apart

  bool is_empty() const { return row == kEmpty; }
  bool has_row() const { return row - 1 < kWaiting - 1; }
  bool is_in_memory() const { return is_in_memory(row); }
  bool is_stored() const { return is_stored(row); }
  std::uint32_t record() const { return row - kStored; }
  bool is_waiting() const { return row >= kWaiting; }
  std::uint32_t waited() const { return row - kWaiting; }

  static bool is_in_memory(std::uint32_t row) { return row - 1 < kStored - 1; }
  static bool is_stored(std::uint32_t row) { return row - kStored < kWaiting - kStored; }
};

static_assert(sizeof(Entry) == 16);

inline constexpr std::uint32_t kLine = 4;  // entries of a cache line

// The places of a lane's entries, as many as it was made with.
class Places {
 public:
  using Capacities = std::array<std::uint32_t, kParts>;  // whole lines

  Places() = default;
  explicit Places(const Capacities& capacities);

  std::uint32_t capacity(int part) const { return parts_[part].capacity; }
  std::span<Entry> of(int part) const { return {entries_ + parts_[part].start, parts_[part].capacity}; }

  // Number in its part of the line where the search for a hash begins.
  std::uint64_t home_number(std::uint64_t hash) const {
    return piece_of(hash, parts_[part_of(hash)].capacity / kLine);
  }
  Entry* home(std::uint64_t hash) const { return entries_ + parts_[part_of(hash)].start + home_number(hash) * kLine; }

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

  // Calls use(entry) for each entry of a piece of a part. Homes have the order of hashes: so these are in the lines of
  // their homes, or behind the last of these as far as lines are full.
  template <class Use>
  void each_in(int part, std::uint64_t piece, std::uint64_t pieces, Use use) const {
    const std::span<Entry> places = of(part);
    const std::uint64_t lines = places.size() / kLine;
    if (lines == 0) return;
    const std::uint64_t first = line_at(piece, pieces, lines), last = line_at(piece + 1, pieces, lines);
    bool is_full = true;
    for (std::uint64_t i = first; i < first + lines && (i <= last || is_full); ++i) {
      is_full = true;
      for (Entry& entry : places.subspan(i % lines * kLine, kLine)) {
        if (entry.is_empty()) is_full = false;
        else if (piece_of(entry.hash, pieces) == piece) use(entry);
      }
    }
  }

  // Empties the place of an entry.
  void erase(Entry* entry);

 private:
  static std::uint64_t line_at(std::uint64_t piece, std::uint64_t pieces, std::uint64_t lines) {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(piece) * lines / pieces);
  }

  struct Part {
    std::uint64_t start = 0;
    std::uint32_t capacity = 0;
  };

  Pages memory_;
  Entry* entries_ = nullptr;
  std::array<Part, kParts> parts_;
};

class LaneIndex {
 public:
  LaneIndex();

  // The line where the search for a hash most likely ends.
  Entry* home(std::uint64_t hash) const { return places_of(hash).home(hash); }
  Entry* line_after(Entry* line, std::uint64_t hash) const { return places_of(hash).line_after(line, hash); }

  // The entry of a hash, or the empty place where it would go.
  Entry* find(std::uint64_t hash) const {
    if (is_behind(hash)) {
      Entry* const found = old_.find(hash);
      if (!found->is_empty()) return found;
    }
    return now_.find(hash);
  }

  // Puts a hash that has no entry at the empty `place` that `find` gave; the entry may lie elsewhere, after growing.
  // Its row is still empty: the caller sets it at once.
  Entry* insert(std::uint64_t hash, Entry* place);
  void erase(std::uint64_t hash);
  void erase_part(int part);

  // Makes room for `more` hashes of a part. The lane's other parts get room for as many as this one then has: a lane is
  // filled part after part, and would otherwise grow with each.
  void reserve(int part, std::uint64_t more);

  // If the index is growing, moves the entries of so many lines, and of those that follow up to one with an empty place.
  void move(std::uint64_t lines) {
    if (moving_ < kParts) move_lines(lines);
  }

  std::uint32_t used(int part) const { return used_[part]; }
  // Calls use(entry) for each entry of a part. Insert and erase nothing meanwhile.
  template <class Use>
  void each(int part, Use use) const {
    for (const Places* places : {&old_, &now_}) {
      for (Entry& entry : places->of(part)) {
        if (!entry.is_empty()) use(entry);
      }
    }
  }
  // The same for those in one of so many equal pieces of its hashes.
  template <class Use>
  void each_in(int part, std::uint64_t piece, std::uint64_t pieces, Use use) const {
    for (const Places* places : {&old_, &now_}) places->each_in(part, piece, pieces, use);
  }
  std::size_t bytes() const;
  // Entries that growing has moved so far.
  std::uint64_t moved() const { return moved_; }

 private:
  // Whether the entry of a hash, if there is one, may be where growing has still to move it from.
  bool is_behind(std::uint64_t hash) const {
    const int part = part_of(hash);
    if (part != moving_) return part > moving_;
    const std::uint64_t lines = old_.capacity(part) / kLine;
    return (old_.home_number(hash) + lines - first_line_) % lines >= lines_moved_;
  }
  const Places& places_of(std::uint64_t hash) const { return is_behind(hash) ? old_ : now_; }

  void grow(std::uint64_t least);
  void move_lines(std::uint64_t lines);
  bool move_line(std::span<Entry, kLine> line);

  Places now_;
  Places old_;                              // what is left to move
  int moving_ = kParts;                     // parts of `old_` below this one are empty; kParts when nothing moves
  std::uint64_t first_line_ = 0;            // of this one, the line that moved first
  std::uint64_t lines_moved_ = 0;           // and how many have
  std::uint64_t moved_ = 0;
  std::array<std::uint32_t, kParts> used_{};
};

}  // namespace phalanx
