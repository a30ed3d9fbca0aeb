// What happens to a whole shard of a lane: days, eviction, restore.

#include <algorithm>
#include <tuple>
#include <utility>

#include "table_lane.h"

namespace phalanx {
namespace {

// How far ahead of its use a row is asked of memory.
constexpr std::size_t kRowsAhead = 32;
// Ids that went which a shard remembers; half as many as it has ids where that is more.
constexpr std::size_t kLeastRemoved = 64;
// Rows that are read from the file together.
constexpr std::size_t kBatch = 1024;

}  // namespace

// Calls use(entry, copy of its row) for each entry of a part whose row is in the file, in the order of the file.
template <class Use>
void Lane::each_stored(int part, Use use) {
  if (stored() == 0) return;
  std::vector<Entry*> entries;
  index_.each(part, [&](Entry& entry) {
    if (entry.is_stored()) entries.push_back(&entry);
  });
  std::sort(entries.begin(), entries.end(), [](const Entry* a, const Entry* b) { return a->row < b->row; });
  std::vector<std::byte> bytes(kBatch * spec_.row_bytes());
  for (std::span<Entry*> rest(entries); !rest.empty(); rest = rest.subspan(std::min(rest.size(), kBatch))) {
    std::vector<StoredRow> rows;
    for (const Entry* entry : rest.first(std::min(rest.size(), kBatch))) {
      rows.push_back({entry->record(), entry->hash, bytes.data() + rows.size() * spec_.row_bytes()});
    }
    file_.read(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) use(*rest[i], rows[i].row);
  }
}

std::uint64_t Lane::end_day(int part, Time time) {
  const EntrySpec& policy = spec_.entry;
  decay(part, 1);
  const Expiry of_row = expiry(part, policy.unseen_days), of_waiting = expiry(part, policy.waiting_days);
  const auto is_expired = [&](const Entry& entry) {
    const Expiry& limit = entry.has_row() ? of_row : of_waiting;
    return limit.is_known && time.oldest + entry.tick <= limit.tick;
  };
  std::vector<Entry> gone;
  index_.each(part, [&](const Entry& entry) {
    if (is_expired(entry) || (entry.is_in_memory() && is_low(slab_.row(entry.row)))) gone.push_back(entry);
  });
  if (spec_.has_statistics) {
    each_stored(part, [&](const Entry& entry, const std::byte* row) {
      if (!is_expired(entry) && is_low(row)) gone.push_back(entry);
    });
  }
  std::vector<std::uint64_t>& days = days_[part];
  days.insert(days.begin(), time.tick);
  if (days.size() > policy.days()) days.pop_back();
  return remove(part, gone, time);
}

// What was not seen for so many days: not after this tick, if there were as many.
Lane::Expiry Lane::expiry(int part, std::uint64_t days) const {
  const std::vector<std::uint64_t>& began = days_[part];
  if (days == 0 || began.size() < days) return {};
  return {true, began[days - 1]};
}

// Whether the score of a row is too low.
bool Lane::is_low(const std::byte* row) const {
  if (!spec_.has_statistics) return false;
  const EntrySpec& policy = spec_.entry;
  const float* const statistics = floats(row) + spec_.state();
  const float show = statistics[0], click = statistics[1];
  return policy.show_weight * (show - click) + policy.click_weight * click < policy.drop_below;
}

// Drops the eighth of a shard, rounded up, that was changed longest ago; of one tick, the smallest hashes first.
std::uint64_t Lane::drop_eighth(int part, Time time) {
  std::vector<Entry> entries = all_of(part);
  if (entries.empty()) return 0;
  const std::size_t goes = (entries.size() + 7) / 8;
  const auto older = [](const Entry& a, const Entry& b) { return std::tie(a.tick, a.hash) < std::tie(b.tick, b.hash); };
  std::nth_element(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(goes - 1), entries.end(), older);
  entries.resize(goes);
  return remove(part, entries, time);
}

std::uint64_t Lane::drop_part(int part, Time time) {
  read_early(part);
  const std::uint64_t rows = give_back(all_of(part));
  index_.erase_part(part);
  days_[part].clear();
  removed_[part].clear();
  swept_[part] = time.tick;
  return rows;
}

// Drops entries as a change does, so that a delta can tell which went.
std::uint64_t Lane::remove(int part, std::span<const Entry> entries, Time time) {
  preserve(entries);
  const std::uint64_t rows = drop(entries);
  std::vector<Removed>& removed = removed_[part];
  for (const Entry& entry : entries) removed.push_back({entry.hash, time.tick});
  const std::size_t most = std::max<std::size_t>(kLeastRemoved, index_.used(part) / 2);
  if (removed.size() > most) {
    for (auto& [number, shards] : moments_) keep_removed(shards[static_cast<std::size_t>(part)], part);
    swept_[part] = removed[removed.size() - most - 1].tick;
    std::erase_if(removed, [&](const Removed& one) { return one.tick <= swept_[part]; });
    removed.shrink_to_fit();
  }
  return rows;
}

std::uint64_t Lane::drop(std::span<const Entry> entries) {
  for (const Entry& entry : entries) index_.erase(entry.hash);
  return give_back(entries);
}

// Gives back the rows of entries that the index loses; returns how many there were.
std::uint64_t Lane::give_back(std::span<const Entry> entries) {
  std::int64_t rows = 0, resident = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i + kRowsAhead < entries.size() && entries[i + kRowsAhead].is_in_memory()) {
      __builtin_prefetch(slab_.row(entries[i + kRowsAhead].row), 1);
    }
    if (entries[i].is_in_memory()) leave_place(entries[i].row);
    if (entries[i].is_stored()) file_.discard(entries[i].record());
    rows += entries[i].has_row();
    resident += entries[i].is_in_memory();
  }
  bump(rows_, -rows);
  bump(resident_, -resident);
  bump(entries_, -static_cast<std::int64_t>(entries.size()));
  return static_cast<std::uint64_t>(rows);
}

