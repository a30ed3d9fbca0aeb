// Rows that leave memory for the lane's file, and come back.
//
// A hand goes round over the index (CLOCK): a row that no call named since the hand was there last leaves. A row comes
// back before it changes, so that whatever changes rows finds them in memory, and when it is pulled for the second time:
// ids that are read once, by an evaluation say, push nothing out.

#include <algorithm>

#include "table_lane.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kPieceEntries = 256;  // that the hand looks at in one step

}  // namespace

// Brings the rows of these entries, which are in the file, into memory.
void Lane::bring_in(std::span<Entry* const> entries) {
  std::vector<std::uint32_t> places;
  std::vector<StoredRow> rows;
  places.reserve(entries.size());
  rows.reserve(entries.size());
  try {
    for (const Entry* entry : entries) {
      places.push_back(take_place());
      rows.push_back({entry->record(), entry->hash, slab_.row(places.back())});
    }
    file_.read(rows);
  } catch (...) {
    for (const std::uint32_t place : places) slab_.give_back(place);
    throw;
  }
  file_reads_ += rows.size();
  for (std::size_t i = 0; i < entries.size(); ++i) take_out(*entries[i], places[i]);
}

// Says that a row is in memory at this place, and in the file no more; once, if a call names an id twice.
void Lane::take_out(Entry& entry, std::uint32_t place) {
  if (!entry.is_stored()) return slab_.give_back(place);
  file_.discard(entry.record());
  entry.row = place;
  bump(resident_, 1);
}

// Reads the rows of a pull that are in the file; brings in those that were pulled from there before.
void Lane::pull_stored(const Slice& slice, float* out) {
  std::vector<std::size_t> keys;
  for (std::size_t i = 0; i < slice.rows.size(); ++i) {
    if (Entry::is_stored(slice.rows[i])) keys.push_back(i);
  }
  if (keys.empty()) return;
  const std::size_t row_bytes = spec_.row_bytes();
  std::vector<std::byte> bytes(keys.size() * row_bytes);
  std::vector<StoredRow> rows;
  for (const std::size_t i : keys) {
    rows.push_back({slice.rows[i] - Entry::kStored, slice.hashes[i], bytes.data() + rows.size() * row_bytes});
  }
  file_.read(rows);
  file_reads_ += rows.size();
  for (const StoredRow& row : rows) {
    const std::size_t i = keys[static_cast<std::size_t>(row.row - bytes.data()) / row_bytes];
    load_values(row.row, spec_.is_bfloat16, out + slice.positions[i] * spec_.dim, spec_.dim);
    if (file_.ask(row.record) && file_.failure().empty()) {
      const std::uint32_t place = take_place();
      copy_row(row.row, slab_.row(place));
      take_out(*index_.find(row.hash), place);
    }
  }
}

// Notes that a call named these rows.
void Lane::refer_to(const Slice& slice) {
  if (!spec_.spills()) return;
  for (const std::uint32_t row : slice.rows) {
    if (Entry::is_in_memory(row)) referred_[row] = true;
  }
}

// A place in the slab, of undefined content.
std::uint32_t Lane::take_place() {
  const std::uint32_t place = slab_.take();
  if (!spec_.spills()) return place;
  if (place >= referred_.size()) referred_.resize(std::max<std::size_t>(place + 1, referred_.size() * 5 / 4));
  referred_[place] = false;
  return place;
}

void Lane::make_room(std::uint64_t bytes) {
  if (!refusal().empty()) return;
  const std::uint64_t row_bytes = spec_.row_bytes();
  for (std::uint64_t rows = (bytes + row_bytes - 1) / row_bytes; rows > 0 && resident() > 0;) {
    const std::uint64_t left = sweep();
    if (!file_.failure().empty()) return;
    rows -= std::min(rows, left);
  }
  compact();
}

std::string Lane::refusal() {
  return file_.failure().empty() || file_.make_room() ? "" : file_.failure();
}

// Lets the hand go on by one piece of a shard; returns how many rows left memory.
std::uint64_t Lane::sweep() {
  if (hand_.piece >= hand_.pieces) {
    const int part = (hand_.part + 1) % kParts;
    hand_ = {part, 0, index_.used(part) / kPieceEntries + 1};
  }
  std::vector<Entry*> leave;
  index_.each_in(hand_.part, hand_.piece++, hand_.pieces, [&](Entry& entry) {
    if (!entry.is_in_memory()) return;
    if (referred_[entry.row]) {
      referred_[entry.row] = false;
    } else {
      leave.push_back(&entry);
      prefetch(slab_.row(entry.row), spec_.row_bytes());
    }
  });
  std::uint64_t gone = 0;
  while (gone < leave.size() && move_out(*leave[gone])) ++gone;
  return gone;
}

// Moves a row to the file; returns false if the file does not take it.
bool Lane::move_out(Entry& entry) {
  if (!file_.make_room()) return false;
  const std::uint32_t record = file_.append(entry.hash, slab_.row(entry.row));
  slab_.give_back(entry.row);
  entry.row = Entry::kStored + record;
  bump(resident_, -1);
  return true;
}

// Puts new content in place of a row's record. A row that the file does not take is in memory then.
void Lane::write_anew(Entry& entry, const std::byte* row) {
  if (!file_.make_room()) {
    const std::uint32_t place = take_place();
    copy_row(row, slab_.row(place));
    return take_out(entry, place);
  }
  const std::uint32_t before = entry.record();
  entry.row = Entry::kStored + file_.append(entry.hash, row);
  file_.discard(before);
}

// Appends anew what lives in segments that are mostly dead. One with a broken record stays as it is: the call under way
// has changed rows and did not ask for that one, which may be dead. Whoever asks for it is told.
void Lane::compact() {
  while (const std::optional<std::uint32_t> segment = file_.sparse_segment()) {
    std::vector<std::byte> bytes;
    const std::vector<StoredRow> rows = living(*segment, bytes);
    if (rows.size() != file_.live(*segment)) {
      file_.pass_over(*segment);
      continue;
    }
    for (const StoredRow& row : rows) {
      if (!file_.make_room()) return;
      write_anew(*index_.find(row.hash), row.row);
    }
  }
}

// Reads the rows of a segment that live into `bytes`; none of one with a broken record.
std::vector<StoredRow> Lane::living(std::uint32_t segment, std::vector<std::byte>& bytes) {
  try {
    const std::vector<std::uint64_t> hashes = file_.hashes(segment);
    bytes.resize(hashes.size() * spec_.row_bytes());
    std::vector<StoredRow> rows;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      const auto record = static_cast<std::uint32_t>(file_.first_record(segment) + i);
      if (index_.find(hashes[i])->row != Entry::kStored + record) continue;
      rows.push_back({record, hashes[i], bytes.data() + i * spec_.row_bytes()});
    }
    file_.read(rows);
    return rows;
  } catch (const DamagedRow&) {
    return {};
  }
}

// Copies the row of an entry that has one, wherever it is.
void Lane::read_row(const Entry& entry, std::byte* to) {
  if (entry.is_in_memory()) return copy_row(slab_.row(entry.row), to);
  StoredRow row{entry.record(), entry.hash, to};
  file_.read({&row, 1});
}

}  // namespace phalanx
