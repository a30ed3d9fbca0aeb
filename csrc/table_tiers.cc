// Rows that leave memory for the lane's file.
//
// Those that came from the file lately are in a queue of their own (table_misses.cc), and leave at its end. Over the
// others a hand goes round in the index (CLOCK): a row that no call named since the hand was there last leaves.

#include <algorithm>

#include "table_lane.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kPieceEntries = 256;  // that the hand looks at in one step

}  // namespace

// Says that a row is in memory at this place, with new content, and in the file no more.
void Lane::take_out(Entry& entry, std::uint32_t place) {
  file_.discard(entry.record());
  entry.row = place;
  bump(resident_, 1);
}

// A place in the slab, of undefined content.
std::uint32_t Lane::take_place() {
  const std::uint32_t place = slab_.take();
  if (!spec_.spills()) return place;
  if (place >= marks_.size()) {
    const std::size_t places = std::max<std::size_t>(place + 1, marks_.size() * 5 / 4);
    copies_.resize(places);
    marks_.resize(places);
  }
  marks_[place] = 0;
  return place;
}

void Lane::make_room(std::uint64_t bytes) {
  if (!refusal().empty()) return;
  const std::uint64_t row_bytes = spec_.row_bytes();
  std::uint64_t rows = (bytes + row_bytes - 1) / row_bytes;
  while (rows > 0 && resident() > 0) {
    const bool is_fresh = fresh_.size() > fresh_limit() || resident() == fresh_rows_;
    const std::uint64_t left = is_fresh ? retire() : sweep();
    if (!file_.failure().empty()) return;
    rows -= std::min(rows, left);
  }
  compact();
}

std::string Lane::refusal() {
  return file_.failure().empty() || file_.make_room() ? "" : file_.failure();
}

// Advances the hand by one piece of a shard; returns how many rows left memory.
std::uint64_t Lane::sweep() {
  if (hand_.piece >= hand_.pieces) {
    const int part = (hand_.part + 1) % kParts;
    hand_ = {part, 0, index_.used(part) / kPieceEntries + 1};
  }
  std::vector<Entry*> leave;
  index_.each_in(hand_.part, hand_.piece++, hand_.pieces, [&](Entry& entry) {
    if (!entry.is_in_memory()) return;
    std::uint8_t& marks = marks_[entry.row];
    if ((marks & kFresh) != 0) return;
    if ((marks & kReferred) != 0) {
      marks &= static_cast<std::uint8_t>(~kReferred);
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
  ++departures_;
  return true;
}

// Puts new content in place of a row's record. A row that the file does not take is in memory then.
void Lane::write_anew(Entry& entry, const std::byte* row) {
  if (!file_.make_room()) {
    const std::uint32_t place = take_place();
    copy_row(row, slab_.row(place));
    return take_out(entry, place);
  }
  move_record(entry, file_.append(entry.hash, row));
}

// Says that a row in the file has another record.
void Lane::move_record(Entry& entry, std::uint32_t record) {
  const std::uint32_t before = entry.record();
  entry.row = Entry::kStored + record;
  file_.discard(before);
}

// Appends anew what lives in segments that are mostly dead. One with a broken row stays as it is: the call under way has
// changed rows and did not ask for that one. Whoever asks for it is told.
void Lane::compact() {
  while (const std::optional<std::uint32_t> segment = file_.sparse_segment()) {
    const std::vector<LivingRow> rows = living(*segment);
    if (rows.size() != file_.live(*segment)) {
      file_.pass_over(*segment);
      continue;
    }
    for (const LivingRow& row : rows) {
      if (!file_.make_room()) return;
      move_record(*index_.find(row.hash), file_.append_encoded(row.hash, row.encoded));
    }
  }
}

// The rows of a segment that live, where the file has read them; none of one of which such a row is broken. Those that
// are in memory as well live there alone from now on.
std::vector<Lane::LivingRow> Lane::living(std::uint32_t segment) {
  try {
    const std::vector<std::uint64_t> hashes = file_.hashes(segment);
    std::vector<LivingRow> rows;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      const auto record = static_cast<std::uint32_t>(file_.first_record(segment) + i);
      const Entry* const entry = index_.find(hashes[i]);
      if (is_copy(*entry, record)) forget_copy(entry->row);
      if (entry->row == Entry::kStored + record) rows.push_back({hashes[i], file_.encoded_row(record, hashes[i])});
    }
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
