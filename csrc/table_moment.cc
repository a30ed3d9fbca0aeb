#include "table_moment.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "table_lane.h"

namespace phalanx {
namespace {

constexpr std::size_t kPieceEntries = 256, kPieceBytes = 32 << 10;  // about as many as are read under one lock
// How far ahead of its use a row is asked of memory.
constexpr std::size_t kRowsAhead = 16;

}  // namespace

ShardReading::ShardReading(const TableSpec& spec, const PastShard& past) : spec_(spec), oldest_(past.time.oldest) {
  columns_.tick = past.time.tick;
  columns_.is_complete = past.is_complete;
  columns_.days = past.days;
  columns_.decays = past.decays;
  // Room for all: the system gives pages as they are written.
  columns_.rows = std::make_unique_for_overwrite<float[]>(past.used * spec.width());
  next_row_ = columns_.rows.get();
}

void ShardReading::add(const Piece& piece) {
  const std::size_t value_bytes = spec_.value_bytes(), others = spec_.width() - spec_.dim;
  const std::byte* row = piece.rows.data();
  for (const Entry& entry : piece.entries) {
    const auto id = static_cast<std::int64_t>(unmix64(entry.hash) ^ spec_.salt);
    const std::uint64_t tick = oldest_ + entry.tick;
    if (!columns_.is_complete) hashes_.push_back(entry.hash);
    if (!entry.has_row()) {
      columns_.waiting_keys.push_back(id);
      columns_.waiting_ticks.push_back(tick);
      columns_.waiting_counts.push_back(entry.waited());
      continue;
    }
    columns_.keys.push_back(id);
    columns_.ticks.push_back(tick);
    load_values(row, spec_.is_bfloat16, next_row_, spec_.dim);
    copy_floats(reinterpret_cast<const float*>(row + value_bytes), next_row_ + spec_.dim, others);
    row += spec_.row_bytes();
    next_row_ += spec_.width();
  }
}

ShardColumns ShardReading::finish(std::vector<std::uint64_t> removed) {
  std::sort(removed.begin(), removed.end());
  removed.erase(std::unique(removed.begin(), removed.end()), removed.end());
  for (const std::uint64_t hash : removed) {
    if (std::binary_search(hashes_.begin(), hashes_.end(), hash)) continue;
    columns_.removed.push_back(static_cast<std::int64_t>(unmix64(hash) ^ spec_.salt));
  }
  return std::move(columns_);
}

void Lane::begin_moment(std::uint64_t number, std::uint64_t since, Time time) {
  std::array<PastShard, kParts>& shards = moments_[number];
  for (int part = 0; part < kParts; ++part) shards[static_cast<std::size_t>(part)] = past_of(part, since, time);
  watch();
}

void Lane::end_moment(std::uint64_t number) {
  for (PastShard& past : moments_.at(number)) forget(past);
  moments_.erase(number);
  if (moments_.empty()) old_entries_.clear();
  watch();
}

ShardReading Lane::begin_reading(std::uint64_t number, int part) const {
  const PastShard& past = moments_.at(number)[static_cast<std::size_t>(part)];
  if (past.is_read) throw std::logic_error("a shard is read once at each moment");
  return {spec_, past};
}

bool Lane::read_next(std::uint64_t number, int part, Piece& piece) {
  return read_next(moments_.at(number)[static_cast<std::size_t>(part)], part, piece);
}

std::vector<std::uint64_t> Lane::end_reading(std::uint64_t number, int part) {
  PastShard& past = moments_.at(number)[static_cast<std::size_t>(part)];
  std::vector<std::uint64_t> removed = removed_at(past, part);
  past = PastShard();
  past.is_read = true;
  watch();
  return removed;
}

ShardColumns Lane::read(int part, std::uint64_t since, Time time) {
  PastShard past = past_of(part, since, time);
  ShardReading reading(spec_, past);
  for (Piece piece; read_next(past, part, piece);) reading.add(piece);
  return reading.finish(removed_at(past, part));
}

// What a shard is now.
PastShard Lane::past_of(int part, std::uint64_t since, Time time) const {
  PastShard past;
  past.time = time;
  past.since = since;
  past.is_complete = since == 0 || since < std::max(swept_[part], time.oldest) || !knows_decays(part, since);
  past.from = past.is_complete ? 0 : time.shortened(since + 1);
  past.until = time.shortened(time.tick);
  past.used = index_.used(part);
  past.pieces = past.used / std::clamp<std::size_t>(kPieceBytes / spec_.row_bytes(), 1, kPieceEntries) + 1;
  past.days = days_[part];
  if (!past.is_complete && spec_.has_statistics) past.decays = days_since(part, since);
  return past;
}

// Returns false when all was read.
bool Lane::read_next(PastShard& past, int part, Piece& piece) {
  if (past.early.empty()) return read_piece(past, part, piece);
  piece = std::move(past.early.front());
  past.early.pop_front();
  return true;
}

// The same for what was not read early.
bool Lane::read_piece(PastShard& past, int part, Piece& piece) {
  if (!past.is_left()) return false;
  const std::uint32_t old = past.old.empty() ? 0 : past.old[past.next];
  gather(past, part, old, piece);
  give_back_old(old);
  ++past.next;
  return true;
}

// Copies what the next piece had at the moment: entries that have not changed since, and the old ones.
void Lane::gather(const PastShard& past, int part, std::uint32_t old, Piece& piece) {
  gathered_.clear();
  index_.each_in(part, past.next, past.pieces, [&](const Entry& entry) {
    if (past.had(entry)) gathered_.push_back({entry, entry.is_in_memory() ? slab_.row(entry.row) : nullptr});
  });
  for (; old != 0; old = old_entry(old).next) {
    OldEntry& kept = old_entry(old);
    gathered_.push_back({kept.entry, reinterpret_cast<std::byte*>(&kept + 1)});
  }
  std::sort(gathered_.begin(), gathered_.end(), [](const auto& a, const auto& b) { return a.entry.hash < b.entry.hash; });
  const std::size_t row_bytes = spec_.row_bytes();
  piece.entries.clear();
  piece.rows.resize(gathered_.size() * row_bytes);
  std::byte* out = piece.rows.data();
  std::vector<StoredRow> stored;
  for (std::size_t i = 0; i < gathered_.size(); ++i) {
    if (i + kRowsAhead < gathered_.size() && gathered_[i + kRowsAhead].row != nullptr) {
      prefetch(gathered_[i + kRowsAhead].row, row_bytes);
    }
    const Gathered& from = gathered_[i];
    piece.entries.push_back(from.entry);
    if (!from.entry.has_row()) continue;
    if (from.row != nullptr) copy_row(from.row, out);
    else stored.push_back({from.entry.record(), from.entry.hash, out});
    out += row_bytes;
  }
  file_.read(stored);
}

// Keeps what open moments have of entries that are about to change. REQUIRES: nothing else has changed in them yet.
void Lane::preserve(std::span<const Entry> entries) {
  for (auto& [number, shards] : moments_) {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (i + kRowsAhead < entries.size() && entries[i + kRowsAhead].is_in_memory()) {
        prefetch(slab_.row(entries[i + kRowsAhead].row), spec_.row_bytes());
      }
      PastShard& past = shards[static_cast<std::size_t>(part_of(entries[i].hash))];
      if (past.needs(entries[i])) preserve_one(past, entries[i]);
    }
  }
}