void Lane::clear(Time time) {
  for (int part = 0; part < kParts; ++part) drop_part(part, time);
  slab_.clear();
  index_ = LaneIndex();
  file_.clear();
  marks_ = {};
  fresh_ = {};
  fresh_rows_ = 0;
  copies_ = {};
  hand_ = {};
}

std::vector<Entry> Lane::all_of(int part) const {
  std::vector<Entry> entries;
  entries.reserve(index_.used(part));
  index_.each(part, [&](const Entry& entry) { entries.push_back(entry); });
  return entries;
}

std::vector<std::int64_t> Lane::keys(int part) const {
  std::vector<Entry> entries = all_of(part);
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.hash < b.hash; });
  std::vector<std::int64_t> ids;
  for (const Entry& entry : entries) {
    if (entry.has_row()) ids.push_back(id_of(entry.hash));
  }
  return ids;
}

void Lane::begin_restore(int part, const ShardView& columns, Time time) {
  read_early(part);
  if (columns.is_complete) {
    drop_part(part, time);
  } else {
    decay(part, columns.decays);
    for (const std::int64_t id : columns.removed) {
      const Entry found = *index_.find(hash_of(id, spec_.salt));
      if (!found.is_empty()) drop({&found, 1});
    }
    removed_[part].clear();
  }
  days_[part].assign(columns.days.begin(), columns.days.end());
  for (std::uint64_t& day : days_[part]) day = std::max(day, time.oldest);
  swept_[part] = time.tick;
  index_.reserve(part, columns.keys.size() + columns.waiting_keys.size());
}

void Lane::restore_rows(const ShardView& columns, std::size_t first, std::size_t count, Time time) {
  const std::size_t width = spec_.width();
  for (std::size_t i = first; i < first + count; ++i) {
    const std::uint64_t hash = hash_of(columns.keys[i], spec_.salt);
    Entry* entry = index_.find(hash);
    if (entry->is_stored()) take_out(*entry, take_place());
    else if (entry->is_in_memory()) forget_copy(entry->row);
    if (!entry->has_row()) entry = with_place(entry, hash);
    entry->tick = time.shortened(columns.ticks[i]);
    const float* const row = columns.rows + i * width;
    store_nearest(slab_.row(entry->row), spec_.is_bfloat16, row, spec_.dim);
    std::copy_n(row + spec_.dim, width - spec_.dim, floats(slab_.row(entry->row)));
  }
}

void Lane::restore_waiting(const ShardView& columns, Time time) {
  for (std::size_t i = 0; i < columns.waiting_keys.size(); ++i) {
    const std::uint64_t hash = hash_of(columns.waiting_keys[i], spec_.salt);
    const Entry found = *index_.find(hash);
    if (found.has_row()) drop({&found, 1});
    Entry* const entry = occupied(index_.find(hash), hash);
    entry->row = Entry::kWaiting + columns.waiting_counts[i];
    entry->tick = time.shortened(columns.waiting_ticks[i]);
  }
}

std::uint64_t Lane::days_since(int part, std::uint64_t since) const {
  const std::vector<std::uint64_t>& days = days_[part];
  return static_cast<std::uint64_t>(std::count_if(days.begin(), days.end(), [&](auto day) { return day > since; }));
}

// Whether all days after a tick are remembered, so that a reader can decay what did not change.
bool Lane::knows_decays(int part, std::uint64_t since) const {
  return !spec_.has_statistics || days_since(part, since) < spec_.entry.unseen_days;
}

void Lane::decay(int part, std::uint64_t times) {
  if (!spec_.has_statistics || times == 0) return;
  read_early(part);
  const auto age = [&](std::byte* row) {
    float* const statistics = floats(row) + spec_.state();
    for (std::uint64_t i = 0; i < times; ++i) {
      statistics[0] *= spec_.entry.decay;
      statistics[1] *= spec_.entry.decay;
    }
  };
  index_.each(part, [&](const Entry& entry) {
    if (!entry.is_in_memory()) return;
    forget_copy(entry.row);
    age(slab_.row(entry.row));
  });
  each_stored(part, [&](Entry& entry, std::byte* row) {
    age(row);
    write_anew(entry, row);
  });
}

std::uint64_t Lane::bytes() const {
  std::size_t removed = 0;
  for (const std::vector<Removed>& of_part : removed_) removed += of_part.capacity();
  return index_.bytes() + slab_.bytes() + past_bytes() + removed * sizeof(Removed) + file_.memory_bytes() +
         marks_.capacity() + fresh_.size() * sizeof(Fresh) + copies_.capacity() * sizeof(copies_[0]);
}

void Lane::renumber(std::uint64_t oldest, std::uint64_t before) {
  const Time now{0, oldest};
  for (int part = 0; part < kParts; ++part) {
    read_early(part);
    index_.each(part, [&](Entry& entry) { entry.tick = now.shortened(before + entry.tick); });
    for (std::uint64_t& day : days_[part]) day = std::max(day, oldest);
  }
}

}  // namespace phalanx
