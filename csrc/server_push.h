// A push as the engine takes it: its updates with their tables and keys found, checked, stored, averaged over workers.
//
// Thread-safety: values; functions of their arguments alone.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server_request.h"
#include "table.h"

namespace phalanx {

struct ServerTable {
  std::string name;
  std::string json_name;       // in quotes, as the log has it
  std::string dividing_rule;   // its rule's name, if that divides by the learning rate; else empty
  std::shared_ptr<EmbeddingTable> table;
};

using TablePtr = std::shared_ptr<const ServerTable>;
using KeysPtr = std::shared_ptr<const std::vector<std::int64_t>>;

// What a push says of one table. `sent` has the keys, also where they came with a pull.
struct Update {
  TablePtr table;
  TablePush sent;
  KeysPtr pulled_keys;  // what `sent.keys` points into then
};

// Throws Refusal if it cannot be applied; names the table.
void check(const Update& update);
void check_weight(double weight);

// What makes the change of an update's table; it points into the update's arrays.
TableChange prepare(const Update& update);

// An update with arrays of its own.
struct StoredUpdate {
  TablePtr table;
  UpdateKind kind;
  bool has_lr;
  double lr;
  std::vector<std::int64_t> keys;
  std::vector<float> values;
  std::optional<std::vector<std::uint32_t>> counts;
  std::optional<std::vector<float>> shows, clicks;

  explicit StoredUpdate(const Update& update);
  Update view() const;
};

// A push that waits for the rest of its step.
struct StoredPush {
  std::uint64_t step;
  double weight;
  std::vector<StoredUpdate> updates;
};

// What several workers pushed as one change per table. Gradients are added in the order given, each times its weight
// over the sum of weights, at the learning rate of the last that named the table. Other kinds come as they are, first.
// Adds up as ps/client/update_sums.py does.
std::vector<StoredUpdate> averaged(std::vector<StoredPush> pushes);

// A number as Python writes it.
std::string text_of(double number);

}  // namespace phalanx
