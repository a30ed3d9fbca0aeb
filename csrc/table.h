// A table of rows `[values | optimizer state | show, click]` by 64-bit id, made on the first push of an id.
//
// An id is hashed (table_hash.h); the hash picks one of 1024 virtual shards and, with it, one of 16 lanes. A lane has
// an index, a slab of rows and a lock. A call works on blocks of 8192 keys and takes a lane's lock once for all keys of
// a block that belong there; no lock and no locked instruction is met in the loops over rows. It asks for the
// lines of the index of a run of a lane's keys, searches them, asks for the rows and works on these, each in a loop of
// its own: so memory answers many questions at a time.
//
// Semantics: ps/table/table.py. ps/table/reference.py is the twin in NumPy and passes the same tests.
//
// Thread-safety: all methods may be called from any thread; the calling thread does the work. Changes are numbered, and
// each lane takes them in the order of their numbers: so every row sees its changes in one order, whatever threads they
// come from, and changes of several threads work on several lanes at a time. What touches the whole table waits for the
// changes before it and keeps out those behind it. A call that meets a change sees each row before or after it, but may
// see it done for some rows only.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <vector>

#include "table_change.h"
#include "table_lane.h"
#include "table_order.h"
#include "table_spec.h"

namespace phalanx {

// Rows have to leave memory and the files do not take them.
struct TableFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class EmbeddingTable {
 public:
  using Keys = std::span<const std::int64_t>;  // fewer than 2^32, each once

  // Ticks of entries have 32 bits. When they run out, those older than kKeepTicks become one.
  static constexpr std::uint64_t kRenumberAt = (std::uint64_t{1} << 32) - (1 << 16);
  static constexpr std::uint64_t kKeepTicks = std::uint64_t{1} << 31;
  static constexpr std::uint64_t kIndexBytes = 32;  // what an entry counts against the budget

  explicit EmbeddingTable(const TableSpec& spec);
  EmbeddingTable(const EmbeddingTable&) = delete;

  const TableSpec& spec() const { return spec_; }

  // Values and gradients are (keys, dim). Where rows leave memory for files, a row that cannot be read from there is a
  // DamagedRow of these calls and of reads; `push`, `add` and `assign` throw as `require_room` before they change
  // anything.
  void pull(Keys keys, float* values) const;
  std::uint64_t missing(Keys keys) const;  // how many of them have no row
  std::uint64_t push(Keys keys, const Gradients& gradients);  // returns how many gradients were dropped
  void add(Keys keys, const float* deltas);
  void assign(Keys keys, const float* values);

  // A change in three steps, for those who order it among other things: `prepare` does what needs no order, `order`
  // gives out the next places, and `apply` takes one place; it returns how many gradients were dropped. Places that one
  // thread got are applied by it from the first to the last, or given up; it gets none before that, and calls nothing
  // that touches the whole table. The arrays of a change must last until it is applied.
  TableChange prepare(ChangeKind kind, Keys keys, const Gradients& gradients) const;
  Turn order(std::uint64_t count = 1);  // the first of `count` places; the others follow it
  std::uint64_t apply(TableChange& change, Turn turn);
  void give_up(Turn turn);

  // Throws TableFull if rows take more than max_bytes and a file takes none; it says where and why.
  void require_room() const;
  // Throws it if a file takes no rows and `shrink` writes some: those in files, if they have show and click.
  void require_room_to_shrink() const;

  // Returns how many rows went; throws as `require_room_to_shrink` before it changes anything.
  std::uint64_t shrink();
  void clear();

  // REQUIRES: 0 <= shard < 1024; a restored shard's keys belong to it. Shards may be restored side by side.
  ShardColumns read(int shard, std::uint64_t since) const;
  void restore(int shard, const ShardView& columns);
  std::vector<std::int64_t> keys(int shard) const;

  // Keeps the table as it is now, to be read while changes continue, and returns the moment's number. Shards of it are
  // read once each, as `read` with this `since` would have read them, by any threads; `end_moment` then lets go of it.
  // Throws std::out_of_range without such a moment, and std::logic_error for a shard that was read.
  // REQUIRES: no shard is restored meanwhile, and a moment ends when none of its shards is being read.
  std::uint64_t begin_moment(std::uint64_t since);
  ShardColumns read_moment(std::uint64_t moment, int shard) const;
  void end_moment(std::uint64_t moment);

  std::uint64_t rows() const;
  std::uint64_t bytes() const;
  std::uint64_t stored() const;  // rows that are in files
  std::uint64_t file_bytes() const;
  std::uint64_t file_reads() const;  // rows that pulls and changes took from files
  std::uint64_t moved() const;  // entries that growing indexes have moved
  std::uint64_t pulled() const { return pulled_; }
  std::uint64_t missed() const { return missed_; }  // keys of pulls that had no row
  std::uint64_t pushed() const { return pushed_; }
  std::uint64_t dropped() const { return dropped_; }
  std::uint64_t evicted() const { return evicted_; }
  std::uint64_t tick() const { return tick_; }

 private:
  // So many keys of a pull, or of a change in a lane, are worked on together: enough to ask memory for, few enough to
  // stay in the second cache.
  static constexpr std::size_t kBlock = 8192;

  static void check_count(Keys keys);
  template <class Count>
  std::uint64_t sum(Count count) const;
  template <class Work>
  void each_block(Keys keys, Work work) const;
  template <class Work>
  void each_lane(KeysByLane& keys, Work work) const;
  template <class Use>
  auto in_lane(int shard, Use use) const;
  template <class Work>
  void in_turn(Turn turn, Work work);
  template <class Work>
  void as_whole(Turn turn, Work work);
  std::uint64_t change(ChangeKind kind, Keys keys, const Gradients& gradients);
  std::uint64_t apply_to(std::size_t lane, TableChange& change, Turn turn);
  Time now(std::uint64_t tick) const { return {tick, oldest_}; }  // REQUIRES: a lane is locked
  void wait_for_changes() const;  // REQUIRES: clock_ is locked
  void go_to(std::uint64_t tick);  // REQUIRES: clock_ is locked
  std::uint64_t index_cost() const;
  std::uint64_t cost() const;
  std::unique_ptr<std::byte[]> read(std::span<MissedRow> rows) const;
  void bring_in(KeysByLane& keys) const;
  void bring_in(Lane& lane, Slice slice) const;
  template <class Use>
  void each_of_lane(std::span<const MissedRow> rows, Use use) const;
  std::uint64_t excess(const Lane& lane, std::uint64_t more) const;
  void make_room(Lane& lane, std::uint64_t more = 0) const;
  void make_room() const;
  void require_files(const std::string& why) const;
  void evict(std::uint64_t tick);

  const TableSpec spec_;
  const Starter starter_;
  Arena arena_;
  std::array<std::unique_ptr<Lane>, kLanes> lanes_;
  std::array<LaneOrder, kLanes> orders_;
  std::mutex clock_;  // locked before lanes, and these in their order
  std::uint64_t ordered_ = 0;  // places given out
  std::uint64_t moments_ = 0;  // that have begun
  std::atomic<std::uint64_t> tick_ = 0;
  std::uint64_t oldest_ = 0;  // changes with clock_ and every lane locked
  mutable ReadQueues reads_;
  mutable std::atomic<std::uint64_t> pulled_ = 0;
  mutable std::atomic<std::uint64_t> missed_ = 0;
  std::atomic<std::uint64_t> pushed_ = 0;
  std::atomic<std::uint64_t> dropped_ = 0;
  std::atomic<std::uint64_t> evicted_ = 0;
};

}  // namespace phalanx
