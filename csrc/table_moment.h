// A shard as it was at a moment, read while changes continue.
//
// The hashes of a shard are divided into equal pieces of some 256 entries, which are read one after the other, each
// under its lane's lock and in some tens of microseconds. The first change of an entry that a piece still to be read had
// at the moment keeps a copy of it and of its row; what has a later tick and no such copy was not there. So a moment
// costs memory for rows that change before they are read, and nothing for others.
//
// What changes rows without their ticks (decay, `restore`, `clear`, new numbers for ticks) reads what is left of the
// shard into memory first. It changes the whole shard anyway, and nobody waits for whoever reads the moment.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "table_columns.h"
#include "table_index.h"
#include "table_spec.h"

namespace phalanx {

// Entries with their rows, ordered by hash. An entry that waits has no row.
struct Piece {
  std::vector<Entry> entries;
  std::vector<std::byte> rows;
};

// An entry as it was, in front of its row.
struct OldEntry {
  Entry entry;
  std::uint32_t next;  // of the same piece; 0 for none

  // What one takes of memory, with its row.
  static constexpr std::size_t bytes(std::size_t row_bytes) {
    return (sizeof(OldEntry) + row_bytes + alignof(OldEntry) - 1) / alignof(OldEntry) * alignof(OldEntry);
  }
};

// What a lane keeps to read one of its shards as it was. Guarded by its lane's lock.
struct PastShard {
  Time time{};               // the moment
  std::uint64_t since = 0;   // a delta begins behind this tick
  bool is_complete = true;   // no delta
  bool is_read = false;
  std::uint32_t from = 0, until = 0;  // shortened ticks of what is read, both included
  std::uint64_t used = 0;             // entries there were
  std::uint64_t pieces = 0, next = 0;
  std::uint64_t decays = 0;
  std::vector<std::uint64_t> days;
  std::optional<std::vector<std::uint64_t>> removed;  // hashes of what went, once the lane forgets some of them
  std::vector<std::uint32_t> old;                     // by piece, its newest old entry; empty when there is none yet
  std::deque<Piece> early;                            // pieces that were read before someone asked for them

  bool is_left() const { return next < pieces; }
  // Whether an entry was there at the moment, if nothing has changed it since.
  bool had(const Entry& entry) const { return from <= entry.tick && entry.tick <= until; }
  // Whether an entry that is about to change has to be kept.
  bool needs(const Entry& entry) const { return is_left() && had(entry) && piece_of(entry.hash, pieces) >= next; }
};

// Makes columns of the pieces of a shard, without a lock.
class ShardReading {
 public:
  ShardReading(const TableSpec& spec, const PastShard& past);

  void add(const Piece& piece);
  // `removed` are hashes of ids that went, in any order; those that came back are left out.
  ShardColumns finish(std::vector<std::uint64_t> removed);

 private:
  const TableSpec& spec_;
  std::uint64_t oldest_;
  ShardColumns columns_;
  float* next_row_;
  std::vector<std::uint64_t> hashes_;  // of a delta: all that is there
};

}  // namespace phalanx
