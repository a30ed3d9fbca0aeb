// One lane of a table: its index, its rows, and what each call does to them.
//
// Of a table that spills, rows leave memory for the lane's file (table_file.h) and come back when they change, or are
// pulled; which are where changes nothing that can be read. See table_tiers.cc for how they leave and table_misses.cc for
// how they come back.
//
// Not thread-safe: every method but `rows`, `resident`, `stored`, `entries` and `file` REQUIRES that the caller holds `lock`.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "table_columns.h"
#include "table_file.h"
#include "table_index.h"
#include "table_memory.h"
#include "table_moment.h"
#include "table_rules.h"
#include "table_spec.h"
#include "table_values.h"

namespace phalanx {

// The keys of one call that belong to one lane.
struct Slice {
  std::span<const std::uint64_t> hashes;
  std::span<const std::uint32_t> positions;  // of each key in the call
  std::span<std::uint32_t> rows;             // of each key: a row as an entry has it, or Entry::kEmpty
  std::uint64_t departures = 0;              // of the lane, when it had all rows of these keys in memory; 0 for unknown
};

// Gradients and what comes with them; the last three may be null, and have one value per key of the call.
struct Gradients {
  const float* values = nullptr;
  double lr = 0;
  const std::uint32_t* counts = nullptr;
  const float* shows = nullptr;
  const float* clicks = nullptr;
};

class Lane {
 public:
  Lane(const TableSpec& spec, const Starter& starter, Arena& arena, int number);

  mutable std::mutex lock;

  // Returns how many keys have no row. Those whose rows are to be read from the file are added to `missed`: their values
  // come with `finish_pull`, which has such a return value too.
  std::uint64_t pull(Slice& slice, float* out, std::vector<MissedRow>& missed);
  std::uint64_t finish_pull(std::span<const MissedRow> rows, float* out);
  // The same of a change, before it: what it names and has to be read, and what then came. Both return whether all rows
  // they were to find are in memory or in `missed`.
  bool find_missed(Slice& slice, std::vector<MissedRow>& missed) const;
  bool bring_in(std::span<const MissedRow> rows);
  std::uint64_t departures() const { return departures_; }  // how often rows have left memory, and 1
  std::uint64_t missing(Slice& slice) const;
  // Returns how many were dropped.
  std::uint64_t push(Slice& slice, const Gradients& gradients, const UpdateRule& rule, Time time);
  void add(Slice& slice, const float* deltas, Time time);
  void assign(Slice& slice, const float* values, Time time);

  // Of one shard of the lane; the first three return how many rows went.
  std::uint64_t end_day(int part, Time time);
  std::uint64_t drop_eighth(int part, Time time);
  std::uint64_t drop_part(int part, Time time);
  ShardColumns read(int part, std::uint64_t since, Time time);
  std::vector<std::int64_t> keys(int part) const;

  // Restores a shard in three steps, of which the second one may be done for a part of the rows at a time.
  void begin_restore(int part, const ShardView& columns, Time time);
  void restore_rows(const ShardView& columns, std::size_t first, std::size_t count, Time time);
  void restore_waiting(const ShardView& columns, Time time);

  // Moves rows to the file until they take so many bytes of memory less, or until the file takes no more; and empties
  // segments of the file that are mostly dead.
  void make_room(std::uint64_t bytes);
  // Why the file takes no rows; empty where it does, perhaps again.
  std::string refusal();

  // Keeps what the lane is now to be read while changes continue (table_moment.h). `read_next` returns false when all
  // pieces were read; `end_reading` returns the hashes of what went. Throws std::out_of_range without such a moment,
  // and std::logic_error for a shard that was read.
  void begin_moment(std::uint64_t number, std::uint64_t since, Time time);
  ShardReading begin_reading(std::uint64_t number, int part) const;
  bool read_next(std::uint64_t number, int part, Piece& piece);
  std::vector<std::uint64_t> end_reading(std::uint64_t number, int part);
  void end_moment(std::uint64_t number);

