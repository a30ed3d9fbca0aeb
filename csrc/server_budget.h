// The bytes that all tables of one server may take.
//
// Thread-safety: any thread.

#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "server_push.h"

namespace phalanx {

class RowBudget {
 public:
  explicit RowBudget(std::uint64_t bytes) : bytes_(bytes) {}

  // Called before a push is logged, with all tables of the server. Throws Refusal if there is no room for the rows that
  // the push makes, or a table's rows cannot leave memory; names the table that would grow most, the bytes and what to do. Pushes that are applied meanwhile may
  // go beyond the budget by their own rows.
  void check(std::span<const TablePtr> tables, std::span<const Update> updates);

 private:
  const std::uint64_t bytes_;
  std::mutex lock_;
  std::uint64_t room_ = 0;  // what the pushes to come may take before tables are counted again
};

}  // namespace phalanx
