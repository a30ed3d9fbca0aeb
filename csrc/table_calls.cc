// Calls that read a table, and the rows in files that calls of all kinds wait for.

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>

#include "table.h"

namespace phalanx {

void EmbeddingTable::check_count(Keys keys) {
  if (keys.size() >= UINT32_MAX) throw std::length_error("a call takes fewer than 2**32 keys");
}

// Calls work(keys sorted by lane) for one block of keys after the other.
template <class Work>
void EmbeddingTable::each_block(Keys keys, Work work) const {
  KeysByLane sorted(std::min(kBlock, keys.size()));
  for (std::size_t first = 0; first < keys.size(); first += kBlock) {
    sorted.sort(keys.subspan(first, std::min(kBlock, keys.size() - first)), first, spec_.salt);
    work(sorted);
  }
}

// Calls work(lane, slice) for each lane that has keys, with its lock held.
template <class Work>
void EmbeddingTable::each_lane(KeysByLane& keys, Work work) const {
  for (std::size_t number = 0; number < kLanes; ++number) {
    Slice slice = keys.slice(number);
    if (slice.hashes.empty()) continue;
    Lane& lane = *lanes_[number];
    const std::lock_guard locked(lane.lock);
    work(lane, slice);
  }
}

// Calls use(lane, its rows) for rows that are in the order of lanes, with the lane's lock held.
template <class Use>
void EmbeddingTable::each_of_lane(std::span<const MissedRow> rows, Use use) const {
  while (!rows.empty()) {
    const int number = lane_of(rows[0].hash);
    const auto end = std::find_if(rows.begin(), rows.end(), [&](const MissedRow& row) { return lane_of(row.hash) != number; });
    const auto size = static_cast<std::size_t>(end - rows.begin());
    Lane& lane = *lanes_[static_cast<std::size_t>(number)];
    const std::lock_guard locked(lane.lock);
    use(lane, rows.first(size));
    rows = rows.subspan(size);
  }
}

// Reads rows of all lanes together, and checks them; returns the memory that they are in.
std::unique_ptr<std::byte[]> EmbeddingTable::read(std::span<MissedRow> rows) const {
  const std::size_t size = RowFile::record_bytes(RowCodec(spec_));
  auto bytes = std::make_unique_for_overwrite<std::byte[]>(rows.size() * size);
  std::vector<FilePiece> pieces;
  pieces.reserve(rows.size());
  for (MissedRow& row : rows) {
    std::byte* const to = bytes.get() + pieces.size() * size;
    row.bytes = to;
    pieces.push_back({row.file, row.place, size, to});
  }
  reads_.read(pieces);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (pieces[i].is_whole) lanes_[static_cast<std::size_t>(lane_of(rows[i].hash))]->file().check(rows[i]);
  }
  return bytes;
}

// Brings rows that a change names into memory, those of all its lanes together. It finds what was left out by itself.
void EmbeddingTable::bring_in(KeysByLane& keys) const {
  if (!spec_.spills() || stored() == 0) return;
  std::vector<MissedRow> missed;
  std::array<std::uint64_t, kLanes> departures{};  // before what is read now, of lanes that will have all
  for (std::size_t number = 0; number < kLanes; ++number) {
    Slice slice = keys.slice(number);
    if (slice.hashes.empty()) continue;
    const Lane& lane = *lanes_[number];
    const std::size_t before = missed.size();
    const std::lock_guard locked(lane.lock);
    if (!lane.find_missed(slice, missed)) continue;
    departures[number] = lane.departures();
    if (missed.size() == before) keys.note_present(number, lane.departures());
  }
  if (missed.empty()) return;
  const std::unique_ptr<std::byte[]> bytes = read(missed);
  each_of_lane(missed, [&](Lane& lane, std::span<const MissedRow> rows) {
    const auto number = static_cast<std::size_t>(lane_of(rows[0].hash));
    make_room(lane, rows.size());
    if (lane.bring_in(rows) && lane.departures() == departures[number]) keys.note_present(number, departures[number]);
  });
}

// The same of keys of one lane.
void EmbeddingTable::bring_in(Lane& lane, Slice slice) const {
  if (!spec_.spills() || lane.stored() == 0) return;
  std::vector<MissedRow> missed;
  {
    const std::lock_guard locked(lane.lock);
    lane.find_missed(slice, missed);
  }
  if (missed.empty()) return;
  const std::unique_ptr<std::byte[]> bytes = read(missed);
  const std::lock_guard locked(lane.lock);
  make_room(lane, missed.size());
  lane.bring_in(missed);
}

void EmbeddingTable::pull(Keys keys, float* values) const {
  check_count(keys);
  std::uint64_t missing = 0;
  std::vector<MissedRow> missed;
  each_block(keys, [&](KeysByLane& block) {
    missed.clear();
    each_lane(block, [&](Lane& lane, Slice& slice) {
      missing += lane.pull(slice, values, missed);
      make_room(lane);
    });
    if (missed.empty()) return;
    const std::unique_ptr<std::byte[]> bytes = read(missed);
    each_of_lane(missed, [&](Lane& lane, std::span<const MissedRow> rows) {
      missing += lane.finish_pull(rows, values);
      make_room(lane);
    });
  });
  make_room();
  pulled_ += keys.size();
  missed_ += missing;
}

std::uint64_t EmbeddingTable::missing(Keys keys) const {
  std::uint64_t count = 0;
  each_block(keys, [&](KeysByLane& block) {
    each_lane(block, [&](const Lane& lane, Slice& slice) { count += lane.missing(slice); });
  });
  return count;
}

}  // namespace phalanx
