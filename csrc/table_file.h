// The file of a lane: rows that have left memory, as records that are appended and never changed.
//
// A record is `hash | crc32 | row`, the row as `RowCodec` keeps it; its number is its place. Records are gathered in a segment of memory, of whole pages,
// which is written in one piece when it is full. While less than half of the file lives, its lane empties segments, those
// of which least lives first: it appends their records anew, and the places are used again. So the file takes at most
// about twice the bytes of what lives. The checksum covers the record's number and which use of its place this is: what
// a lost write leaves there does not pass.
//
// Segments are written, and read as a whole, past the system's cache where the file system lets them (O_DIRECT). A cache
// that counts as this process's memory would hold the writer up, at the limit of a control group, until the disk is done.
//
// The file extends memory and outlives nothing: its name goes as soon as it is open, and a server that is started again
// fills its tables from snapshot and log. Nothing is flushed to the disk.
//
// Not thread-safe: its lane's lock guards it, but for `check`. A record of a segment that is written may be read without
// the lock: it is what was written as long as its row is there, and its place in the same use.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "page_bytes.h"
#include "table_codec.h"
#include "table_reads.h"

namespace phalanx {

// A record cannot be read, or is not what was written.
struct DamagedRow : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A row that is asked of a file.
struct StoredRow {
  std::uint32_t record;
  std::uint64_t hash;
  std::byte* row;  // where its bytes go
};

// A row that is read from a file without its lane's lock.
struct MissedRow {
  std::uint64_t hash;
  std::uint32_t record;
  std::uint32_t use;       // of the record's place, by which a reader sees whether it was used again meanwhile
  std::uint32_t position;  // of its key in the call
  ReadableFile file;
  std::uint64_t place;
  bool is_whole = false;              // whether the record came, and is what was written
  const std::byte* bytes = nullptr;  // the record
};

class RowFile {
 public:
  static constexpr std::uint32_t kMostRecords = 0x7F000000;

  // Errors name folder and lane. A segment has so many bytes at most, but one record at least.
  RowFile(std::string folder, int lane, const RowCodec& codec, std::size_t segment_bytes);
  RowFile(const RowFile&) = delete;
  ~RowFile();

  // Makes room for a record, if need be by a write. Returns false where the system refuses it; `failure` then says why.
  bool make_room();
  // Returns the number of the new record, below `kMostRecords`. REQUIRES: `make_room` has just returned true.
  std::uint32_t append(std::uint64_t hash, const std::byte* row);
  // The same of a row as another record has it.
  std::uint32_t append_encoded(std::uint64_t hash, const std::byte* encoded);

  // Reads rows in the order of the file, in which they are left. Throws DamagedRow.
  void read(std::span<StoredRow> rows);
  // Whether a record is in the file itself, and not in the segment that is in memory.
  bool is_written(std::uint32_t record) const { return segment_of(record) != open_; }
  std::uint32_t use_of(std::uint32_t record) const { return segments_[segment_of(record)].use; }
  // What is to be read for a record that is written.
  MissedRow missed(std::uint32_t record, std::uint64_t hash, std::uint32_t position) const;
  // Notes whether a record that was read is whole. Any thread may call it, with no lock.
  void check(MissedRow& row) const;
  // The row of a record that is whole: in the record, or in `room` for a row.
  const std::byte* row_of(const MissedRow& row, std::byte* room) const;
  static std::size_t record_bytes(const RowCodec& codec) { return kHeaderBytes + codec.bytes(); }

  // Notes that a record lives no more.
  void discard(std::uint32_t record);
  void clear();

  // Notes that a record was asked for, and returns whether it had been before.
  bool ask(std::uint32_t record);

  // The segment to empty next, if less than half lives of all that is written; it is named until its last record is
  // discarded.
  std::optional<std::uint32_t> sparse_segment();
  // Reads a written segment; returns the hash of each record by place, those that live no more and broken ones too.
  // Throws DamagedRow where the segment cannot be read.
  std::vector<std::uint64_t> hashes(std::uint32_t segment);
  // A row of the segment that was read last, as its record has it; it stays until the next read. Throws DamagedRow.
  const std::byte* encoded_row(std::uint32_t record, std::uint64_t hash) const;
  // Names a segment that cannot be emptied no more, until its place is used again.
  void pass_over(std::uint32_t segment) { segments_[segment].is_passed_over = true; }
  std::uint32_t first_record(std::uint32_t segment) const { return segment * records_; }
  std::uint32_t live(std::uint32_t segment) const { return segments_[segment].live; }

  const std::string& failure() const { return failure_; }  // empty once there is room
  std::uint64_t live() const { return live_; }
  std::uint64_t bytes() const { return bytes_; }  // of the file
  std::size_t memory_bytes() const;

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  static constexpr std::size_t kHeaderBytes = sizeof(std::uint64_t) + sizeof(std::uint32_t);

  struct Segment {
    std::uint32_t live = 0;
    std::uint32_t use = 0;   // of its place
    bool is_listed = false;  // in `sparse_`
    bool is_passed_over = false;
  };

  std::uint32_t segment_of(std::uint32_t record) const { return record / records_; }
  bool is_sparse(std::uint32_t segment) const;
  void settle(std::uint32_t segment);
  std::uint64_t place_of(std::uint32_t record) const {
    return segment_of(record) * segment_bytes_ + record % records_ * record_bytes_;
  }
  std::byte* next_record() const { return buffer_.data() + filled_ * record_bytes_; }
  std::uint32_t seal(std::uint64_t hash);
  bool open_segment();
  bool add_segment();
  bool write_segment();
  ssize_t write(std::size_t done, std::uint64_t place);
  bool open_file();
  bool refuse(const std::string& what, int error);
  void ask_ahead(std::span<const StoredRow> rows) const;
  std::size_t run_length(std::span<const StoredRow> rows) const;
  void read_run(std::span<const StoredRow> rows);
  void load(int file, std::uint32_t record, std::size_t bytes);
  std::uint64_t checked_hash(std::uint32_t record, const std::byte* bytes) const;
  void copy(const StoredRow& wanted, const std::byte* bytes) const;
  std::uint32_t checksum(std::uint32_t record, std::uint32_t use, const std::byte* bytes) const;
  [[noreturn]] void fail(std::uint32_t record, const std::string& what) const;

  const std::string folder_;
  const int lane_;
  const RowCodec codec_;
  const std::size_t record_bytes_;
  const std::uint32_t records_;  // of a segment
  const std::uint64_t segment_bytes_;  // of whole pages
  int file_ = -1;
  int direct_ = -1;  // the same file, past the system's cache
  std::uint32_t open_ = kNone;  // the segment that is in memory
  std::uint32_t filled_ = 0;    // its records
  PageBytes buffer_;
  std::vector<Segment> segments_;
  std::uint32_t uses_ = 0;             // of all places, those before `clear` too
  std::vector<std::uint32_t> free_;    // segments without records
  std::vector<std::uint32_t> sparse_;  // those of which less than half may live
  std::vector<bool> asked_;            // by record
  PageBytes window_;                   // what the last read of the file brought
  std::string failure_;
  std::uint64_t bytes_ = 0;
  std::uint64_t live_ = 0;
};

}  // namespace phalanx
