#include "table.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <stdexcept>

namespace phalanx {
namespace {

// So many rows are restored before those that there is no room for leave memory.
constexpr std::size_t kRestored = 1024;
// The most bytes of a queue of reads, and how many of them `max_bytes` should hold.
constexpr std::uint64_t kMostQueue = 4 << 20, kQueues = 32;

}  // namespace

EmbeddingTable::EmbeddingTable(const TableSpec& spec) : spec_(spec), starter_(spec.init, spec.seed), arena_(Slab::block_bytes(OldEntry::bytes(spec.row_bytes()))),
      reads_(RowFile::record_bytes(RowCodec(spec)), std::min(kMostQueue, spec.max_bytes / kQueues)) {
  make_rule(spec_.rule, 0);  // throws now what a push would
  for (std::size_t i = 0; i < kLanes; ++i) lanes_[i] = std::make_unique<Lane>(spec_, starter_, arena_, static_cast<int>(i));
}

// Calls use(lane, part) for the part of a lane that is this shard, with the lane's lock held.
template <class Use>
auto EmbeddingTable::in_lane(int shard, Use use) const {
  Lane& lane = *lanes_[static_cast<std::size_t>(shard & (kLanes - 1))];
  const std::lock_guard locked(lane.lock);
  return use(lane, shard >> kLaneBits);
}

// Calls work(number of the lane) for every lane when it is this change's turn there; those whose turn has come go first.
// A change that fails in a lane is through all the same: those behind it must not wait for ever.
template <class Work>
void EmbeddingTable::in_turn(Turn turn, Work work) {
  std::exception_ptr failed;
  std::uint32_t left = (std::uint32_t{1} << kLanes) - 1;
  while (left != 0) {
    const std::uint32_t before = left;
    for (std::uint32_t rest = left; rest != 0; rest &= rest - 1) {
      const auto number = static_cast<std::size_t>(std::countr_zero(rest));
      if (!orders_[number].is_turn_of(turn.number)) continue;
      try {
        if (!failed) work(number);
      } catch (...) {
        failed = std::current_exception();
      }
      orders_[number].pass(turn.number);
      left &= ~(std::uint32_t{1} << number);
    }
    if (left == before) orders_[static_cast<std::size_t>(std::countr_zero(left))].wait_for(turn.number);
  }
  if (failed) std::rethrow_exception(failed);
}

// Calls work() when every change before this one is through, and lets none behind it begin before.
template <class Work>
void EmbeddingTable::as_whole(Turn turn, Work work) {
  for (const LaneOrder& order : orders_) order.wait_for(turn.number);
  std::exception_ptr failed;
  try {
    work();
  } catch (...) {
    failed = std::current_exception();
  }
  for (LaneOrder& order : orders_) order.pass(turn.number);
  if (failed) std::rethrow_exception(failed);
}

std::uint64_t EmbeddingTable::push(Keys keys, const Gradients& gradients) {
  return change(ChangeKind::kPush, keys, gradients);
}

void EmbeddingTable::add(Keys keys, const float* deltas) { change(ChangeKind::kAdd, keys, {deltas, 0}); }

void EmbeddingTable::assign(Keys keys, const float* values) { change(ChangeKind::kAssign, keys, {values, 0}); }

std::uint64_t EmbeddingTable::change(ChangeKind kind, Keys keys, const Gradients& gradients) {
  require_room();
  TableChange change = prepare(kind, keys, gradients);
  return apply(change, order());
}

TableChange EmbeddingTable::prepare(ChangeKind kind, Keys keys, const Gradients& gradients) const {
  check_count(keys);
  TableChange change{kind, keys.size(), KeysByLane(keys.size()), gradients, make_rule(spec_.rule, gradients.lr)};
  change.keys.sort(keys, 0, spec_.salt);
  return change;
}

Turn EmbeddingTable::order(std::uint64_t count) {
  const std::lock_guard clocked(clock_);
  const Turn first{ordered_ + 1, tick_ + 1};
  go_to(tick_ + count);
  ordered_ += count;
  return first;
}

void EmbeddingTable::give_up(Turn turn) {
  in_turn(turn, [](std::size_t) {});
}

std::uint64_t EmbeddingTable::apply(TableChange& change, Turn turn) {
  std::uint64_t dropped = 0;
  if (change.count <= kBlock) {
    try {
      bring_in(change.keys);
    } catch (...) {  // no memory: those behind this change must not wait for ever
      give_up(turn);
      throw;
    }
  }
  const auto work = [&](std::size_t lane) { dropped += apply_to(lane, change, turn); };
  if (spec_.max_bytes == 0 || spec_.spills()) {
    in_turn(turn, work);
  } else {
    as_whole(turn, [&] {
      for (std::size_t lane = 0; lane < kLanes; ++lane) work(lane);
      evict(turn.tick);
    });
  }
  make_room();
  pushed_ += change.count;
  dropped_ += dropped;
  return dropped;
}

std::uint64_t EmbeddingTable::apply_to(std::size_t number, TableChange& change, Turn turn) {
  const Slice all = change.keys.slice(number);
  Lane& lane = *lanes_[number];
  std::uint64_t dropped = 0;
  for (std::size_t first = 0; first < all.hashes.size(); first += kBlock) {
    const std::size_t size = std::min(kBlock, all.hashes.size() - first);
    Slice slice{all.hashes.subspan(first, size), all.positions.subspan(first, size), all.rows.subspan(first, size),
                all.departures};
    if (change.count > kBlock) bring_in(lane, slice);
    const std::lock_guard locked(lane.lock);  // a block at a time: pulls wait for it
    const Time time = now(turn.tick);
    switch (change.kind) {
      case ChangeKind::kPush: dropped += lane.push(slice, change.gradients, change.rule, time); break;
      case ChangeKind::kAdd: lane.add(slice, change.gradients.values, time); break;
      case ChangeKind::kAssign: lane.assign(slice, change.gradients.values, time); break;
    }
    make_room(lane);
  }
  return dropped;
}

std::uint64_t EmbeddingTable::shrink() {
  require_room_to_shrink();
  const Turn turn = order();
  std::uint64_t gone = 0;
  as_whole(turn, [&] {
    if (spec_.entry.days() == 0) return;
    for (int shard = 0; shard < kShards; ++shard) {
      in_lane(shard, [&](Lane& lane, int part) {
        gone += lane.end_day(part, now(turn.tick));
        make_room(lane);
      });
    }
  });
  return gone;
}

void EmbeddingTable::clear() {
  const Turn turn = order();
  as_whole(turn, [&] {
    for (const std::unique_ptr<Lane>& lane : lanes_) {
      const std::lock_guard locked(lane->lock);
      lane->clear(now(turn.tick));
    }
  });
}

ShardColumns EmbeddingTable::read(int shard, std::uint64_t since) const {
  return in_lane(shard, [&](Lane& lane, int part) { return lane.read(part, since, now(tick_)); });
}

void EmbeddingTable::restore(int shard, const ShardView& columns) {
  {
    const std::lock_guard clocked(clock_);
    wait_for_changes();
    go_to(columns.tick < tick_ ? tick_ + 1 : columns.tick);
  }
  in_lane(shard, [&](Lane& lane, int part) {
    const Time time = now(tick_);
    lane.begin_restore(part, columns, time);
    for (std::size_t first = 0; first < columns.keys.size(); first += kRestored) {
      lane.restore_rows(columns, first, std::min(kRestored, columns.keys.size() - first), time);
      make_room(lane);
    }
    lane.restore_waiting(columns, time);
  });
  make_room();
}

std::vector<std::int64_t> EmbeddingTable::keys(int shard) const {
  return in_lane(shard, [](const Lane& lane, int part) { return lane.keys(part); });
}

std::uint64_t EmbeddingTable::begin_moment(std::uint64_t since) {
  const std::lock_guard clocked(clock_);
  wait_for_changes();
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const std::lock_guard locked(lane->lock);
    lane->begin_moment(moments_ + 1, since, now(tick_));
  }
  return ++moments_;
}

