// The places of one push in the order of its tables.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server_push.h"

namespace phalanx {

// Places that a push got in its tables. Those not applied when it ends are given up, for those behind them wait.
class PushTurns {
 public:
  explicit PushTurns(std::span<const Update> updates) : updates_(updates), turns_(updates.size()) {}
  PushTurns(const PushTurns&) = delete;
  ~PushTurns() {
    for (; next_ < ordered_; ++next_) table(next_).give_up(turns_[next_]);
  }

  // Takes a place for each update; those of one table follow each other.
  void order() {
    for (std::size_t i = 0; i < updates_.size(); ++i) {
      if (turns_[i].number != 0) continue;
      std::uint64_t count = 0;
      for (const Update& other : updates_) count += other.table == updates_[i].table;
      Turn turn = table(i).order(count);
      for (std::size_t k = i; k < updates_.size(); ++k) {
        if (updates_[k].table == updates_[i].table) turns_[k] = turn, ++turn.number, ++turn.tick;
      }
    }
    ordered_ = updates_.size();
  }

  std::uint64_t apply(std::vector<TableChange>& changes) {
    std::uint64_t dropped = 0;
    while (next_ < ordered_) {
      const std::size_t i = next_++;  // a change that fails is through
      dropped += table(i).apply(changes[i], turns_[i]);
    }
    return dropped;
  }

 private:
  EmbeddingTable& table(std::size_t i) { return *updates_[i].table->table; }

  std::span<const Update> updates_;
  std::vector<Turn> turns_;
  std::size_t ordered_ = 0;
  std::size_t next_ = 0;
};

}  // namespace phalanx
