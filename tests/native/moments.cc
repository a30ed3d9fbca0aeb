// Moments of a table: whatever changes while one is open, its shards read as they did when it began.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>

#include "../../csrc/table.h"
#include "check.h"

namespace {

using phalanx::EmbeddingTable;
using phalanx::EntryKind;
using phalanx::ShardColumns;
using phalanx::TableSpec;

constexpr std::array kShards = {3, 19, 4, 1023};  // the first two are of one lane
constexpr std::size_t kIds = 1200;                // of each of them, so that it is read in several pieces

TableSpec spec_of(EntryKind entry, bool is_bfloat16, std::uint64_t max_bytes) {
  TableSpec spec;
  spec.salt = 11;
  spec.dim = 3;
  spec.initial_state.assign(3, 0.1f);
  spec.is_bfloat16 = is_bfloat16;
  spec.max_bytes = max_bytes;
  spec.rule = {"adagrad", {{"lr", 0.1}, {"weight_decay", 0}, {"eps", 1e-8}, {"lr_decay", 0}}};
  spec.has_statistics = entry == EntryKind::kShowClick;
  spec.entry = {entry, 3, 0.5, 0.1f, 1, 0.98f, 0.05f, 4, 3};
  return spec;
}

// Ids of these shards, shuffled.
std::vector<std::int64_t> ids_of(std::uint64_t salt, std::mt19937_64& random) {
  std::vector<std::int64_t> ids;
  for (const int shard : kShards) {
    for (std::size_t i = 0; i < kIds; ++i) {
      const std::uint64_t hash = std::uint64_t(shard) << 54 | (random() >> 10);
      ids.push_back(static_cast<std::int64_t>(phalanx::unmix64(hash) ^ salt));
    }
  }
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

void change(EmbeddingTable& table, phalanx::ChangeKind kind, std::span<const std::int64_t> keys, float value) {
  const std::vector<float> values(keys.size() * table.spec().dim, value), ones(keys.size(), 1.0f);
  phalanx::TableChange change = table.prepare(kind, keys, {values.data(), 0.1, nullptr, ones.data(), nullptr});
  table.apply(change, table.order());
}

void restore(EmbeddingTable& table, int shard, const ShardColumns& read, std::uint64_t tick) {
  table.restore(shard, {read.keys, read.ticks, read.rows.get(), read.waiting_keys, read.waiting_ticks,
                        read.waiting_counts, read.days, read.removed, read.decays, tick, read.is_complete});
}

bool is_same(const ShardColumns& a, const ShardColumns& b, std::size_t width) {
  const std::size_t bytes = a.keys.size() * width * sizeof(float);
  return a.keys == b.keys && a.ticks == b.ticks && a.waiting_keys == b.waiting_keys &&
         a.waiting_ticks == b.waiting_ticks && a.waiting_counts == b.waiting_counts && a.days == b.days &&
         a.removed == b.removed && a.decays == b.decays && a.tick == b.tick && a.is_complete == b.is_complete &&
         (bytes == 0 || std::memcmp(a.rows.get(), b.rows.get(), bytes) == 0);
}

// An open moment, and what its shards that are still to be read held when it began.
class Moment {
 public:
  Moment(EmbeddingTable& table, std::uint64_t since) : table_(table), number_(table.begin_moment(since)) {
    for (const int shard : kShards) expected_.emplace(shard, table.read(shard, since));
  }

  bool is_read() const { return expected_.empty(); }
  void check_next() {
    const auto next = expected_.begin();
    CHECK(is_same(table_.get().read_moment(number_, next->first), next->second, table_.get().spec().width()));
    expected_.erase(next);
  }
  void end() { table_.get().end_moment(number_); }

 private:
  std::reference_wrapper<EmbeddingTable> table_;
  std::uint64_t number_;
  std::map<int, ShardColumns> expected_;
};

// One random change of a table.
void change_somehow(EmbeddingTable& table, const std::vector<std::int64_t>& ids, std::mt19937_64& random) {
  using enum phalanx::ChangeKind;
  const std::size_t first = random() % ids.size(), count = std::min<std::size_t>(random() % 600, ids.size() - first);
  const std::span<const std::int64_t> keys = std::span(ids).subspan(first, count);
  const float value = 0.01f * static_cast<float>(random() % 100);
  const std::uint64_t what = random() % 40;
  if (what < 24) return change(table, kPush, keys, value);
  if (what < 29) return change(table, kAdd, keys, value);
  if (what < 34) return change(table, kAssign, keys, value);
  if (what < 37) return static_cast<void>(table.shrink());
  if (what == 37) return table.clear();
  const int from = kShards[random() % kShards.size()];
  const std::uint64_t since = what == 38 ? 0 : table.tick() - std::min<std::uint64_t>(table.tick(), random() % 5);
  restore(table, from, table.read(from, since), table.tick());
}

// Many changes, with up to three moments open, full and delta.
void keep(const TableSpec& spec, std::uint64_t seed, std::uint64_t first_tick) {
  std::mt19937_64 random(seed);
  EmbeddingTable table(spec);
  const std::vector<std::int64_t> ids = ids_of(spec.salt, random);
  restore(table, 0, {}, first_tick);
  std::vector<Moment> open;
  for (int step = 0; step < 400; ++step) {
    change_somehow(table, ids, random);
    const std::uint64_t draw = random() % 8;
    if (draw == 0 && open.size() < 3) {
      open.emplace_back(table, random() % 2 * (table.tick() - random() % 20));
    } else if (draw == 1 && !open.empty()) {
      const std::size_t i = random() % open.size();
      if (!open[i].is_read()) open[i].check_next();
      if (open[i].is_read() || random() % 10 == 0) {
        open[i].end();
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }
}

// Threads change a table while another one reads moments of it.
void keep_among_threads(EntryKind entry, std::uint64_t max_bytes) {
  EmbeddingTable table(spec_of(entry, false, max_bytes));
  std::mt19937_64 seeds(5);
  const std::vector<std::int64_t> ids = ids_of(table.spec().salt, seeds);
  change(table, phalanx::ChangeKind::kPush, ids, 0.5f);
  std::mutex quiet;  // taken to change the table: nothing may between the beginning of a moment and what it must be
  std::atomic<bool> is_over = false;
  in_threads(3, [&](int number) {
    std::mt19937_64 random(static_cast<std::uint64_t>(number));
    if (number == 0) {
      for (int round = 0; round < 6; ++round) {
        std::unique_lock locked(quiet);
        Moment moment(table, round % 2 * (table.tick() / 2));
        locked.unlock();
        while (!moment.is_read()) moment.check_next();
        moment.end();
      }
      is_over = true;
      return;
    }
    while (!is_over) {
      for (int i = 0; i < 3; ++i) {
        const std::lock_guard locked(quiet);
        change_somehow(table, ids, random);
      }
      std::this_thread::yield();
    }
  });
}

// A moment that nobody reads to its end leaves no memory behind, and a shard is read once.
void let_go() {
  EmbeddingTable table(spec_of(EntryKind::kAny, false, 0));
  std::mt19937_64 random(1);
  const std::vector<std::int64_t> ids = ids_of(table.spec().salt, random);
  for (int step = 0; step < 3; ++step) change(table, phalanx::ChangeKind::kPush, ids, 0.5f);  // the index has grown
  const std::uint64_t before = table.bytes(), moment = table.begin_moment(0);
  change(table, phalanx::ChangeKind::kPush, ids, 0.5f);
  CHECK(table.bytes() >= before + ids.size() * table.spec().row_bytes());
  CHECK(table.read_moment(moment, kShards[0]).keys.size() == kIds);
  CHECK(throws<std::logic_error>([&] { table.read_moment(moment, kShards[0]); }));
  table.end_moment(moment);
  CHECK(table.bytes() == before);
  CHECK(throws<std::out_of_range>([&] { table.read_moment(moment, kShards[1]); }));
}

}  // namespace

void test_moments() {
  const std::uint64_t few = 3000 * 24;
  for (const EntryKind entry : {EntryKind::kAny, EntryKind::kCount, EntryKind::kProbability, EntryKind::kShowClick}) {
    for (const std::uint64_t max_bytes : {std::uint64_t{0}, few * 2}) {
      keep_among_threads(entry, max_bytes);
      if constexpr (kFindsRaces) continue;
      keep(spec_of(entry, entry == EntryKind::kAny, max_bytes), max_bytes + static_cast<std::uint64_t>(entry), 100);
    }
  }
  if constexpr (kFindsRaces) return;
  keep(spec_of(EntryKind::kCount, false, 0), 9, EmbeddingTable::kRenumberAt - 250);
  let_go();
}
