// What a table is made of: the index of a lane against a map, and the memory of rows against the system's mappings.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "../../csrc/table_index.h"
#include "../../csrc/table_memory.h"
#include "check.h"

namespace {

using phalanx::Arena;
using phalanx::Entry;
using phalanx::kParts;
using phalanx::LaneIndex;
using phalanx::Slab;

std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

// The hash of lane 0 that has this part and these other bits.
std::uint64_t hash_in(std::uint64_t part, std::uint64_t bits) {
  return part << (64 - phalanx::kShardBits + phalanx::kLaneBits) | bits >> phalanx::kShardBits;
}

void insert(LaneIndex& index, std::map<std::uint64_t, std::uint32_t>& rows, std::uint64_t hash, std::uint32_t row) {
  Entry* entry = index.find(hash);
  if (entry->is_empty()) entry = index.insert(hash, entry);
  entry->row = rows[hash] = row;
}

void check_all(const LaneIndex& index, const std::map<std::uint64_t, std::uint32_t>& rows) {
  std::map<std::uint64_t, std::uint32_t> read;
  std::size_t used = 0;
  for (int part = 0; part < kParts; ++part) {
    used += index.used(part);
    index.each(part, [&](const Entry& entry) {
      CHECK(phalanx::part_of(entry.hash) == part);
      CHECK(read.emplace(entry.hash, entry.row).second);
    });
  }
  CHECK(read == rows && used == rows.size());
  for (const auto& [hash, row] : rows) CHECK(index.find(hash)->row == row);
}

// Insertions and erasures at random, with all entries looked at while the index grows.
void index_is_a_map(std::uint64_t parts, std::size_t steps) {
  std::mt19937_64 random(parts);
  LaneIndex index;
  std::map<std::uint64_t, std::uint32_t> rows;
  for (std::size_t step = 1; step <= steps; ++step) {
    const std::uint64_t hash = hash_in(random() % parts, random() << 40);  // few bits, so that some come again
    if (random() % 4 == 0) {
      const auto found = rows.lower_bound(hash);
      const std::uint64_t gone = found != rows.end() ? found->first : hash;
      index.erase(gone);
      rows.erase(gone);
    } else {
      insert(index, rows, hash, static_cast<std::uint32_t>(step));
    }
    if (step % 64 == 0) index.move(1);
    if (step % (steps / 64) == 0) check_all(index, rows);
  }
  check_all(index, rows);
  index.erase_part(0);
  std::erase_if(rows, [](const auto& row) { return phalanx::part_of(row.first) == 0; });
  check_all(index, rows);
}

// No insertion moves many entries, however many there are.
void growing_takes_small_steps() {
  std::mt19937_64 random(1);
  LaneIndex index;
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < 600'000; ++i) {
    const std::uint64_t before = index.moved(), hash = hash_in(random() % kParts, random());
    Entry* const entry = index.find(hash);
    if (!entry->is_empty()) continue;
    index.insert(hash, entry)->row = 1;
    if (i > 10'000) most = std::max(most, index.moved() - before);
  }
  CHECK(index.moved() > 600'000);
  CHECK(most < 400);
}

// A lane that is filled part after part, each of the size that the first one was, grows once.
void room_is_made_once() {
  LaneIndex index;
  std::mt19937_64 random(2);
  for (int part = 0; part < kParts; ++part) {
    index.reserve(part, 1000);
    for (int i = 0; i < 1000; ++i) {
      const std::uint64_t hash = hash_in(static_cast<std::uint64_t>(part), random());
      index.insert(hash, index.find(hash))->row = 1;
    }
  }
  CHECK(index.moved() == 0);
}

void blocks_are_few_mappings() {
  constexpr std::size_t kBlock = std::size_t{2} << 20;
  Arena arena(kBlock);
  [[maybe_unused]] const std::size_t before = mappings();
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 20'000; ++i) blocks.push_back(arena.take(true));  // 39 GiB, none of it written
#if !defined(__SANITIZE_THREAD__)  // it maps shadow memory for each of ours
  CHECK(mappings() < before + 100);
#endif
  CHECK(std::set<std::byte*>(blocks.begin(), blocks.end()).size() == blocks.size());
  std::memset(blocks[7], 1, kBlock);
  arena.give_back(blocks[7], true);
  CHECK(arena.take(true) == blocks[7]);
  CHECK(blocks[7][5] == std::byte{0});  // its memory had gone back to the system
}

void rows_keep_apart(std::size_t row_bytes) {
  Arena arena(Slab::block_bytes(row_bytes));
  Slab slab(arena, row_bytes, Entry::kWaiting, true);
  std::mt19937 random(3);
  std::vector<std::uint32_t> rows;
  const auto take = [&] {
    rows.push_back(slab.take());
    CHECK(rows.back() != Entry::kEmpty);
    std::memcpy(slab.row(rows.back()), &rows.back(), sizeof rows.back());
  };
  const auto give_back = [&](std::size_t i) {
    std::uint32_t written;
    std::memcpy(&written, slab.row(rows[i]), sizeof written);
    CHECK(written == rows[i]);
    slab.give_back(rows[i]);
    rows[i] = rows.back();
    rows.pop_back();
  };
  const std::size_t many = 5 * Slab::block_bytes(row_bytes) / row_bytes;
  while (rows.size() < many) take();
  const std::size_t full = slab.bytes();
  for (std::size_t i = 0; i < 2 * many; ++i) {
    if (random() % 2 == 0 && !rows.empty()) {
      give_back(random() % rows.size());
    } else {
      take();
    }
  }
  while (!rows.empty()) give_back(rows.size() - 1);
  CHECK(slab.bytes() < full / 2);
  for (std::size_t i = 0; i < many; ++i) take();
  CHECK(std::set<std::uint32_t>(rows.begin(), rows.end()).size() == many);
  slab.clear();
  CHECK(slab.bytes() == 0);
  CHECK(slab.take() != Entry::kEmpty);
}

}  // namespace

void test_table_parts() {
  for (const std::uint64_t parts : {1, 3, 64}) index_is_a_map(parts, 20'000);
  growing_takes_small_steps();
  room_is_made_once();
  blocks_are_few_mappings();
  for (const std::size_t row_bytes : {4, 60, 4096, 300'000}) rows_keep_apart(row_bytes);
}
