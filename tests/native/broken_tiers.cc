// Tables whose files break: a row that is asked for is an error or whole, and one that is not hurts no call.

#include <unistd.h>

#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "../../csrc/table.h"
#include "check.h"
#include "row_folder.h"

namespace {

using phalanx::DamagedRow;
using phalanx::EmbeddingTable;
using phalanx::EntryKind;
using phalanx::ShardColumns;
using phalanx::TableSpec;

TableSpec spec_of(EntryKind entry) {
  TableSpec spec;
  spec.salt = 5;
  spec.dim = 6;
  spec.initial_state.assign(6, 0.1f);
  spec.rule = {"adagrad", {{"lr", 0.1}, {"weight_decay", 0}, {"eps", 1e-8}, {"lr_decay", 0}}};
  spec.init = {phalanx::InitKind::kUniform, 0.5};
  spec.has_statistics = entry == EntryKind::kShowClick;
  spec.entry = {entry, 3, 0.5, 0.1f, 1, 0.98f, 0, spec.has_statistics ? 4u : 0u, 0};
  return spec;
}

TableSpec stored(TableSpec spec, const Folder& folder) {
  spec.max_bytes = 1;  // no row stays in memory
  spec.folder = folder.path();
  return spec;
}

std::size_t record_bytes(const TableSpec& spec) { return spec.row_bytes() + 12; }

// Where a record begins in its file, whose segments are pages here.
std::size_t place_of(const TableSpec& spec, std::size_t record) {
  const std::size_t records = 4096 / record_bytes(spec);
  return record / records * 4096 + record % records * record_bytes(spec);
}

std::vector<std::int64_t> ids(std::int64_t count) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

void push(EmbeddingTable& table, std::span<const std::int64_t> keys, float value) {
  const std::vector<float> values(keys.size() * table.spec().dim, value);
  table.push(keys, {values.data(), 0.1});
}

std::vector<float> pulled(const EmbeddingTable& table, std::span<const std::int64_t> keys) {
  std::vector<float> values(keys.size() * table.spec().dim);
  table.pull(keys, values.data());
  return values;
}

// Changes the last byte of a record of each file, or changes it back.
void damage(const Folder& folder, const TableSpec& spec, std::size_t record) {
  const auto place = static_cast<off_t>(place_of(spec, record) + record_bytes(spec) - 1);
  for (const int file : folder.open_files()) {
    unsigned char byte = 0;
    CHECK(pread(file, &byte, 1, place) == 1);
    byte ^= 1;
    CHECK(pwrite(file, &byte, 1, place) == 1);
  }
}

// Pushes that empty the segment of a broken record, which lives no more, are whole.
void dead_records_may_break() {
  const Folder folder;
  const TableSpec spec = spec_of(EntryKind::kAny);
  EmbeddingTable table(stored(spec, folder)), twin(spec);
  const std::vector<std::int64_t> all = ids(4000);
  const auto push_both = [&](std::span<const std::int64_t> keys) {
    push(table, keys, 0.5f);
    push(twin, keys, 0.5f);
  };
  push_both(all);
  damage(folder, spec, 0);
  folder.drop_cache();  // so that it is the disk that gives it
  std::vector<std::int64_t> broken;
  for (const std::int64_t id : all) {
    if (throws<DamagedRow>([&] { pulled(table, {&id, 1}); })) broken.push_back(id);
  }
  CHECK(broken.size() == phalanx::kLanes && table.stored() == all.size());
  CHECK(throws<DamagedRow>([&] { push(table, broken, 0.5f); }));
  damage(folder, spec, 0);
  push_both(broken);
  push(twin, {}, 0);  // the push that failed was one
  damage(folder, spec, 0);
  std::mt19937_64 random(1);
  for (int step = 0; step < 40; ++step) {
    std::vector<std::int64_t> keys;
    for (const std::int64_t id : all) {
      if (random() % 8 == 0) keys.push_back(id);
    }
    push_both(keys);
    CHECK(pulled(table, keys) == pulled(twin, keys));
  }
  CHECK(table.tick() == twin.tick() && table.file_bytes() < 4 * all.size() * record_bytes(spec));
  CHECK(pulled(table, all) == pulled(twin, all));
}

// A day that cannot read all of a shard leaves open moments what it has read of it.
void moments_outlive_reads_that_fail() {
  const Folder folder;
  const TableSpec spec = spec_of(EntryKind::kShowClick);
  EmbeddingTable table(stored(spec, folder)), twin(spec);
  constexpr int kShard = 3;
  std::vector<std::int64_t> keys;
  std::mt19937_64 random(2);
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t hash = std::uint64_t{kShard} << 54 | (random() >> 10);
    keys.push_back(static_cast<std::int64_t>(phalanx::unmix64(hash) ^ spec.salt));
  }
  for (EmbeddingTable* each : {&table, &twin}) push(*each, keys, 0.5f);
  const std::uint64_t moment = table.begin_moment(0), other = twin.begin_moment(0);
  damage(folder, spec, 1400);
  CHECK(throws<DamagedRow>([&] { table.shrink(); }));
  damage(folder, spec, 1400);
  const ShardColumns read = table.read_moment(moment, kShard), expected = twin.read_moment(other, kShard);
  CHECK(read.keys.size() == keys.size() && read.keys == expected.keys);
  CHECK(std::memcmp(read.rows.get(), expected.rows.get(), keys.size() * spec.width() * sizeof(float)) == 0);
  table.end_moment(moment);
  twin.end_moment(other);
}

// Keys are to be named once; a call that does otherwise leaves the files whole.
void keys_may_come_twice() {
  const Folder folder;
  const TableSpec spec = spec_of(EntryKind::kAny);
  EmbeddingTable table(stored(spec, folder)), twin(spec);
  const std::vector<std::int64_t> all = ids(1000), twice = {7, 5, 7, 7, 5};
  for (EmbeddingTable* each : {&table, &twin}) {
    push(*each, all, 0.5f);
    push(*each, twice, 0.25f);
    push(*each, all, 0.5f);
  }
  for (int i = 0; i < 3; ++i) CHECK(pulled(table, twice) == pulled(twin, twice));
  CHECK(pulled(table, all) == pulled(twin, all));
  CHECK(table.rows() == all.size() && table.stored() == all.size());
}

}  // namespace

void test_broken_tiers() {
  dead_records_may_break();
  moments_outlive_reads_that_fail();
  keys_may_come_twice();
}
