// Tables: every rule and entry policy by one thread, and calls of many threads at once.

#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>

#include "../../csrc/table.h"
#include "check.h"

namespace {

using phalanx::EmbeddingTable;
using phalanx::EntryKind;
using phalanx::InitKind;
using phalanx::TableSpec;

struct RuleCase {
  const char* kind;
  std::map<std::string, double> numbers;
  std::size_t state_of_dim, state;  // columns of optimizer state: state_of_dim * dim + state
};

const std::vector<RuleCase> kRules = {
    {"sgd", {{"lr", 0.1}, {"weight_decay", 0.01}}, 0, 0},
    {"momentum", {{"lr", 0.1}, {"weight_decay", 0}, {"momentum", 0.9}, {"dampening", 0.1}, {"nesterov", 0}}, 1, 1},
    {"adagrad", {{"lr", 0.1}, {"weight_decay", 0}, {"eps", 1e-8}, {"lr_decay", 0.1}}, 1, 1},
    {"row_wise_adagrad", {{"lr", 0.1}, {"eps", 1e-8}}, 0, 1},
    {"adam", {{"lr", 0.1}, {"weight_decay", 0.1}, {"eps", 1e-8}, {"betas.0", 0.9}, {"betas.1", 0.99}, {"decoupled", 1}},
     2, 1},
    {"rmsprop", {{"lr", 0.1}, {"weight_decay", 0}, {"eps", 1e-8}, {"alpha", 0.9}}, 1, 0},
    {"ftrl", {{"lr", 0.1}, {"beta", 1}, {"l1", 0.1}, {"l2", 0.1}}, 2, 0},
};

TableSpec spec_of(const RuleCase& rule, std::size_t dim, EntryKind entry, bool is_bfloat16, std::uint64_t max_bytes) {
  TableSpec spec;
  spec.salt = 7;
  spec.seed = 3;
  spec.dim = dim;
  spec.initial_state.assign(rule.state_of_dim * dim + rule.state, 0.1f);
  spec.is_bfloat16 = is_bfloat16;
  spec.max_bytes = max_bytes;
  spec.rule = {rule.kind, rule.numbers};
  spec.init = {InitKind::kNormal, 0.01};
  spec.has_statistics = entry == EntryKind::kShowClick;
  spec.entry = {entry, 2, 0.5, 0.1f, 1, 0.98f, 0.2f, 3, 2};
  return spec;
}

std::vector<std::int64_t> ids(std::size_t count, std::int64_t first, std::int64_t step) {
  std::vector<std::int64_t> keys(count);
  for (std::size_t i = 0; i < count; ++i) keys[i] = first + static_cast<std::int64_t>(i) * step;
  return keys;
}

// Buffers have the exact length, so that a sanitizer sees what reaches behind them.
void push(EmbeddingTable& table, const std::vector<std::int64_t>& keys, float value) {
  const std::vector<float> gradients(keys.size() * table.spec().dim, value), ones(keys.size(), 1.0f);
  const std::vector<std::uint32_t> counts(keys.size(), 1);
  table.push(keys, {gradients.data(), 0.1, counts.data(), ones.data(), ones.data()});
}

std::vector<float> pull(const EmbeddingTable& table, const std::vector<std::int64_t>& keys) {
  std::vector<float> rows(keys.size() * table.spec().dim);
  table.pull(keys, rows.data());
  return rows;
}

// Returns how many rows there were.
std::size_t restore(EmbeddingTable& to, int shard, const phalanx::ShardColumns& read) {
    to.restore(shard, {read.keys, read.ticks, read.rows.get(), read.waiting_keys, read.waiting_ticks,
                       read.waiting_counts, read.days, read.removed, read.decays, read.tick, read.is_complete});
    return read.keys.size();
}

// Puts what one table holds into another, through copies of the exact length.
void copy(const EmbeddingTable& from, EmbeddingTable& to) {
  for (int shard = 0; shard < phalanx::kShards; ++shard) restore(to, shard, from.read(shard, 0));
}

void use(const TableSpec& spec) {
  EmbeddingTable table(spec), other(spec);
  // In `many` a lane has more than one block.
  const std::vector<std::int64_t> few = ids(17, -8, 1), many = ids(spec.dim == 1 && spec.state() == 0 ? 150'000 : 20'000, 1 << 20, 977);
  for (int step = 0; step < 3; ++step) {
    push(table, few, 0.5f);
    push(table, many, -0.25f);
    push(table, {}, 0);
  }
  const std::vector<float> values(few.size() * spec.dim, 2.0f);
  table.add(few, values.data());
  table.assign(few, values.data());
  for (const float value : pull(table, few)) CHECK(value == 2.0f);
  for (const float value : pull(table, many)) CHECK(std::isfinite(value));
  table.shrink();
  copy(table, other);
  CHECK(other.rows() == table.rows());
  CHECK(pull(other, many) == pull(table, many));
  if (spec.max_bytes != 0) CHECK(table.rows() * spec.row_bytes() <= spec.max_bytes);
  push(other, many, 1.0f);
  other.clear();
  CHECK(other.rows() == 0);
}

// A delta over the base it was made on is the table, whatever went and came in between.
void follow(EntryKind entry, std::uint64_t max_bytes) {
  EmbeddingTable table(spec_of(kRules[2], 8, entry, false, max_bytes)), other(table.spec());
  push(table, ids(20'000, 0, 1), 0.5f);
  copy(table, other);
  for (int round = 0; round < 3; ++round) {
    const std::uint64_t base = table.tick();
    push(table, ids(500, 300 * round, 31), 0.25f);
    if (round == 1) table.shrink();
    push(table, ids(700, 1'000'000 * round, 1), 0.25f);
    std::size_t rows = 0;
    for (int shard = 0; shard < phalanx::kShards; ++shard) rows += restore(other, shard, table.read(shard, base));
    CHECK(rows < 4000);
    CHECK(other.rows() == table.rows());
    for (int shard = 0; shard < phalanx::kShards; ++shard) {
      const phalanx::ShardColumns left = table.read(shard, 0), right = other.read(shard, 0);
      CHECK(left.keys == right.keys && left.ticks == right.ticks && left.waiting_keys == right.waiting_keys);
      CHECK(std::equal(left.rows.get(), left.rows.get() + left.keys.size() * table.spec().width(), right.rows.get()));
    }
  }
}

// Everything a table can do, from many threads; rows stay whole: pushes of equal numbers leave equal numbers in a row.
void share(EntryKind entry, std::uint64_t max_bytes) {
  EmbeddingTable table(spec_of(kRules[2], 8, entry, false, max_bytes));
  std::atomic<bool> is_over = false;
  in_threads(4, [&](int number) {
    const std::vector<std::int64_t> keys = ids(3000, number % 2, 2);
    for (int step = 0; step < 25; ++step) {
      if (number < 2) {
        push(table, keys, 0.5f);
      } else if (number == 2) {
        for (const float value : pull(table, keys)) CHECK(std::isfinite(value));
        CHECK(table.bytes() < 1 << 30 && table.tick() < 1000 && table.dropped() + table.evicted() + table.pushed() < 1 << 30);
      } else {
        table.read(step % phalanx::kShards, 0);
        table.keys(step % phalanx::kShards);
        table.shrink();
        const std::uint64_t moment = table.begin_moment(step % 2 * table.tick());
        for (int shard = step; shard < 200; ++shard) table.read_moment(moment, shard);
        table.end_moment(moment);
        if (step == 20) table.clear();
      }
    }
    is_over = true;
  });
  CHECK(is_over);
}

bool is_equal(const EmbeddingTable& one, const EmbeddingTable& other) {
  for (int shard = 0; shard < phalanx::kShards; ++shard) {
    const phalanx::ShardColumns a = one.read(shard, 0), b = other.read(shard, 0);
    const std::size_t bytes = a.keys.size() * one.spec().width() * sizeof(float);
    if (a.keys != b.keys || a.ticks != b.ticks || a.waiting_keys != b.waiting_keys) return false;
    if (a.waiting_counts != b.waiting_counts || a.days != b.days || a.tick != b.tick) return false;
    if (bytes > 0 && std::memcmp(a.rows.get(), b.rows.get(), bytes) != 0) return false;
  }
  return one.rows() == other.rows() && one.evicted() == other.evicted() && one.dropped() == other.dropped();
}

// Change number `i` of a list that is the same in every run: gradients, deltas and values for rows that many of them name.
phalanx::TableChange change_of(const EmbeddingTable& table, std::size_t i, const std::vector<std::int64_t>& keys,
                               const std::vector<float>& values) {
  using enum phalanx::ChangeKind;
  const phalanx::ChangeKind kind = i % 7 == 3 ? kAdd : i % 11 == 5 ? kAssign : kPush;
  return table.prepare(kind, keys, {values.data(), 0.1 / static_cast<double>(i + 1)});
}

// Changes that many threads apply leave the same bits as those that one applies, in the order of their places.
void order(const TableSpec& spec) {
  EmbeddingTable table(spec), expected(spec);
  constexpr std::size_t kChanges = 120;
  std::vector<std::vector<std::int64_t>> keys;
  std::vector<std::vector<float>> values;
  for (std::size_t i = 0; i < kChanges; ++i) {
    keys.push_back(ids(i % 13 == 0 ? 0 : 40 * (i % 5 + 1), static_cast<std::int64_t>(i % 3), 1 + static_cast<std::int64_t>(i % 4)));
    values.emplace_back(keys[i].size() * spec.dim, 0.01f * static_cast<float>(i + 1));
  }
  for (std::size_t i = 0; i < kChanges; ++i) {
    if (i == 60) expected.shrink();
    phalanx::TableChange change = change_of(expected, i, keys[i], values[i]);
    expected.apply(change, expected.order());
  }
  std::mutex line;
  std::size_t next = 0;
  in_threads(4, [&](int number) {
    for (;;) {
      std::unique_lock locked(line);
      const std::size_t i = next;
      if (i == kChanges) return;
      if (i == 60) table.shrink();
      ++next;
      const phalanx::Turn turn = table.order();
      locked.unlock();
      phalanx::TableChange change = change_of(table, i, keys[i], values[i]);
      table.apply(change, turn);
      if (number == 3) {
        table.end_moment(table.begin_moment(0));
      }
    }
  });
  CHECK(is_equal(table, expected));
}

// A change that is given up lets those behind it through, and two places of one thread do not wait for each other.
void give_up() {
  EmbeddingTable table(spec_of(kRules[0], 4, EntryKind::kAny, false, 0));
  const std::vector<std::int64_t> keys = ids(100, 0, 1);
  const std::vector<float> values(400, 1.0f);
  const phalanx::Turn lost = table.order(), first = table.order(2), second = {first.number + 1, first.tick + 1};
  std::thread behind([&] { push(table, keys, 0.5f); });
  table.give_up(lost);
  for (const phalanx::Turn turn : {first, second}) {
    phalanx::TableChange change = change_of(table, 3, keys, values);
    table.apply(change, turn);
  }
  behind.join();
  CHECK(table.tick() == 4 && table.pushed() == 300);
}

}  // namespace

void test_tables() {
  for (const EntryKind entry : {EntryKind::kAny, EntryKind::kCount, EntryKind::kShowClick})
    order(spec_of(kRules[2], 8, entry, entry == EntryKind::kAny, 0));
  order(spec_of(kRules[4], 4, EntryKind::kAny, false, 1 << 14));
  give_up();
  share(EntryKind::kAny, 0);
  share(EntryKind::kShowClick, 0);
  share(EntryKind::kCount, 0);
  share(EntryKind::kAny, 1 << 16);
  if constexpr (kFindsRaces) return;
  for (const RuleCase& rule : kRules)
    for (const std::size_t dim : {1, 3, 16}) use(spec_of(rule, dim, EntryKind::kAny, dim == 3, 0));
  for (const EntryKind entry : {EntryKind::kCount, EntryKind::kProbability, EntryKind::kShowClick})
    use(spec_of(kRules[0], 5, entry, false, 0));
  use(spec_of(kRules[2], 8, EntryKind::kAny, false, 1 << 18));
  follow(EntryKind::kAny, 0);
  follow(EntryKind::kCount, 0);
  follow(EntryKind::kShowClick, 0);
  follow(EntryKind::kAny, 21'000 * 96);
}
