// Rows that come back from the lane's file.
//
// A pull and a change look for rows under the lane's lock, read those that are in the file without it, for all lanes
// together (table_reads.h), and come back to the lock with what they read. A row that has changed its place meanwhile is
// looked for again, and read under the lock.
//
// A row that was read enters a queue of an eighth of the rows in memory: there its push finds it. It leaves at the end of
// the queue, but for one that was named again meanwhile, which joins the rows the hand goes over; so does at once a row
// that leaves and comes back. As long as it does not change its record stays, and leaving costs no write. So ids that are
// read once, by an evaluation say, push nothing else out.

#include "table_lane.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kFreshShare = 8;  // of the rows that there is memory for, one in so many is in the queue

}  // namespace

// Adds the keys of a slice whose rows are to be read from the file; calls use(i) for each whose segment is in memory.
template <class Use>
void Lane::each_missed(const Slice& slice, std::vector<MissedRow>& missed, Use use) const {
  for (std::size_t i = 0; i < slice.rows.size(); ++i) {
    if (!Entry::is_stored(slice.rows[i])) continue;
    const std::uint32_t record = slice.rows[i] - Entry::kStored;
    if (file_.is_written(record)) missed.push_back(file_.missed(record, slice.hashes[i], slice.positions[i]));
    else use(i);
  }
}

// Asks memory for the entries of rows that were read.
void Lane::ask_index(std::span<const MissedRow> rows) const {
  for (const MissedRow& row : rows) __builtin_prefetch(index_.home(row.hash));
}

std::uint64_t Lane::pull(Slice& slice, float* out, std::vector<MissedRow>& missed) {
  look_up(slice);
  const std::uint64_t absent = pull_resident(slice, out);
  if (stored() == 0) return absent;
  std::vector<std::size_t> open;
  each_missed(slice, missed, [&](std::size_t i) { open.push_back(i); });
  pull_stored(slice, open, out);
  return absent;
}

std::uint64_t Lane::finish_pull(std::span<const MissedRow> rows, float* out) {
  std::uint64_t absent = 0;
  std::vector<std::byte> room(spec_.row_bytes());
  ask_index(rows);
  for (const MissedRow& row : rows) {
    Entry* const entry = unchanged(row);
    if (entry == nullptr) {
      absent += pull_anew(row, out);
      continue;
    }
    ++file_reads_;
    const std::byte* const read = file_.row_of(row, room.data());
    load_values(read, spec_.is_bfloat16, out + row.position * spec_.dim, spec_.dim);
    keep_read(*entry, read);
  }
  return absent;
}

// Pulls one key from the beginning, reading under the lock; throws DamagedRow. Returns 1 if it has no row.
std::uint64_t Lane::pull_anew(const MissedRow& row, float* out) {
  std::uint32_t number = Entry::kEmpty;
  Slice slice{{&row.hash, 1}, {&row.position, 1}, {&number, 1}};
  look_up(slice);
  const std::uint64_t absent = pull_resident(slice, out);
  const std::size_t key = 0;
  if (Entry::is_stored(number)) pull_stored(slice, {&key, 1}, out);
  return absent;
}

// Gives the values of those keys of a slice whose rows are in the file.
void Lane::pull_stored(const Slice& slice, std::span<const std::size_t> keys, float* out) {
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
    keep_read(*index_.find(row.hash), row.row);
  }
}

bool Lane::find_missed(Slice& slice, std::vector<MissedRow>& missed) const {
  if (stored() == 0) return true;
  look_up(slice);
  bool is_all = true;
  each_missed(slice, missed, [&](std::size_t) { is_all = false; });
  return is_all;
}

bool Lane::bring_in(std::span<const MissedRow> rows) {
  bool is_all = true;
  std::vector<std::byte> room(spec_.row_bytes());
  ask_index(rows);
  for (const MissedRow& row : rows) {
    Entry* const entry = unchanged(row);
    if (entry != nullptr) {
      ++file_reads_;
      keep_read(*entry, file_.row_of(row, room.data()));
    }
    is_all &= entry != nullptr && entry->is_in_memory();
  }
  return is_all;
}

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
  for (std::size_t i = 0; i < entries.size(); ++i) settle(*entries[i], places[i]);
}

