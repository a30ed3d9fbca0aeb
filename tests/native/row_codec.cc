// Rows as files keep them: how far values are from what they were, and a table whose rows are rounded as they leave.

#include "../../csrc/table_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "../../csrc/table.h"
#include "check.h"
#include "row_folder.h"

namespace {

using phalanx::EmbeddingTable;
using phalanx::FileDtype;
using phalanx::RowCodec;
using phalanx::ShardColumns;
using phalanx::TableSpec;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::array kRounding = {FileDtype::kBfloat16, FileDtype::kInt8};

std::vector<float> coded(FileDtype dtype, std::size_t dim, const std::vector<float>& row) {
  const RowCodec codec(dtype, dim, row.size() * sizeof(float));
  std::vector<std::uint32_t> file(codec.bytes() / 4);
  std::vector<float> read(row.size());
  codec.encode(reinterpret_cast<const std::byte*>(row.data()), reinterpret_cast<std::byte*>(file.data()));
  codec.decode(reinterpret_cast<const std::byte*>(file.data()), reinterpret_cast<std::byte*>(read.data()));
  return read;
}

bool is_same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The most that a value may be from what it was.
float bound(FileDtype dtype, const std::vector<float>& values, float value) {
  if (dtype == FileDtype::kBfloat16) return std::max(std::fabs(value) * 0x1p-8f, 0x1p-134f);
  float most = 0;
  for (const float other : values) most = std::max(most, std::isfinite(other) ? std::fabs(other) : 0);
  return std::max(most / 126, FLT_MIN) * 0.50001f;
}

// Holds each value to its bound, and what was rounded to itself when it is written again.
void keeps_values(FileDtype dtype, const std::vector<float>& values) {
  const std::vector<float> read = coded(dtype, values.size(), values);
  for (std::size_t j = 0; j < values.size(); ++j) {
    if (std::isfinite(values[j])) CHECK(std::fabs(read[j] - values[j]) <= bound(dtype, values, values[j]));
    else CHECK(std::isnan(values[j]) ? std::isnan(read[j]) : read[j] == values[j]);
  }
  CHECK(is_same(coded(dtype, values.size(), read), read));
}

void rows_keep_their_values(FileDtype dtype) {
  const float least = std::numeric_limits<float>::denorm_min();
  keeps_values(dtype, {0, 0, 0});
  keeps_values(dtype, {1});
  keeps_values(dtype, {-0.0f, 1, -1, 0.3f, -0.7f});
  keeps_values(dtype, {kNan, kInfinity, -kInfinity, 0.5f, -0.25f, 0});
  keeps_values(dtype, {kNan, kNan});
  keeps_values(dtype, {kInfinity, -kInfinity});
  keeps_values(dtype, {least, -least, 3 * least, 0});
  keeps_values(dtype, {FLT_MIN, -FLT_MIN / 2, least});
  keeps_values(dtype, {126 * FLT_MIN, FLT_MIN, -FLT_MIN / 3});
  keeps_values(dtype, {1e-30f, 1e30f, -1e-30f});
  if (dtype == FileDtype::kInt8) keeps_values(dtype, {FLT_MAX, -FLT_MAX, FLT_MAX / 3, 1});
  std::mt19937_64 random(7);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<float> values(1 + random() % 9);
    const bool is_any = random() % 2 == 0;  // any bits, or values of one size
    for (float& value : values) {
      value = is_any ? std::bit_cast<float>(static_cast<std::uint32_t>(random()))
                     : static_cast<float>(random() % 2001) * 1e-4f - 0.1f;
      if (dtype == FileDtype::kBfloat16 && std::fabs(value) > 3.38e38f) value = 0;  // those nearest to infinity become it
    }
    keeps_values(dtype, values);
  }
}

// Where all values are whole, a row of int8 whose scale is whole too keeps them.
void known_bits() {
  CHECK(is_same(coded(FileDtype::kInt8, 4, {126, -3, 64, 0}), {126, -3, 64, 0}));
  CHECK(is_same(coded(FileDtype::kInt8, 3, {252, 1, 3}), {252, 0, 4}));  // ties to even
  CHECK(is_same(coded(FileDtype::kBfloat16, 3, {1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 256}), {1, 1 + 0x1p-6f, 256}));
}

// What follows the values is as it was, and rows take fewer bytes.
void state_is_exact() {
  std::vector<float> row(7 + 5);
  for (std::size_t j = 0; j < row.size(); ++j) row[j] = 0.1f * static_cast<float>(j) + 1e-6f;
  for (const FileDtype dtype : {FileDtype::kFloat32, FileDtype::kBfloat16, FileDtype::kInt8}) {
    const std::vector<float> read = coded(dtype, 7, row);
    CHECK(std::memcmp(read.data() + 7, row.data() + 7, 5 * sizeof(float)) == 0);
    CHECK(is_same(read, row) == (dtype == FileDtype::kFloat32));
  }
  CHECK(RowCodec(FileDtype::kFloat32, 7, 48).bytes() == 48);
  CHECK(RowCodec(FileDtype::kBfloat16, 7, 48).bytes() == 16 + 20);
  CHECK(RowCodec(FileDtype::kInt8, 7, 48).bytes() == 4 + 8 + 20);
}