  void clear(Time time);
  // Takes all ticks before `oldest` for it; `before` is what ticks were counted from so far.
  void renumber(std::uint64_t oldest, std::uint64_t before);

  std::uint64_t rows() const { return rows_.load(std::memory_order_relaxed); }
  std::uint64_t resident() const { return resident_.load(std::memory_order_relaxed); }  // rows in memory
  std::uint64_t stored() const {  // rows in the file
    const std::uint64_t all = rows();
    return all - std::min(all, resident());
  }
  std::uint64_t entries() const { return entries_.load(std::memory_order_relaxed); }
  std::uint64_t bytes() const;
  const RowFile& file() const { return file_; }
  std::uint64_t file_reads() const { return file_reads_; }  // rows that pulls and changes took from the file
  std::uint64_t moved() const { return index_.moved(); }

 private:
  // A count that one thread at a time changes and any may read.
  using Count = std::atomic<std::uint64_t>;
  static void bump(Count& count, std::int64_t by) {
    count.store(count.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(by), std::memory_order_relaxed);
  }

  template <class Use>
  void find_rows(Slice& slice, Use use) const;
  template <class Use>
  void change_rows(Slice& slice, Use use);
  template <class Use>
  void each_row(const Slice& slice, std::size_t bytes, Use use) const;
  template <class Rule>
  void train(const Slice& slice, const Gradients& gradients, Time time, const Rule& rule);

  void look_up(Slice& slice) const;
  std::uint64_t pull_resident(const Slice& slice, float* out);
  void bring_in(Slice& slice);
  // In table_misses.cc.
  void bring_in(std::span<Entry* const> entries);
  void pull_stored(const Slice& slice, std::span<const std::size_t> keys, float* out);
  template <class Use>
  void each_missed(const Slice& slice, std::vector<MissedRow>& missed, Use use) const;
  void ask_index(std::span<const MissedRow> rows) const;
  std::uint64_t pull_anew(const MissedRow& row, float* out);
  Entry* unchanged(const MissedRow& row) const;
  void keep_read(Entry& entry, const std::byte* row);
  void settle(Entry& entry, std::uint32_t place);
  void note_pulled(const Slice& slice);
  void note_changed(const Slice& slice);
  bool is_copy(const Entry& entry, std::uint32_t record) const;
  void forget_copy(std::uint32_t place);
  void leave_place(std::uint32_t place);
  std::uint64_t fresh_limit() const;
  bool retire();
  // In table_tiers.cc.
  void take_out(Entry& entry, std::uint32_t place);
  std::uint32_t take_place();
  std::uint64_t sweep();
  bool move_out(Entry& entry);
  void write_anew(Entry& entry, const std::byte* row);
  void move_record(Entry& entry, std::uint32_t record);
  void compact();
  struct LivingRow {
    std::uint64_t hash;
    const std::byte* encoded;
  };
  std::vector<LivingRow> living(std::uint32_t segment);
  void read_row(const Entry& entry, std::byte* to);
  template <class Use>
  void each_stored(int part, Use use);

  std::uint64_t admit(Slice& slice, const std::uint32_t* counts, Time time);
  Entry* admit_one(Entry* entry, std::uint64_t hash, std::uint32_t count);
  void make(Slice& slice, Time time);
  Entry* occupied(Entry* entry, std::uint64_t hash);
  Entry* with_row(Entry* entry, std::uint64_t hash);
  Entry* with_place(Entry* entry, std::uint64_t hash);
  void keep(std::byte* row, std::uint64_t hash, std::uint64_t tick, const float* values);

  bool admits(std::uint64_t hash) const;
  void start_values(std::uint64_t hash, float* values) const;
  std::vector<Entry> all_of(int part) const;
  // What an id that went is remembered by.
  struct Removed {
    std::uint64_t hash;
    std::uint64_t tick;
  };

