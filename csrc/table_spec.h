// The settings of a table as numbers. They come from Python, where they are checked (ps/table/rules.py, update_rules.py, row_layout.py).

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace phalanx {

enum class InitKind { kUniform, kNormal, kConstant };
enum class EntryKind { kAny, kCount, kProbability, kShowClick };
// Of values of rows in files; kFloat32: as they are in memory.
enum class FileDtype { kFloat32, kBfloat16, kInt8 };

// The settings of an update rule by name, as `UpdateRule.numbers` gives them; a rule reads its own.
struct RuleSpec {
  std::string kind;
  std::map<std::string, double> numbers;

  double operator[](const char* name) const { return numbers.at(name); }
};

struct InitSpec {
  InitKind kind = InitKind::kConstant;
  double scale = 0;  // of uniform: the half width; of normal: the standard deviation; of constant: the value
};

struct EntrySpec {
  EntryKind kind = EntryKind::kAny;
  std::uint32_t count = 0;
  double probability = 1;
  float show_weight = 0;
  float click_weight = 0;
  float decay = 1;
  float drop_below = 0;
  std::uint64_t unseen_days = 0;   // after which a row goes; 0 for never, in any kind
  std::uint64_t waiting_days = 0;  // after which a waiting id goes; 0 for never

  std::uint64_t days() const { return std::max(unseen_days, waiting_days); }  // that shards remember
};

struct TableSpec {
  std::uint64_t salt = 0;
  std::uint64_t seed = 0;
  std::size_t dim = 0;
  std::vector<float> initial_state;  // optimizer state of a new row
  bool has_statistics = false;
  bool is_bfloat16 = false;
  std::uint64_t max_bytes = 0;  // 0 for no limit
  std::string folder;           // of the files for rows that max_bytes has no room for; empty: they are dropped
  FileDtype file_dtype = FileDtype::kFloat32;  // REQUIRES: kFloat32 where is_bfloat16
  RuleSpec rule;
  InitSpec init;
  EntrySpec entry;

  bool spills() const { return max_bytes != 0 && !folder.empty(); }
  std::size_t state() const { return initial_state.size(); }  // float32 columns of optimizer state
  std::size_t value_bytes() const { return is_bfloat16 ? (dim * 2 + 3) / 4 * 4 : dim * 4; }
  std::size_t row_bytes() const { return value_bytes() + 4 * (state() + (has_statistics ? 2 : 0)); }
  std::size_t width() const { return dim + state() + (has_statistics ? 2 : 0); }
};

}  // namespace phalanx