ShardColumns EmbeddingTable::read_moment(std::uint64_t moment, int shard) const {
  ShardReading reading = in_lane(shard, [&](Lane& lane, int part) { return lane.begin_reading(moment, part); });
  Piece piece;
  while (in_lane(shard, [&](Lane& lane, int part) { return lane.read_next(moment, part, piece); })) reading.add(piece);
  return reading.finish(in_lane(shard, [&](Lane& lane, int part) { return lane.end_reading(moment, part); }));
}

void EmbeddingTable::end_moment(std::uint64_t moment) {
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const std::lock_guard locked(lane->lock);
    lane->end_moment(moment);
  }
}

std::uint64_t EmbeddingTable::rows() const {
  std::uint64_t sum = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) sum += lane->rows();
  return sum;
}

std::uint64_t EmbeddingTable::stored() const {
  std::uint64_t sum = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) sum += lane->stored();
  return sum;
}

// The sum of count(lane) over the lanes, each locked.
template <class Count>
std::uint64_t EmbeddingTable::sum(Count count) const {
  std::uint64_t sum = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const std::lock_guard locked(lane->lock);
    sum += count(*lane);
  }
  return sum;
}

std::uint64_t EmbeddingTable::bytes() const {
  return reads_.bytes() + sum([](const Lane& lane) { return lane.bytes(); });
}