void Lane::preserve_touched() {
  if (touched_.empty()) return;
  preserve(touched_);
  touched_.clear();
}

void Lane::preserve_one(PastShard& past, const Entry& entry) {
  if (past.old.empty()) past.old.resize(past.pieces);
  const std::uint32_t number = old_entries_.take();
  std::uint32_t& newest = past.old[piece_of(entry.hash, past.pieces)];
  OldEntry& kept = old_entry(number);
  kept = {entry, newest};
  if (entry.has_row()) read_row(entry, reinterpret_cast<std::byte*>(&kept + 1));
  newest = number;
}

// Reads what open moments have of a shard that is about to change in ways that its ticks do not tell. A read that fails
// leaves them whole.
void Lane::read_early(int part) {
  for (auto& [number, shards] : moments_) {
    PastShard& past = shards[static_cast<std::size_t>(part)];
    keep_removed(past, part);
    for (Piece piece; read_piece(past, part, piece);) past.early.push_back(std::move(piece));
  }
  if (!moments_.empty()) watch();
}

// Notes what went before a moment, because the shard is about to forget some of it.
void Lane::keep_removed(PastShard& past, int part) const {
  if (!past.is_complete && !past.removed) past.removed = removed_at(past, part);
}

std::vector<std::uint64_t> Lane::removed_at(const PastShard& past, int part) const {
  if (past.removed) return *past.removed;
  std::vector<std::uint64_t> hashes;
  if (past.is_complete) return hashes;
  for (const Removed& gone : removed_[part]) {
    if (gone.tick > past.since && gone.tick <= past.time.tick) hashes.push_back(gone.hash);
  }
  return hashes;
}

// Notes up to which tick changes have to look for moments.
void Lane::watch() {
  watched_ = 0;
  for (const auto& [number, shards] : moments_) {
    for (const PastShard& past : shards) {
      if (past.is_left()) watched_ = std::max(watched_, std::uint64_t{past.until} + 1);
    }
  }
}

void Lane::forget(PastShard& past) {
  for (; past.is_left() && !past.old.empty(); ++past.next) give_back_old(past.old[past.next]);
}

void Lane::give_back_old(std::uint32_t old) {
  while (old != 0) {
    const std::uint32_t next = old_entry(old).next;
    old_entries_.give_back(old);
    old = next;
  }
}

void Lane::copy_row(const std::byte* from, std::byte* to) const {
  copy_floats(reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to), spec_.row_bytes() / sizeof(float));
}

std::size_t Lane::past_bytes() const {
  std::size_t bytes = old_entries_.bytes();
  for (const auto& [number, shards] : moments_) {
    for (const PastShard& past : shards) {
      for (const Piece& piece : past.early) bytes += piece.rows.capacity() + piece.entries.capacity() * sizeof(Entry);
    }
  }
  return bytes;
}

}  // namespace phalanx
