#include "table.h"

#include <algorithm>
#include <stdexcept>

namespace phalanx {
namespace {

// So many keys of a call are worked on together: enough to ask memory for, few enough to stay in the second cache.
constexpr std::size_t kBlock = 8192;

// A block of keys sorted by lane, keeping their order within one.
class Routed {
 public:
  void route(std::span<const std::int64_t> keys, std::size_t first, std::uint64_t salt) {
    std::array<std::uint64_t, kBlock> hashes;
    starts_.fill(0);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      hashes[i] = hash_of(keys[i], salt);
      ++starts_[static_cast<std::size_t>(lane_of(hashes[i])) + 1];
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) starts_[lane + 1] += starts_[lane];
    std::array<std::uint32_t, kLanes + 1> next = starts_;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t place = next[static_cast<std::size_t>(lane_of(hashes[i]))]++;
      hashes_[place] = hashes[i];
      positions_[place] = static_cast<std::uint32_t>(first + i);
    }
  }

  Slice slice(std::size_t lane) {
    const std::size_t start = starts_[lane], size = starts_[lane + 1] - start;
    return {{hashes_.data() + start, size}, {positions_.data() + start, size}, {rows_.data() + start, size}};
  }

 private:
  std::array<std::uint64_t, kBlock> hashes_;
  std::array<std::uint32_t, kBlock> positions_;
  std::array<std::uint32_t, kBlock> rows_;
  std::array<std::uint32_t, kLanes + 1> starts_;
};

}  // namespace

EmbeddingTable::EmbeddingTable(const TableSpec& spec) : spec_(spec), starter_(spec.init, spec.seed) {
  make_rule(spec_.rule, 0);  // throws now what a push would
  for (std::unique_ptr<Lane>& lane : lanes_) lane = std::make_unique<Lane>(spec_, starter_);
}

// Calls work(lane, slice) for each lane that has keys of a block, with its lock held, block after block.
template <class Work>
void EmbeddingTable::each_lane(Keys keys, Work work) const {
  if (keys.size() >= UINT32_MAX) throw std::length_error("a call takes fewer than 2**32 keys");
  Routed routed;
  for (std::size_t first = 0; first < keys.size(); first += kBlock) {
    routed.route(keys.subspan(first, std::min(kBlock, keys.size() - first)), first, spec_.salt);
    for (std::size_t number = 0; number < kLanes; ++number) {
      Slice slice = routed.slice(number);
      if (slice.hashes.empty()) continue;
      Lane& lane = *lanes_[number];
      const std::lock_guard locked(lane.lock);
      work(lane, slice);
    }
  }
}

// Calls use(lane, part) for the part of a lane that is this shard, with the lane's lock held.
template <class Use>
auto EmbeddingTable::in_lane(int shard, Use use) const {
  Lane& lane = *lanes_[static_cast<std::size_t>(shard & (kLanes - 1))];
  const std::lock_guard locked(lane.lock);
  return use(lane, shard >> kLaneBits);
}

// Calls work(lane, slice, time) as `each_lane` does, as one change.
template <class Work>
void EmbeddingTable::change(Keys keys, Work work) {
  const std::uint64_t tick = next_tick();
  each_lane(keys, [&](Lane& lane, Slice& slice) { work(lane, slice, now(tick)); });
  pushed_ += keys.size();
  evict(tick);
}

void EmbeddingTable::pull(Keys keys, float* values) const {
  each_lane(keys, [&](const Lane& lane, Slice& slice) { lane.pull(slice, values); });
}

std::uint64_t EmbeddingTable::push(Keys keys, const Gradients& gradients) {
  const UpdateRule rule = make_rule(spec_.rule, gradients.lr);
  std::uint64_t dropped = 0;
  change(keys, [&](Lane& lane, Slice& slice, Time time) { dropped += lane.push(slice, gradients, rule, time); });
  dropped_ += dropped;
  return dropped;
}

void EmbeddingTable::add(Keys keys, const float* deltas) {
  change(keys, [&](Lane& lane, Slice& slice, Time time) { lane.add(slice, deltas, time); });
}

void EmbeddingTable::assign(Keys keys, const float* values) {
  change(keys, [&](Lane& lane, Slice& slice, Time time) { lane.assign(slice, values, time); });
}

std::uint64_t EmbeddingTable::shrink() {
  const std::uint64_t tick = next_tick();
  if (spec_.entry.kind != EntryKind::kShowClick) return 0;
  std::uint64_t gone = 0;
  for (int shard = 0; shard < kShards; ++shard) {
    gone += in_lane(shard, [&](Lane& lane, int part) { return lane.end_day(part, now(tick)); });
  }
  return gone;
}

void EmbeddingTable::clear() {
  const std::uint64_t tick = next_tick();
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const std::lock_guard locked(lane->lock);
    lane->clear(now(tick));
  }
}

ShardColumns EmbeddingTable::read(int shard, std::uint64_t since) const {
  return in_lane(shard, [&](const Lane& lane, int part) { return lane.read(part, since, now(tick_)); });
}

void EmbeddingTable::restore(int shard, const ShardView& columns) {
  const std::lock_guard clocked(clock_);
  go_to(columns.tick < tick_ ? tick_ + 1 : columns.tick);
  in_lane(shard, [&](Lane& lane, int part) { lane.restore(part, columns, now(tick_)); });
}

std::vector<std::int64_t> EmbeddingTable::keys(int shard) const {
  return in_lane(shard, [](const Lane& lane, int part) { return lane.keys(part); });
}

void EmbeddingTable::hold() {
  clock_.lock();
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->lock.lock();
}

void EmbeddingTable::release() {
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->lock.unlock();
  clock_.unlock();
}

std::uint64_t EmbeddingTable::rows() const {
  std::uint64_t sum = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) sum += lane->rows();
  return sum;
}

std::uint64_t EmbeddingTable::bytes() const {
  std::uint64_t sum = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const std::lock_guard locked(lane->lock);
    sum += lane->bytes();
  }
  return sum;
}

std::uint64_t EmbeddingTable::next_tick() {
  const std::lock_guard clocked(clock_);
  go_to(tick_ + 1);
  return tick_;
}

void EmbeddingTable::go_to(std::uint64_t tick) {
  tick_ = tick;
  if (tick - oldest_ < kRenumberAt) return;
  const std::uint64_t oldest = tick - kKeepTicks;
  std::array<std::unique_lock<std::mutex>, kLanes> locked;
  for (std::size_t lane = 0; lane < kLanes; ++lane) locked[lane] = std::unique_lock(lanes_[lane]->lock);
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->renumber(oldest, oldest_);
  oldest_ = oldest;
}

std::uint64_t EmbeddingTable::cost() const {
  std::uint64_t rows = 0, entries = 0;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    rows += lane->rows();
    entries += lane->entries();
  }
  return rows * spec_.row_bytes() + entries * kIndexBytes;
}

// Shard after shard gives up its least recent eighth, from one picked by the tick, until the rest fits.
void EmbeddingTable::evict(std::uint64_t tick) {
  if (spec_.max_bytes == 0) return;
  for (int shard = shard_of(mix64(tick)); cost() > spec_.max_bytes; shard = (shard + 1) % kShards) {
    evicted_ += in_lane(shard, [&](Lane& lane, int part) { return lane.drop_eighth(part, now(tick)); });
  }
}

}  // namespace phalanx