  struct Expiry {
    bool is_known = false;
    std::uint64_t tick = 0;
  };

  Expiry expiry(int part, std::uint64_t days) const;
  bool is_low(const std::byte* row) const;
  bool knows_decays(int part, std::uint64_t since) const;
  std::uint64_t days_since(int part, std::uint64_t since) const;
  void decay(int part, std::uint64_t times);
  std::uint64_t drop(std::span<const Entry> entries);
  std::uint64_t remove(int part, std::span<const Entry> entries, Time time);
  std::uint64_t give_back(std::span<const Entry> entries);

  struct Gathered {
    Entry entry;
    std::byte* row;  // in memory; null for none there
  };

  PastShard past_of(int part, std::uint64_t since, Time time) const;
  bool read_next(PastShard& past, int part, Piece& piece);
  bool read_piece(PastShard& past, int part, Piece& piece);
  void gather(const PastShard& past, int part, std::uint32_t old, Piece& piece);
  void preserve(std::span<const Entry> entries);
  void preserve_one(PastShard& past, const Entry& entry);
  void preserve_touched();
  void read_early(int part);
  void keep_removed(PastShard& past, int part) const;
  std::vector<std::uint64_t> removed_at(const PastShard& past, int part) const;
  void watch();
  void forget(PastShard& past);
  void give_back_old(std::uint32_t old);
  OldEntry& old_entry(std::uint32_t number) const { return *reinterpret_cast<OldEntry*>(old_entries_.row(number)); }
  void copy_row(const std::byte* from, std::byte* to) const;
  std::size_t past_bytes() const;

  float* floats(std::byte* row) const { return reinterpret_cast<float*>(row + value_bytes_); }
  const float* floats(const std::byte* row) const { return reinterpret_cast<const float*>(row + value_bytes_); }
  std::int64_t id_of(std::uint64_t hash) const { return static_cast<std::int64_t>(unmix64(hash) ^ spec_.salt); }

  const TableSpec& spec_;
  const Starter& starter_;
  const std::size_t value_bytes_;
  LaneIndex index_;
  Slab slab_;
  std::array<std::vector<std::uint64_t>, kParts> days_;  // ticks at which days began, the one under way first
  std::array<std::vector<Removed>, kParts> removed_;     // in the order in which they went
  std::array<std::uint64_t, kParts> swept_{};  // tick of the last change that neither rows, `removed_` nor `days_` tell
  std::map<std::uint64_t, std::array<PastShard, kParts>> moments_;  // open ones by number
  Slab old_entries_;
  RowFile file_;
  // Of a row in memory, by its place in the slab.
  static constexpr std::uint8_t kReferred = 1;  // a call named it since the hand was there
  static constexpr std::uint8_t kFresh = 2;     // it came from the file and is in `fresh_`
  static constexpr std::uint8_t kCopied = 4;    // and has not changed since: `copies_` has its record
  struct Fresh {
    std::uint64_t hash;
    std::uint32_t place;
  };
  std::vector<std::uint8_t> marks_;
  std::vector<std::uint32_t> copies_;  // records, by place too
  std::deque<Fresh> fresh_;          // what came from the file, the oldest first; some have left since
  std::uint64_t fresh_rows_ = 0;     // rows that are marked so
  std::uint64_t departures_ = 1;
  struct {
    int part = 0;
    std::uint64_t piece = 0, pieces = 0;
  } hand_;                           // what `sweep` looks at next
  std::uint64_t watched_ = 0;        // entries of a shortened tick below this may belong to a moment
  std::vector<Entry> touched_;       // what the call under way changes of those, as they were
  std::vector<Gathered> gathered_;   // what is being read
  Count rows_ = 0;
  Count resident_ = 0;
  std::uint64_t file_reads_ = 0;
  Count entries_ = 0;
};

}  // namespace phalanx
