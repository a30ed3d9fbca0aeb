// Text of click logs into arrays: one line is one row of a label, dense numbers and sparse slots.
//
// Two formats. Columns: label, dense fields, sparse fields in the order of the schema, split by tabs; an empty dense
// field reads 0, an empty sparse field is an id of its own (the Criteo format). Tokens: a label, then name:value in
// any order, split by spaces or tabs; a slot may come any number of times or not at all, a dense name at most once.
//
// An id is a 64-bit hash of the slot's salt and the field's text, modulo the hash space when there is one. The salt is
// the slot's name, or that of a slot whose ids it shares. The Python twin in phalanx/data/ctr/slots_python.py gives the same bits.
//
// Thread-safety: a parser is immutable; parse may be called from any thread.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace phalanx {

// mix64 (mix.h) over the text's 8-byte words (little-endian, the last one filled up with zeros), each mixed into what
// came before.
std::uint64_t hash_text(std::uint64_t seed, std::string_view text) noexcept;

// The id of a text hashed from this seed; a hash space of 0 means all 64 bits.
std::int64_t id_of_text(std::uint64_t seed, std::string_view text, std::uint64_t hash_space) noexcept;

// What every hash of a salt starts from.
std::uint64_t seed_of_salt(std::string_view salt) noexcept;

struct SlotSchema {
  bool has_label = true;
  std::vector<std::string> dense;
  std::vector<std::string> sparse;
  std::vector<std::string> salts;  // of each slot; as many as slots
  std::uint64_t hash_space = 0;  // 0: ids use all 64 bits
};

struct BrokenLine {
  enum Kind { kFields, kNumber, kToken, kName, kTwice };

  Kind kind;
  std::int64_t line;   // counted from 0 in the text
  std::int64_t field;  // position in the line, from 0; for kFields how many there are
  std::string found;   // the field, cut short when long
};

struct SlotRows {
  std::vector<float> label;            // (rows), or empty without a label
  std::vector<float> dense;            // (rows, dense fields)
  std::vector<std::int64_t> ids;       // (rows, slots), or all ids, row by row and slot by slot
  std::vector<std::int64_t> offsets;   // for tokens: where bag row * slots + slot begins, and the end
  std::int64_t rows = 0;
  std::int64_t broken = 0;             // lines left out
  std::optional<BrokenLine> first_broken;
};

class SlotParser {
 public:
  SlotParser(SlotSchema schema, bool is_columns);
  SlotParser(const SlotParser&) = delete;
  SlotParser& operator=(const SlotParser&) = delete;

  // Parses whole lines; the last one may lack its newline. Broken lines are left out and counted.
  SlotRows parse(std::string_view text) const;

 private:
  struct Name {
    bool is_dense;
    std::size_t index;
  };
  struct Failure {
    BrokenLine::Kind kind;
    std::int64_t field;
    std::string_view found;
  };
  struct Scratch {
    std::vector<std::pair<std::size_t, std::int64_t>> bags;
    std::vector<bool> seen;
  };

  std::optional<Failure> columns(std::string_view line, SlotRows& out) const;
  std::optional<Failure> tokens(std::string_view line, SlotRows& out, Scratch& scratch) const;

  SlotSchema schema_;
  bool is_columns_;
  std::vector<std::uint64_t> seeds_;
  std::unordered_map<std::string_view, Name> names_;  // views into schema_
};

}  // namespace phalanx
