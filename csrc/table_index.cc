#include "table_index.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace phalanx {
namespace {

constexpr std::uint64_t kMostUsed = 0x3FFFFFFF;  // in a part, so that twice as many places can be counted
constexpr std::uint64_t kLinesForEach = 4;       // that move for a new entry
constexpr std::uint64_t kAll = UINT64_MAX;

constexpr std::uint32_t whole_lines(std::uint64_t entries) {
  return static_cast<std::uint32_t>((entries + kLine - 1) / kLine * kLine);
}

bool fits(std::uint64_t used, std::uint64_t capacity) { return used * 4 <= capacity * 3; }

}  // namespace

Places::Places(const Capacities& capacities) {
  std::uint64_t size = 0;
  for (std::size_t part = 0; part < kParts; ++part) {
    parts_[part] = {size, capacities[part]};
    size += capacities[part];
  }
  memory_ = Pages(size * sizeof(Entry), true);
  entries_ = reinterpret_cast<Entry*>(memory_.data());
}

void Places::erase(Entry* entry) {
  const std::span<Entry> places = of(part_of(entry->hash));
  const std::uint64_t capacity = places.size();
  std::uint64_t hole = static_cast<std::uint64_t>(entry - places.data());
  for (std::uint64_t next = (hole + 1) % capacity; !places[next].is_empty(); next = (next + 1) % capacity) {
    // An entry may fill the hole unless its home lies behind it.
    const std::uint64_t walked = (next + capacity - home_number(places[next].hash) * kLine) % capacity;
    if (walked >= (next + capacity - hole) % capacity) {
      places[hole] = places[next];
      hole = next;
    }
  }
  places[hole].row = Entry::kEmpty;
}

LaneIndex::LaneIndex() {
  Places::Capacities capacities;
  capacities.fill(kLine);
  now_ = Places(capacities);
}

Entry* LaneIndex::insert(std::uint64_t hash, Entry* place) {
  const int part = part_of(hash);
  if (!fits(std::uint64_t{used_[part]} + 1, now_.capacity(part))) {
    grow(0);
    place = now_.find(hash);
  } else if (moving_ < kParts) {
    move_lines(kLinesForEach);
    place = now_.find(hash);  // what moved may be there
  }
  ++used_[part];
  place->hash = hash;
  return place;
}

void LaneIndex::erase(std::uint64_t hash) {
  Entry* const found = find(hash);
  if (found->is_empty()) return;
  const std::span<Entry> old = old_.of(part_of(hash));
  const bool is_old = found >= old.data() && found < old.data() + old.size();
  (is_old ? old_ : now_).erase(found);
  --used_[part_of(hash)];
}

void LaneIndex::erase_part(int part) {
  each(part, [](Entry& entry) { entry.row = Entry::kEmpty; });
  used_[part] = 0;
}

void LaneIndex::reserve(int part, std::uint64_t more) {
  const std::uint64_t needed = used_[part] + more;
  if (fits(needed, now_.capacity(part))) return;
  grow(needed + needed / 8 + 32);
  move(kAll);
}

// Begins to move to room for twice the entries of each part, or twice the typical number where a part has some but
// fewer; and for `least` in each.
void LaneIndex::grow(std::uint64_t least) {
  std::uint64_t total = 0, filled = 0;
  for (const std::uint32_t used : used_) {
    total += used;
    filled += used > 0;
  }
  const std::uint64_t typical = total / std::max<std::uint64_t>(filled, 1);
  Places::Capacities capacities;
  for (std::size_t part = 0; part < kParts; ++part) {
    const std::uint64_t room = used_[part] > 0 ? 2 * std::max<std::uint64_t>(used_[part], typical) : 0;
    if (std::max(room / 2, least) > kMostUsed) throw std::length_error("a shard is full; use more servers");
    capacities[part] = kLine + whole_lines(std::max(room, least * 4 / 3));
  }
  move(kAll);
  Places grown(capacities);
  old_ = std::exchange(now_, std::move(grown));
  moving_ = 0;
  lines_moved_ = 0;
}

void LaneIndex::move_lines(std::uint64_t lines) {
  for (; moving_ < kParts; ++moving_, lines_moved_ = 0) {
    const std::span<Entry> places = old_.of(moving_);
    const std::uint64_t all = places.size() / kLine;
    if (lines_moved_ == 0) {
      // Behind a line with an empty place, which a part three quarters full has.
      first_line_ = 0;
      while (!places[first_line_ * kLine + kLine - 1].is_empty()) ++first_line_;
      first_line_ = (first_line_ + 1) % all;
    }
    while (lines_moved_ < all) {
      const std::uint64_t line = (first_line_ + lines_moved_++) % all;
      const bool has_gap = move_line(places.subspan(line * kLine).first<kLine>());
      lines -= lines > 0;
      if (lines == 0 && has_gap) return;
    }
  }
  old_ = Places();
}

// Returns whether the line had an empty place.
bool LaneIndex::move_line(std::span<Entry, kLine> line) {
  bool has_gap = false;
  for (Entry& entry : line) {
    if (entry.is_empty()) {
      has_gap = true;
      continue;
    }
    *now_.find(entry.hash) = entry;
    entry.row = Entry::kEmpty;
    ++moved_;
  }
  return has_gap;
}

std::size_t LaneIndex::bytes() const {
  std::size_t places = 0;
  for (int part = 0; part < kParts; ++part) {
    // The memory of a part that had no entry was never written.
    if (used_[part] > 0) places += now_.capacity(part) + old_.capacity(part);
  }
  return places * sizeof(Entry);
}

}  // namespace phalanx
