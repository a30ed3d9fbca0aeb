// Tables whose rows leave memory for files: whatever is done to one, it reads as a table without a limit does.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>

#include "../../csrc/table.h"
#include "check.h"
#include "row_folder.h"

namespace {

using phalanx::EmbeddingTable;
using phalanx::EntryKind;
using phalanx::ShardColumns;
using phalanx::TableSpec;

constexpr std::array kShards = {3, 19, 4, 1023};  // the first two are of one lane

TableSpec spec_of(EntryKind entry, bool is_bfloat16) {
  TableSpec spec;
  spec.salt = 5;
  spec.dim = 6;
  spec.initial_state.assign(6, 0.1f);
  spec.is_bfloat16 = is_bfloat16;
  spec.rule = {"adagrad", {{"lr", 0.1}, {"weight_decay", 0}, {"eps", 1e-8}, {"lr_decay", 0}}};
  spec.init = {phalanx::InitKind::kUniform, 0.5};
  spec.has_statistics = entry == EntryKind::kShowClick;
  spec.entry = {entry, 3, 0.5, 0.1f, 1, 0.98f, 0.05f, 4, 3};
  return spec;
}

TableSpec spilled(TableSpec spec, std::uint64_t max_bytes, const Folder& folder) {
  spec.max_bytes = max_bytes;
  spec.folder = folder.path();
  return spec;
}

std::vector<std::int64_t> ids_of(std::uint64_t salt, std::size_t count, std::mt19937_64& random) {
  std::vector<std::int64_t> ids;
  for (const int shard : kShards) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t hash = std::uint64_t(shard) << 54 | (random() >> 10);
      ids.push_back(static_cast<std::int64_t>(phalanx::unmix64(hash) ^ salt));
    }
  }
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

bool is_same(const ShardColumns& a, const ShardColumns& b, std::size_t width) {
  const std::size_t bytes = a.keys.size() * width * sizeof(float);
  return a.keys == b.keys && a.ticks == b.ticks && a.waiting_keys == b.waiting_keys &&
         a.waiting_ticks == b.waiting_ticks && a.waiting_counts == b.waiting_counts && a.days == b.days &&
         a.removed == b.removed && a.decays == b.decays && a.tick == b.tick && a.is_complete == b.is_complete &&
         (bytes == 0 || std::memcmp(a.rows.get(), b.rows.get(), bytes) == 0);
}

void restore(EmbeddingTable& table, int shard, const ShardColumns& read) {
  table.restore(shard, {read.keys, read.ticks, read.rows.get(), read.waiting_keys, read.waiting_ticks,
                        read.waiting_counts, read.days, read.removed, read.decays, table.tick(), read.is_complete});
}

// A table whose rows leave memory and its twin without a limit; each call goes to both.
class Twins {
 public:
  Twins(const TableSpec& spec, std::uint64_t max_bytes) : small_(spilled(spec, max_bytes, folder_)), large_(spec) {}

  void change(phalanx::ChangeKind kind, std::span<const std::int64_t> keys, float value) {
    const std::vector<float> values(keys.size() * large_.spec().dim, value), ones(keys.size(), 1.0f);
    for (EmbeddingTable* table : {&small_, &large_}) {
      phalanx::TableChange change = table->prepare(kind, keys, {values.data(), 0.1, nullptr, ones.data(), nullptr});
      table->apply(change, table->order());
    }
    CHECK(small_.bytes() > 0);
  }