TableSpec spec_of(bool has_statistics) {
  TableSpec spec;
  spec.salt = 5;
  spec.dim = 7;
  spec.initial_state.assign(7, 0.1f);
  spec.rule = {"adagrad", {{"lr", 0.1}, {"weight_decay", 0}, {"eps", 1e-8}, {"lr_decay", 0}}};
  spec.init = {phalanx::InitKind::kUniform, 0.5};
  spec.has_statistics = has_statistics;
  spec.entry.kind = has_statistics ? phalanx::EntryKind::kShowClick : phalanx::EntryKind::kAny;
  spec.entry.unseen_days = 100;
  return spec;
}

// A table of which no row stays in memory, and one without a limit whose rows are rounded by hand after each change.
class Rounded {
 public:
  Rounded(FileDtype dtype, bool has_statistics) : dtype_(dtype), twin_(spec_of(has_statistics)), table_(spilled()) {}

  void push(std::span<const std::int64_t> keys, float value) {
    const std::vector<float> values(keys.size() * dim(), value), ones(keys.size(), 1.0f);
    for (EmbeddingTable* table : {&table_, &twin_}) table->push(keys, {values.data(), 0.1, nullptr, ones.data(), nullptr});
    const std::vector<float> rows = pulled(twin_, keys);
    std::vector<float> rounded;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto row = rows.begin() + static_cast<std::ptrdiff_t>(i * dim());
      const std::vector<float> read = coded(dtype_, dim(), {row, row + static_cast<std::ptrdiff_t>(dim())});
      rounded.insert(rounded.end(), read.begin(), read.end());
    }
    twin_.assign(keys, rounded.data());
  }

  void shrink() { CHECK(table_.shrink() == twin_.shrink()); }

  void check(std::span<const std::int64_t> keys) {
    CHECK(table_.stored() == table_.rows());
    CHECK(is_same(pulled(table_, keys), pulled(twin_, keys)));
    CHECK(table_.stored() == table_.rows());
  }

  // Each shard is read as it is pulled; a table that takes it over reads the same.
  void exchange(int shard) {
    const ShardColumns read = table_.read(shard, 0), other = twin_.read(shard, 0);
    const std::size_t bytes = read.keys.size() * table_.spec().width() * sizeof(float);
    CHECK(read.keys == other.keys && (bytes == 0 || std::memcmp(read.rows.get(), other.rows.get(), bytes) == 0));
    table_.restore(shard, {read.keys, read.ticks, read.rows.get(), read.waiting_keys, read.waiting_ticks,
                           read.waiting_counts, read.days, read.removed, read.decays, table_.tick(), true});
  }

  void drop_cache() const { folder_.drop_cache(); }
  const EmbeddingTable& table() const { return table_; }

 private:
  std::size_t dim() const { return twin_.spec().dim; }
  static std::vector<float> pulled(const EmbeddingTable& table, std::span<const std::int64_t> keys) {
    std::vector<float> values(keys.size() * table.spec().dim);
    table.pull(keys, values.data());
    return values;
  }
  TableSpec spilled() const {
    TableSpec spec = twin_.spec();
    spec.max_bytes = 1;
    spec.folder = folder_.path();
    spec.file_dtype = dtype_;
    return spec;
  }

  Folder folder_;
  const FileDtype dtype_;
  EmbeddingTable twin_, table_;
};

void rows_are_rounded_as_they_leave(FileDtype dtype, bool has_statistics) {
  Rounded twins(dtype, has_statistics);
  std::vector<std::int64_t> ids(3000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7919);
  std::mt19937_64 random(3);
  for (int step = 0; step < 120; ++step) {
    const std::size_t first = random() % 2500, count = 1 + random() % 500;
    const std::span<const std::int64_t> keys = std::span(ids).subspan(first, count);
    if (step % 10 == 0) twins.drop_cache();
    if (step % 4 == 0) twins.check(keys);
    else if (step % 30 == 5) twins.shrink();
    else if (step % 30 == 9) twins.exchange(static_cast<int>(random() % 1024));
    else twins.push(keys, 0.01f * static_cast<float>(random() % 200) - 1);
  }
  twins.check(ids);
  for (int shard = 0; shard < 1024; shard += 3) twins.exchange(shard);
  twins.check(ids);
}

// A row of 64 values with Adagrad takes 3/4 and 5/8 of what it takes in memory.
void files_are_smaller() {
  std::vector<std::uint64_t> bytes;
  for (const FileDtype dtype : {FileDtype::kFloat32, FileDtype::kBfloat16, FileDtype::kInt8}) {
    const Folder folder;
    TableSpec spec = spec_of(false);
    spec.dim = 64;
    spec.initial_state.assign(64, 0.1f);
    spec.max_bytes = 4 << 20;  // segments of 16 KiB, nearly all rows in the file
    spec.folder = folder.path();
    spec.file_dtype = dtype;
    EmbeddingTable table(spec);
    std::vector<std::int64_t> ids(2000);
    const std::vector<float> values(ids.size() * 64, 0.5f);
    for (std::int64_t first = 0; first < 100'000; first += 2000) {
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = first + static_cast<std::int64_t>(i);
      table.push(ids, {values.data(), 0.1});
    }
    bytes.push_back(table.file_bytes() / table.stored());
  }
  CHECK(bytes[0] >= 524 && bytes[0] < 545);
  CHECK(bytes[1] >= 396 && bytes[1] < 415);
  CHECK(bytes[2] >= 336 && bytes[2] < 354);
}

}  // namespace

void test_row_codec() {
  known_bits();
  state_is_exact();
  for (const FileDtype dtype : kRounding) {
    rows_keep_their_values(dtype);
    for (const bool has_statistics : {false, true}) rows_are_rounded_as_they_leave(dtype, has_statistics);
  }
  files_are_smaller();
}