std::uint64_t EmbeddingTable::file_bytes() const {
  return sum([](const Lane& lane) { return lane.file().bytes(); });
}

std::uint64_t EmbeddingTable::file_reads() const {
  return sum([](const Lane& lane) { return lane.file_reads(); });
}

std::uint64_t EmbeddingTable::moved() const {
  return sum([](const Lane& lane) { return lane.moved(); });
}

void EmbeddingTable::wait_for_changes() const {
  for (const LaneOrder& order : orders_) order.wait_for(ordered_ + 1);
}

void EmbeddingTable::go_to(std::uint64_t tick) {
  tick_ = tick;
  if (tick - oldest_ < kRenumberAt) return;
  wait_for_changes();
  const std::uint64_t oldest = tick - kKeepTicks;
  std::array<std::unique_lock<std::mutex>, kLanes> locked;
  for (std::size_t lane = 0; lane < kLanes; ++lane) locked[lane] = std::unique_lock(lanes_[lane]->lock);
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->renumber(oldest, oldest_);
  oldest_ = oldest;
}

std::uint64_t EmbeddingTable::index_cost() const {
  std::uint64_t entries = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) entries += lane->entries();
  return entries * kIndexBytes;
}

// What `max_bytes` holds: the rows in memory, and what an index takes for all.
std::uint64_t EmbeddingTable::cost() const {
  std::uint64_t rows = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) rows += lane->resident();
  return rows * spec_.row_bytes() + index_cost();
}

// Bytes of rows that a lane must move out before it takes `more` rows: what the table is over `max_bytes`, but the lane
// keeps its share.
std::uint64_t EmbeddingTable::excess(const Lane& lane, std::uint64_t more) const {
  const std::uint64_t row_bytes = spec_.row_bytes(), used = cost() + more * row_bytes;
  if (used <= spec_.max_bytes) return 0;
  const std::uint64_t index = std::min(index_cost(), spec_.max_bytes);
  const std::uint64_t share = (spec_.max_bytes - index) / row_bytes / kLanes * row_bytes;
  const std::uint64_t own = (lane.resident() + more) * row_bytes;
  return std::min(used - spec_.max_bytes, own - std::min(own, share));
}

// Lets rows of a lane leave memory for its file. REQUIRES: the lane is locked.
void EmbeddingTable::make_room(Lane& lane, std::uint64_t more) const {
  if (spec_.spills()) lane.make_room(excess(lane, more));
}

// The same for all lanes, at the end of a call: a lane below its share kept what it brought in, so lanes above theirs,
// which the call may not have named, move rows out. Where the file of one of these takes none, lanes give up their shares.
void EmbeddingTable::make_room() const {
  if (!spec_.spills()) return;
  for (const bool keeps_share : {true, false}) {
    for (const std::unique_ptr<Lane>& lane : lanes_) {
      const std::uint64_t used = cost();
      if (used <= spec_.max_bytes) return;
      if (keeps_share && excess(*lane, 0) == 0) continue;
      const std::lock_guard locked(lane->lock);
      if (keeps_share) make_room(*lane);
      else lane->make_room(used - spec_.max_bytes);
    }
  }
}

void EmbeddingTable::require_room() const {
  if (!spec_.spills() || cost() <= spec_.max_bytes) return;
  require_files("A push would bring rows into memory, where a table's rows take " + std::to_string(cost()) +
                " bytes and may take " + std::to_string(spec_.max_bytes) + " (max_bytes)");
}

void EmbeddingTable::require_room_to_shrink() const {
  if (!spec_.has_statistics || stored() == 0) return;
  require_files("The end of a day would write the show and click of all rows in files anew");
}

void EmbeddingTable::require_files(const std::string& why) const {
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const std::lock_guard locked(lane->lock);
    const std::string refusal = lane->refusal();
    if (refusal.empty()) continue;
    throw TableFull(why + ", and " + refusal + ". No row is lost. Make room in that folder, and try again.");
  }
}

// Shard after shard gives up its least recent eighth, from one picked by the tick, until the rest fits.
void EmbeddingTable::evict(std::uint64_t tick) {
  for (int shard = shard_of(mix64(tick)); cost() > spec_.max_bytes; shard = (shard + 1) % kShards) {
    evicted_ += in_lane(shard, [&](Lane& lane, int part) { return lane.drop_eighth(part, now(tick)); });
  }
}

}  // namespace phalanx
