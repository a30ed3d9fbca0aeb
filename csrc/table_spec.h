// The settings of a table as numbers. They come from Python, where they are checked (ps/table/rules.py, ps/table/row_layout.py).

#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

enum class RuleKind { kSgd, kMomentum, kAdagrad, kRowWiseAdagrad, kAdam, kRmsprop, kFtrl };
enum class InitKind { kUniform, kNormal, kConstant };
enum class EntryKind { kAny, kCount, kProbability, kShowClick };

// One value per field that some rule has; a rule reads its own.
struct RuleSpec {
  RuleKind kind = RuleKind::kSgd;
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  double lr_decay = 0;
  double initial_accumulator = 0;
  double first_beta = 0;
  double second_beta = 0;
  bool decoupled = false;
  double alpha = 0;
  double eps = 0;
  double beta = 0;
  double l1 = 0;
  double l2 = 0;
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
  std::uint64_t unseen_days = 0;
};

struct TableSpec {
  std::uint64_t salt = 0;
  std::uint64_t seed = 0;
  std::size_t dim = 0;
  std::size_t state = 0;  // float32 columns of optimizer state
  bool has_statistics = false;
  bool is_bfloat16 = false;
  std::uint64_t max_bytes = 0;  // 0 for no limit
  RuleSpec rule;
  InitSpec init;
  EntrySpec entry;

  std::size_t value_bytes() const { return is_bfloat16 ? (dim * 2 + 3) / 4 * 4 : dim * 4; }
  std::size_t row_bytes() const { return value_bytes() + 4 * (state + (has_statistics ? 2 : 0)); }
  std::size_t width() const { return dim + state + (has_statistics ? 2 : 0); }
};

}  // namespace phalanx
