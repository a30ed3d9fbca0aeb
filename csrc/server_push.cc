#include "server_push.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "unique.h"

namespace phalanx {
namespace {

constexpr std::array<const char*, 3> kKinds = {"gradient", "delta", "assign"};
constexpr std::array<ChangeKind, 3> kChanges = {ChangeKind::kPush, ChangeKind::kAdd, ChangeKind::kAssign};

template <class T>
std::optional<std::vector<T>> copied(const T* numbers, std::size_t count) {
  if (numbers == nullptr) return std::nullopt;
  return std::vector<T>(numbers, numbers + count);
}

// Null for a column that did not come; one that came may be empty.
template <class T>
const T* data_or_null(const std::optional<std::vector<T>>& numbers) {
  static const T kNothing{};
  if (!numbers) return nullptr;
  return numbers->empty() ? &kNothing : numbers->data();
}

std::string shape(std::size_t rows, std::size_t dim) {
  return "(" + std::to_string(rows) + ", " + std::to_string(dim) + ")";
}

// Adds up one column of the parts, in their order; `value(part, i)` is that of key i of a part.
template <class Value>
std::vector<float> summed(const std::vector<StoredUpdate>& parts, const std::vector<std::int64_t>& places,
                          std::size_t distinct, Value value) {
  std::vector<float> sums(distinct, 0.0f);
  const std::int64_t* place = places.data();
  for (const StoredUpdate& part : parts)
    for (std::size_t i = 0; i < part.keys.size(); ++i) sums[static_cast<std::size_t>(*place++)] += value(part, i);
  return sums;
}

float count_of(const StoredUpdate& part, std::size_t i) {
  return part.counts ? static_cast<float>((*part.counts)[i]) : 1.0f;
}

StoredUpdate merged(std::vector<StoredUpdate> parts) {
  if (parts.size() == 1) return std::move(parts.front());
  StoredUpdate& last = parts.back();
  const std::size_t dim = last.table->table->spec().dim;
  std::vector<std::span<const std::int64_t>> keys;
  std::size_t total = 0;
  for (const StoredUpdate& part : parts) {
    keys.emplace_back(part.keys);
    total += part.keys.size();
  }
  std::vector<std::int64_t> places(total);
  Distinct found = unique(keys, places);
  const std::size_t distinct = found.keys.size();
  std::vector<float> values(distinct * dim, 0.0f);
  std::span<const std::int64_t> rest = places;
  for (const StoredUpdate& part : parts) {
    add_weighted(rest.first(part.keys.size()), part.values.data(), dim, 1.0f, values.data());
    rest = rest.subspan(part.keys.size());
  }
  const std::vector<float> counts = summed(parts, places, distinct, count_of);
  if (last.shows || last.clicks) {
    // The defaults of a table: every occurrence a show, none a click.
    std::vector<float> shows = summed(parts, places, distinct, [](const StoredUpdate& part, std::size_t i) {
      return part.shows ? (*part.shows)[i] : count_of(part, i);
    });
    last.clicks = summed(parts, places, distinct, [](const StoredUpdate& part, std::size_t i) {
      return part.clicks ? (*part.clicks)[i] : 0.0f;
    });
    last.shows = std::move(shows);
  }
  last.keys = std::move(found.keys);
  last.values = std::move(values);
  last.counts.emplace(counts.begin(), counts.end());  // counts up to 2^24 are exact in float32
  return std::move(last);
}

}  // namespace

void check(const Update& update) {
  const std::string& name = update.table->name;
  const TablePush& sent = update.sent;
  const std::size_t dim = update.table->table->spec().dim, n = sent.keys.size();
  if (sent.rows != n || sent.values.size() != n * dim) {
    const std::size_t width = sent.rows > 0 ? sent.values.size() / sent.rows : dim;
    throw Refusal("ConfigError", "Gave table '" + name + "' " + kKinds[static_cast<std::size_t>(sent.kind)] +
                                     " rows of type float32 and shape " + shape(sent.rows, width) + " for " +
                                     std::to_string(n) + " keys; it holds rows of " + std::to_string(dim) +
                                     " values. Give float32 of shape " + shape(n, dim) + ".");
  }
  if (!sent.has_lr) return;
  if (!(sent.lr >= 0 && sent.lr < HUGE_VAL)) {
    throw Refusal("ConfigError", "Asked table '" + name + "' to learn at rate " + text_of(sent.lr) +
                                     ". Give a number of at least 0.");
  }
  if (sent.lr == 0 && !update.table->dividing_rule.empty()) {
    throw Refusal("ConfigError", "Asked table '" + name + "' to learn at rate 0, by which " +
                                     update.table->dividing_rule + " divides. Give more than 0.");
  }
}

void check_weight(double weight) {
  if (weight >= 0 && weight < HUGE_VAL) return;
  throw Refusal("ConfigError", "Asked for a push of weight " + text_of(weight) +
                                   ". Its weight is the rows of its batch: at least 0.");
}

TableChange prepare(const Update& update) {
  const EmbeddingTable& table = *update.table->table;
  const TablePush& sent = update.sent;
  const double lr = sent.has_lr ? sent.lr : table.spec().rule["lr"];
  return table.prepare(kChanges[static_cast<std::size_t>(sent.kind)], sent.keys,
                       {sent.values.data(), lr, sent.counts, sent.shows, sent.clicks});
}

StoredUpdate::StoredUpdate(const Update& update)
    : table(update.table), kind(update.sent.kind), has_lr(update.sent.has_lr), lr(update.sent.lr),
      keys(update.sent.keys.begin(), update.sent.keys.end()),
      values(update.sent.values.begin(), update.sent.values.end()),
      counts(copied(update.sent.counts, keys.size())), shows(copied(update.sent.shows, keys.size())),
      clicks(copied(update.sent.clicks, keys.size())) {}

Update StoredUpdate::view() const {
  TablePush sent;
  sent.kind = kind;
  sent.keys = keys;
  sent.values = values;
  sent.has_lr = has_lr;
  sent.lr = lr;
  sent.counts = data_or_null(counts);
  sent.shows = data_or_null(shows);
  sent.clicks = data_or_null(clicks);
  sent.rows = static_cast<std::uint32_t>(keys.size());
  return {table, sent, nullptr};
}

std::vector<StoredUpdate> averaged(std::vector<StoredPush> pushes) {
  double total = 0;
  for (const StoredPush& push : pushes) total += push.weight;
  std::vector<StoredUpdate> result;
  std::vector<std::vector<StoredUpdate>> by_table;
  for (StoredPush& push : pushes) {
    for (StoredUpdate& update : push.updates) {
      if (update.kind != UpdateKind::kGradient) {
        result.push_back(std::move(update));
        continue;
      }
      // A worker without rows of its own in this step must not even touch the state of a row, as a gradient of 0 would.
      if (!(push.weight > 0)) continue;
      const auto share = static_cast<float>(push.weight / total);
      for (float& value : update.values) value *= share;
      const auto place = std::find_if(by_table.begin(), by_table.end(), [&](const std::vector<StoredUpdate>& parts) {
        return parts.front().table == update.table;
      });
      if (place != by_table.end()) {
        place->push_back(std::move(update));
      } else {
        by_table.emplace_back().push_back(std::move(update));
      }
    }
  }
  for (std::vector<StoredUpdate>& parts : by_table) result.push_back(merged(std::move(parts)));
  return result;
}

std::string text_of(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  std::array<char, 32> text;
  const char* const end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  const std::string found(text.data(), static_cast<std::size_t>(end - text.data()));
  return found.find_first_of(".e") == std::string::npos ? found + ".0" : found;
}

}  // namespace phalanx