// The entry of a row that was read, if the row is still where it was; else null.
Entry* Lane::unchanged(const MissedRow& row) const {
  if (!row.is_whole) return nullptr;
  Entry* const entry = index_.find(row.hash);
  if (!entry->is_stored() || entry->record() != row.record || file_.use_of(row.record) != row.use) return nullptr;
  return entry;
}

// Keeps a row that was read in memory, unless memory may not be left again: rows that change need it then.
void Lane::keep_read(Entry& entry, const std::byte* row) {
  if (!entry.is_stored() || !file_.failure().empty()) return;
  const std::uint32_t place = take_place();
  copy_row(row, slab_.row(place));
  settle(entry, place);
}

// Says that a row is in memory at this place, where it was copied from the file; once, if a call names an id twice.
void Lane::settle(Entry& entry, std::uint32_t place) {
  if (!entry.is_stored()) return slab_.give_back(place);
  const std::uint32_t record = entry.record();
  if (file_.ask(record)) {
    file_.discard(record);
  } else {
    copies_[place] = record;
    fresh_.push_back({entry.hash, place});
    marks_[place] = kFresh | kCopied;
    ++fresh_rows_;
  }
  entry.row = place;
  bump(resident_, 1);
}

// Lets the first row of the queue leave memory; returns whether it did.
bool Lane::retire() {
  if (fresh_.empty()) return false;
  const Fresh first = fresh_.front();
  Entry* const entry = index_.find(first.hash);
  const bool is_there = entry->row == first.place && (marks_[first.place] & kFresh) != 0;
  if (is_there && (marks_[first.place] & (kCopied | kReferred)) == 0 && !file_.make_room()) return false;
  fresh_.pop_front();
  if (!is_there) return false;
  const std::uint8_t marks = marks_[first.place];
  --fresh_rows_;
  if ((marks & kReferred) != 0) {
    forget_copy(first.place);
    marks_[first.place] = kReferred;  // the hand comes by before the next call, perhaps
    return false;
  }
  if ((marks & kCopied) == 0) {
    move_out(*entry);
    file_.ask(entry->record());
    return true;
  }
  entry->row = Entry::kStored + copies_[first.place];
  slab_.give_back(first.place);
  bump(resident_, -1);
  ++departures_;
  return true;
}

// Notes that a pull named these rows.
void Lane::note_pulled(const Slice& slice) {
  if (!spec_.spills()) return;
  for (const std::uint32_t row : slice.rows) {
    if (Entry::is_in_memory(row)) marks_[row] |= kReferred;
  }
}

// Notes that a change named these rows. The first one of a row that was read is what it was read for.
void Lane::note_changed(const Slice& slice) {
  if (!spec_.spills()) return;
  for (const std::uint32_t row : slice.rows) {
    if (!Entry::is_in_memory(row)) continue;
    if ((marks_[row] & kCopied) != 0) forget_copy(row);
    else marks_[row] |= kReferred;
  }
}

// Whether this record holds what is in memory, too.
bool Lane::is_copy(const Entry& entry, std::uint32_t record) const {
  return entry.is_in_memory() && (marks_[entry.row] & kCopied) != 0 && copies_[entry.row] == record;
}

// Lets the record of a row in memory live no more, if it has one: the row is about to change.
void Lane::forget_copy(std::uint32_t place) {
  if (!spec_.spills() || (marks_[place] & kCopied) == 0) return;
  file_.discard(copies_[place]);
  marks_[place] &= static_cast<std::uint8_t>(~kCopied);
}

// Gives back the place of a row that is no more.
void Lane::leave_place(std::uint32_t place) {
  if (spec_.spills()) {
    forget_copy(place);
    fresh_rows_ -= (marks_[place] & kFresh) != 0;
    marks_[place] = 0;
  }
  slab_.give_back(place);
}

std::uint64_t Lane::fresh_limit() const { return resident() / kFreshShare; }

}  // namespace phalanx
