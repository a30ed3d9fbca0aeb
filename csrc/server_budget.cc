#include "server_budget.h"

#include <algorithm>
#include <string>

namespace phalanx {
namespace {

std::uint64_t cost_of(const Update& update) {
  return update.table->table->spec().row_bytes() + EmbeddingTable::kIndexBytes;
}

// The bytes of the rows that ids without one would get. A table with a budget of its own drops others for them, or moves
// others to its files and keeps where they are.
std::uint64_t growth_of(const Update& update) {
  const EmbeddingTable& table = *update.table->table;
  const std::uint64_t rows = table.missing(update.sent.keys), most = table.spec().max_bytes;
  if (most == 0) return rows * cost_of(update);
  const std::uint64_t growth = std::min(rows * cost_of(update), most - std::min(most, table.bytes()));
  return table.spec().spills() ? std::max(growth, rows * EmbeddingTable::kIndexBytes) : growth;
}

void require_room(const Update& update) {
  try {
    update.table->table->require_room();
  } catch (const TableFull& full) {
    throw Refusal("BackendError", "Table '" + update.table->name + "': " + full.what());
  }
}

}  // namespace

void RowBudget::check(std::span<const TablePtr> tables, std::span<const Update> updates) {
  for (const Update& update : updates) require_room(update);
  // Most pushes make few rows or none. They are not looked for while there is room for all ids to be new.
  std::uint64_t at_most = 0;
  for (const Update& update : updates) at_most += update.sent.keys.size() * cost_of(update);
  const std::lock_guard locked(lock_);
  if (at_most <= room_) {
    room_ -= at_most;
    return;
  }
  std::uint64_t used = 0, needed = 0, largest = 0;
  for (const TablePtr& table : tables) used += table->table->bytes();
  const std::string* name = nullptr;
  for (const Update& update : updates) {
    const std::uint64_t growth = growth_of(update);
    needed += growth;
    if (growth > largest) largest = growth, name = &update.table->name;
  }
  if (name != nullptr && used + needed > bytes_) {
    throw Refusal("BackendError",
                  "A push would make rows of " + std::to_string(needed) + " bytes, " + std::to_string(largest) +
                      " of them in table '" + *name + "'. The tables of this server take " + std::to_string(used) +
                      " bytes and may take " + std::to_string(bytes_) +
                      " (PHALANX_SERVER_MAX_BYTES). Start more servers, let rows go (max_bytes=, unseen_days=), or raise "
                      "the budget if the host has more memory.");
  }
  room_ = bytes_ - std::min(bytes_, used + needed);
}

}  // namespace phalanx