  void check_pull(std::span<const std::int64_t> keys) {
    std::vector<float> a(keys.size() * large_.spec().dim), b(a.size());
    small_.pull(keys, a.data());
    large_.pull(keys, b.data());
    CHECK(a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  }

  void check_all(std::uint64_t since) {
    for (const int shard : kShards) {
      CHECK(is_same(small_.read(shard, since), large_.read(shard, since), large_.spec().width()));
      CHECK(small_.keys(shard) == large_.keys(shard));
    }
    CHECK(small_.rows() == large_.rows() && small_.dropped() == large_.dropped() && small_.evicted() == 0);
    CHECK(small_.missed() == large_.missed());
  }

  void begin_moment(std::uint64_t since) {
    end_moment();
    moment_ = {small_.begin_moment(since), large_.begin_moment(since)};
    left_ = kShards.size();
  }

  void read_moment() {
    if (left_ == 0) return;
    const int shard = kShards[--left_];
    CHECK(is_same(small_.read_moment(moment_[0], shard), large_.read_moment(moment_[1], shard), large_.spec().width()));
  }

  void end_moment() {
    if (moment_[0] == 0) return;
    small_.end_moment(moment_[0]);
    large_.end_moment(moment_[1]);
    moment_ = {};
    left_ = 0;
  }

  void shrink() { CHECK(small_.shrink() == large_.shrink()); }
  void clear() {
    small_.clear();
    large_.clear();
    CHECK(small_.stored() == 0 && small_.file_bytes() == 0);
  }
  // Each takes what the other held.
  void exchange(int shard, std::uint64_t since) {
    const ShardColumns of_small = small_.read(shard, since), of_large = large_.read(shard, since);
    restore(small_, shard, of_large);
    restore(large_, shard, of_small);
  }

  const EmbeddingTable& small() const { return small_; }
  std::uint64_t tick() const { return large_.tick(); }

  // What is in files now is read from the disk.
  void drop_cache() const { folder_.drop_cache(); }

 private:
  Folder folder_;
  EmbeddingTable small_, large_;
  std::array<std::uint64_t, 2> moment_{};
  std::size_t left_ = 0;
};

void change_somehow(Twins& twins, std::span<const std::int64_t> ids, std::mt19937_64& random) {
  using enum phalanx::ChangeKind;
  const std::size_t first = random() % ids.size(), count = std::min<std::size_t>(random() % 500, ids.size() - first);
  const std::span<const std::int64_t> keys = ids.subspan(first, count);
  const float value = 0.01f * static_cast<float>(random() % 100);
  const std::uint64_t what = random() % 60;
  if (what < 24) return twins.change(kPush, keys, value);
  if (what < 29) return twins.change(kAdd, keys, value);
  if (what < 34) return twins.change(kAssign, keys, value);
  if (what < 46) return twins.check_pull(keys);
  if (what < 48) return twins.begin_moment(random() % 2 * (twins.tick() / 2));
  if (what < 54) return twins.read_moment();
  if (what == 54) return twins.end_moment();
  if (what < 57) return twins.shrink();
  if (what == 57 && random() % 4 == 0) return twins.clear();
  twins.exchange(kShards[random() % kShards.size()], what == 58 ? 0 : twins.tick() - std::min<std::uint64_t>(twins.tick(), 5));
}

void reads_as_its_twin(const TableSpec& spec, std::uint64_t max_bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Twins twins(spec, max_bytes);
  const std::vector<std::int64_t> ids = ids_of(spec.salt, 900, random);
  std::uint64_t most_stored = 0;
  for (int step = 1; step <= 240; ++step) {
    if (step % 8 == 0) twins.drop_cache();
    change_somehow(twins, ids, random);
    most_stored = std::max(most_stored, twins.small().stored());
    if (step % 60 == 0) twins.check_all(step % 120 * (twins.tick() / 300));
  }
  twins.end_moment();
  twins.check_all(0);
  twins.check_pull(ids);
  CHECK(most_stored > 500 && twins.small().file_reads() > 0);
}

// Memory stays near the budget while rows are many times it, and the file near what it holds.
void holds_many_times_its_memory() {
  TableSpec spec = spec_of(EntryKind::kAny, false);
  spec.dim = 64;
  spec.initial_state.assign(64, 0.1f);
  const std::uint64_t row = spec.row_bytes(), budget = 4 << 20;
  Twins twins(spec, budget);
  std::mt19937_64 random(4);
  std::vector<std::int64_t> ids(70'000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  for (std::size_t first = 0; first < ids.size(); first += 2000) {
    twins.change(phalanx::ChangeKind::kPush, std::span(ids).subspan(first, 2000), 0.5f);
  }
  for (int step = 0; step < 60; ++step) {
    const std::size_t first = random() % 10 == 0 ? random() % 68'000 : random() % 500;
    const std::span<const std::int64_t> keys = std::span(ids).subspan(first, 1000);
    twins.check_pull(keys);
    twins.change(phalanx::ChangeKind::kPush, keys, 0.25f);
  }
  const EmbeddingTable& table = twins.small();
  CHECK(table.rows() * row > 8 * budget);
  CHECK((table.rows() - table.stored()) * row + table.rows() * EmbeddingTable::kIndexBytes <= budget);
  CHECK(table.bytes() < 3 * budget);
  CHECK(table.file_bytes() < 2 * table.stored() * (row + 12) + (2 << 20));
  twins.check_pull(ids);
}

// What a pull read is there for its push, and for the next step while that is soon; a row that is read once costs no write.
void rows_are_read_once_a_step() {
  const Folder folder;
  TableSpec spec = spec_of(EntryKind::kAny, false);
  const std::uint64_t rows = 1600, all = 16'000;
  EmbeddingTable table(spilled(spec, rows * spec.row_bytes() + all * EmbeddingTable::kIndexBytes, folder));
  std::vector<std::int64_t> ids(all);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  const std::span<const std::int64_t> every(ids);
  std::vector<float> values(all * spec.dim, 0.5f);
  for (std::size_t first = 0; first < all; first += 800) table.push(every.subspan(first, 800), {values.data(), 0.1});
  std::uint64_t filled = 0;
  for (std::size_t first = 0; first < 8000; first += 40) {
    const std::uint64_t before = table.file_reads();
    table.pull(every.subspan(first, 40), values.data());
    CHECK(table.file_reads() == before + 40);
    CHECK(all - table.stored() <= rows);
    if (first == 2000) filled = table.file_bytes();  // the queue has room by now
  }
  CHECK(table.file_bytes() == filled);
  const std::uint64_t before = table.file_reads();
  for (std::size_t first = 8000; first < 12'000; first += 40) {
    for (int step = 0; step < 3; ++step) {
      table.pull(every.subspan(first, 40), values.data());
      table.push(every.subspan(first, 40), {values.data(), 0.1});
    }
  }
  CHECK(table.file_reads() < before + 4050);  // lanes have more of them or fewer at a time
}

// Lanes that had all of the memory give the others their share as soon as these are used.
void lanes_share_memory() {
  const Folder folder;
  const TableSpec spec = spec_of(EntryKind::kAny, false);
  const std::uint64_t rows = 1600, half = 16'000;
  EmbeddingTable table(spilled(spec, rows * spec.row_bytes() + 2 * half * EmbeddingTable::kIndexBytes, folder));
  std::array<std::vector<std::int64_t>, 2> halves;  // the ids of eight lanes each
  for (std::int64_t id = 0; halves[0].size() < half || halves[1].size() < half; ++id) {
    std::vector<std::int64_t>& ids = halves[phalanx::lane_of(phalanx::hash_of(id, spec.salt)) >= phalanx::kLanes / 2];
    if (ids.size() < half) ids.push_back(id);
  }
  std::vector<float> values(half * spec.dim, 0.5f);
  for (const std::vector<std::int64_t>& ids : halves) table.push(ids, {values.data(), 0.1});
  std::mt19937_64 random(6);
  for (int step = 0; step < 10; ++step) {
    std::vector<std::int64_t> keys;
    for (const std::vector<std::int64_t>& ids : halves) {
      std::sample(ids.begin(), ids.end(), std::back_inserter(keys), 200, random);
    }
    table.pull(keys, values.data());
    table.push(keys, {values.data(), 0.1});
    CHECK(2 * half - table.stored() <= rows);
  }
  const std::span<const std::int64_t> some = std::span(halves[1]).first(half / 2);  // one block: all are looked up first
  const std::uint64_t before = table.file_reads();
  table.pull(some, values.data());
  CHECK(some.size() - (table.file_reads() - before) > rows / 5);  // rows / 4 in lanes that are even
  table.push(some, {values.data(), 0.1});  // fills these lanes; the others give up what is too much
  CHECK(2 * half - table.stored() <= rows && 2 * half - table.stored() > rows * 9 / 10);
}

// Where memory has room, as when other rows have expired, rows that are read stay: no queue is too long then.
void rows_stay_while_there_is_room() {
  const Folder folder;
  TableSpec spec = spec_of(EntryKind::kAny, false);
  spec.entry.unseen_days = 1;
  const std::uint64_t half = 1600;
  EmbeddingTable table(spilled(spec, half * spec.row_bytes() + 2 * half * EmbeddingTable::kIndexBytes, folder));
  std::vector<std::int64_t> ids(2 * half);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  const std::span<const std::int64_t> old = std::span(ids).first(half), recent = std::span(ids).subspan(half);
  std::vector<float> values(half * spec.dim, 0.5f);
  table.push(old, {values.data(), 0.1});
  table.shrink();
  for (std::size_t first = 0; first < half; first += 40) {
    table.pull(old, values.data());  // so that it is these that stay in memory
    table.push(recent.subspan(first, 40), {values.data(), 0.1});
  }
  table.shrink();
  CHECK(table.rows() == half && table.stored() > half / 2);
  const auto read = [&] {
    const std::uint64_t before = table.file_reads();
    for (std::size_t first = 0; first < half; first += 40) table.pull(recent.subspan(first, 40), values.data());
    return table.file_reads() - before;
  };
  CHECK(read() > half / 2 && table.stored() == 0);
  CHECK(read() == 0);
}

// Threads push, pull, read moments and end days of one table; rows stay whole: a row has equal numbers.
void is_shared(EntryKind entry) {
  const Folder folder;
  TableSpec spec = spilled(spec_of(entry, false), 40'000, folder);
  spec.init = {phalanx::InitKind::kConstant, 0.25};
  EmbeddingTable table(spec);
  in_threads(4, [&](int number) {
    std::vector<std::int64_t> keys(1500);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<std::int64_t>(i) * 2 + number % 2;
    std::vector<float> values(keys.size() * spec.dim, 0.5f);
    for (int step = 0; step < 20; ++step) {
      if (number < 2) {
        table.push(keys, {values.data(), 0.1});
      } else if (number == 2) {
        folder.drop_cache();
        table.pull(keys, values.data());
        for (std::size_t i = 0; i < values.size(); ++i) CHECK(values[i] == values[i / spec.dim * spec.dim]);
        CHECK(table.stored() <= 3000 && table.file_bytes() < 1 << 30 && table.bytes() < 1 << 30);
      } else {
        const std::uint64_t moment = table.begin_moment(step % 2 * table.tick());
        for (int shard = step; shard < 200; ++shard) table.read_moment(moment, shard);
        table.end_moment(moment);
        table.shrink();
        if (step == 15) table.clear();
      }
    }
  });
}

}  // namespace

void test_tiers() {
  std::uint64_t seed = 1;
  for (const EntryKind entry : {EntryKind::kAny, EntryKind::kCount, EntryKind::kProbability, EntryKind::kShowClick}) {
    is_shared(entry);
    if constexpr (kFindsRaces) continue;
    for (const std::uint64_t max_bytes : {1, 60'000, 120'000}) {
      reads_as_its_twin(spec_of(entry, seed % 2 == 0), max_bytes, seed);
      ++seed;
    }
  }
  if constexpr (kFindsRaces) return;
  holds_many_times_its_memory();
  rows_are_read_once_a_step();
  lanes_share_memory();
  rows_stay_while_there_is_room();
}
