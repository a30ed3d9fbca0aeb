#include "slots.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <utility>

#include "mix.h"

namespace phalanx {
namespace {

constexpr std::size_t kShownBytes = 40;

std::uint64_t little_endian(const char* bytes, std::size_t count) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, count);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

// Decimal numbers that float32 can hold; not inf, nan or hexadecimal ones.
bool read_number(std::string_view text, float& out) noexcept {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return false;
  out = static_cast<float>(value);
  return std::isfinite(out);
}

// The text up to `end`, taken off `rest` together with the character that ends it.
std::string_view take(std::string_view& rest, std::size_t end) noexcept {
  const std::string_view field = rest.substr(0, end);
  rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  return field;
}

// How much of the row arrays existed before a line, so that a broken one leaves nothing behind.
struct Mark {
  std::size_t label, dense, ids, offsets;

  explicit Mark(const SlotRows& rows)
      : label(rows.label.size()), dense(rows.dense.size()), ids(rows.ids.size()), offsets(rows.offsets.size()) {}

  void restore(SlotRows& rows) const {
    rows.label.resize(label);
    rows.dense.resize(dense);
    rows.ids.resize(ids);
    rows.offsets.resize(offsets);
  }
};

}  // namespace

std::uint64_t hash_text(std::uint64_t seed, std::string_view text) noexcept {
  std::uint64_t state = mix64(seed + text.size());
  for (; text.size() > 8; text.remove_prefix(8)) state = mix64(state ^ little_endian(text.data(), 8));
  return mix64(state ^ little_endian(text.data(), text.size()));
}

std::int64_t id_of_text(std::uint64_t seed, std::string_view text, std::uint64_t hash_space) noexcept {
  const std::uint64_t hash = hash_text(seed, text);
  return static_cast<std::int64_t>(hash_space ? hash % hash_space : hash);
}

std::uint64_t seed_of_salt(std::string_view salt) noexcept { return hash_text(0, salt); }

SlotParser::SlotParser(SlotSchema schema, bool is_columns) : schema_(std::move(schema)), is_columns_(is_columns) {
  for (std::size_t i = 0; i < schema_.dense.size(); ++i) names_[schema_.dense[i]] = {true, i};
  for (std::size_t i = 0; i < schema_.sparse.size(); ++i) {
    names_[schema_.sparse[i]] = {false, i};
    seeds_.push_back(seed_of_salt(schema_.salts[i]));
  }
}

SlotRows SlotParser::parse(std::string_view text) const {
  SlotRows out;
  Scratch scratch;
  if (!is_columns_) out.offsets.push_back(0);
  for (std::int64_t number = 0; !text.empty(); ++number) {
    std::string_view line = take(text, text.find('\n'));
    if (line.ends_with('\r')) line.remove_suffix(1);
    const Mark before(out);
    const auto failure = is_columns_ ? columns(line, out) : tokens(line, out, scratch);
    if (!failure) {
      ++out.rows;
      continue;
    }
    before.restore(out);
    if (!out.broken++) {
      out.first_broken = {failure->kind, number, failure->field, std::string(failure->found.substr(0, kShownBytes))};
    }
  }
  return out;
}

std::optional<SlotParser::Failure> SlotParser::columns(std::string_view line, SlotRows& out) const {
  const std::size_t numbers = schema_.has_label + schema_.dense.size();
  const std::size_t fields = numbers + schema_.sparse.size();
  const std::size_t found = 1 + static_cast<std::size_t>(std::count(line.begin(), line.end(), '\t'));
  if (found != fields) return Failure{BrokenLine::kFields, static_cast<std::int64_t>(found), line};
  for (std::size_t i = 0; i < numbers; ++i) {
    const std::string_view field = take(line, line.find('\t'));
    const bool is_label = schema_.has_label && i == 0;
    float value = 0;
    if ((is_label || !field.empty()) && !read_number(field, value)) {
      return Failure{BrokenLine::kNumber, static_cast<std::int64_t>(i), field};
    }
    (is_label ? out.label : out.dense).push_back(value);
  }
  for (const std::uint64_t seed : seeds_) {
    out.ids.push_back(id_of_text(seed, take(line, line.find('\t')), schema_.hash_space));
  }
  return std::nullopt;
}

std::optional<SlotParser::Failure> SlotParser::tokens(std::string_view line, SlotRows& out, Scratch& scratch) const {
  const std::size_t row = out.dense.size();
  out.dense.resize(row + schema_.dense.size());
  scratch.seen.assign(schema_.dense.size(), false);
  scratch.bags.clear();
  bool wants_label = schema_.has_label;
  std::int64_t field = 0;
  while (!line.empty()) {
    const std::string_view token = take(line, line.find_first_of(" \t"));
    if (token.empty()) continue;
    const auto fails = [&](BrokenLine::Kind kind) { return Failure{kind, field, token}; };
    if (std::exchange(wants_label, false)) {
      float value = 0;
      if (!read_number(token, value)) return fails(BrokenLine::kNumber);
      out.label.push_back(value);
    } else {
      const std::size_t colon = token.find(':');
      if (colon == std::string_view::npos) return fails(BrokenLine::kToken);
      const auto name = names_.find(token.substr(0, colon));
      if (name == names_.end()) return fails(BrokenLine::kName);
      const std::string_view value = token.substr(colon + 1);
      const auto [is_dense, index] = name->second;
      if (!is_dense) {
        scratch.bags.emplace_back(index, id_of_text(seeds_[index], value, schema_.hash_space));
      } else if (scratch.seen[index]) {
        return fails(BrokenLine::kTwice);
      } else if (!read_number(value, out.dense[row + index])) {
        return fails(BrokenLine::kNumber);
      } else {
        scratch.seen[index] = true;
      }
    }
    ++field;
  }
  if (wants_label) return Failure{BrokenLine::kFields, 0, {}};
  std::stable_sort(scratch.bags.begin(), scratch.bags.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  auto bag = scratch.bags.begin();
  for (std::size_t slot = 0; slot < schema_.sparse.size(); ++slot) {
    for (; bag != scratch.bags.end() && bag->first == slot; ++bag) out.ids.push_back(bag->second);
    out.offsets.push_back(static_cast<std::int64_t>(out.ids.size()));
  }
  return std::nullopt;
}

}  // namespace phalanx
