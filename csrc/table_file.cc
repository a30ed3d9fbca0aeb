#include "table_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "crc32.h"

namespace phalanx {
namespace {

// Records that lie closer than a page are read in one piece, as the system reads pages anyway.
constexpr std::size_t kGapBytes = 4096;

template <class T>
T loaded(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::uint32_t records_of(std::size_t segment_bytes, std::size_t record_bytes) {
  return static_cast<std::uint32_t>(std::max<std::size_t>(segment_bytes / record_bytes, 1));
}

}  // namespace

RowFile::RowFile(std::string folder, int lane, const RowCodec& codec, std::size_t segment_bytes)
    : folder_(std::move(folder)), lane_(lane), codec_(codec), record_bytes_(record_bytes(codec)),
      records_(records_of(segment_bytes, record_bytes_)), segment_bytes_(PageBytes::rounded(records_ * record_bytes_)) {}

RowFile::~RowFile() {
  for (const int file : {file_, direct_}) {
    if (file >= 0) close(file);
  }
}

bool RowFile::make_room() {
  const bool has_room = open_ != kNone && filled_ < records_;
  if (!has_room && !((open_ == kNone || write_segment()) && open_segment())) return false;
  failure_.clear();
  return true;
}

std::uint32_t RowFile::append(std::uint64_t hash, const std::byte* row) {
  codec_.encode(row, next_record() + kHeaderBytes);
  return seal(hash);
}

std::uint32_t RowFile::append_encoded(std::uint64_t hash, const std::byte* encoded) {
  std::memcpy(next_record() + kHeaderBytes, encoded, codec_.bytes());
  return seal(hash);
}

// Makes a record of the row that was put in the next one's place.
std::uint32_t RowFile::seal(std::uint64_t hash) {
  const std::uint32_t record = first_record(open_) + filled_;
  std::byte* const bytes = next_record();
  std::memcpy(bytes, &hash, sizeof hash);
  const std::uint32_t sum = checksum(record, use_of(record), bytes);
  std::memcpy(bytes + sizeof hash, &sum, sizeof sum);
  ++filled_;
  ++segments_[open_].live;
  ++live_;
  asked_[record] = false;
  return record;
}

void RowFile::read(std::span<StoredRow> rows) {
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.record < b.record; });
  ask_ahead(rows);
  while (!rows.empty()) {
    const std::size_t size = run_length(rows);
    read_run(rows.first(size));
    rows = rows.subspan(size);
  }
}

// How many of these rows, the first ones, are read together.
std::size_t RowFile::run_length(std::span<const StoredRow> rows) const {
  const bool is_open = segment_of(rows[0].record) == open_;
  std::size_t size = 1;
  for (; size < rows.size() && (segment_of(rows[size].record) == open_) == is_open; ++size) {
    if (place_of(rows[size].record) - place_of(rows[size - 1].record) > record_bytes_ + kGapBytes) break;
    if (place_of(rows[size].record) - place_of(rows[0].record) + record_bytes_ > segment_bytes_) break;
  }
  return size;
}

// Lets the system read the rows beside each other, before the first of them is waited for.
void RowFile::ask_ahead(std::span<const StoredRow> rows) const {
  if (rows.size() < 2) return;
  while (!rows.empty()) {
    const std::size_t size = run_length(rows);
    const std::uint64_t first = place_of(rows[0].record), end = place_of(rows[size - 1].record) + record_bytes_;
    if (segment_of(rows[0].record) != open_) {
      posix_fadvise(file_, static_cast<off_t>(first), static_cast<off_t>(end - first), POSIX_FADV_WILLNEED);
    }
    rows = rows.subspan(size);
  }
}

void RowFile::read_run(std::span<const StoredRow> rows) {
  const std::uint32_t first = rows[0].record;
  if (segment_of(first) == open_) {
    for (const StoredRow& row : rows) copy(row, buffer_.data() + (row.record - first_record(open_)) * record_bytes_);
    return;
  }
  load(file_, first, place_of(rows.back().record) - place_of(first) + record_bytes_);
  for (const StoredRow& row : rows) copy(row, window_.data() + (place_of(row.record) - place_of(first)));
}

// Reads so many bytes of the file, from a record on, into the window.
void RowFile::load(int file, std::uint32_t record, std::size_t bytes) {
  if (window_.size() < bytes) window_ = PageBytes(bytes);
  for (std::size_t done = 0; done < bytes;) {
    if (done % PageBytes::kPage != 0) file = file_;  // after a read that brought a part
    const ssize_t got = pread(file, window_.data() + done, bytes - done, static_cast<off_t>(place_of(record) + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && file != file_) {  // larger blocks than pages
      file = file_;
      continue;
    }
    if (got < 0) fail(record, std::string("cannot be read: ") + std::strerror(errno));
    if (got == 0) fail(record, "lies behind the end of the file");
    done += static_cast<std::size_t>(got);
  }
}

void RowFile::copy(const StoredRow& wanted, const std::byte* bytes) const {
  if (checked_hash(wanted.record, bytes) != wanted.hash) fail(wanted.record, "holds another row");
  codec_.decode(bytes + kHeaderBytes, wanted.row);
}

std::uint64_t RowFile::checked_hash(std::uint32_t record, const std::byte* bytes) const {
  const auto written = loaded<std::uint32_t>(bytes + sizeof(std::uint64_t));
  const std::uint32_t sum = checksum(record, use_of(record), bytes);
  if (sum != written) {
    fail(record, "has checksum " + std::to_string(written) + " and content of checksum " + std::to_string(sum));
  }
  return loaded<std::uint64_t>(bytes);
}

// Of a record's number, the use of its place, its hash and its row: one that lies at another's place, or lay there
// before, does not pass.
std::uint32_t RowFile::checksum(std::uint32_t record, std::uint32_t use, const std::byte* bytes) const {
  const std::array<std::uint32_t, 2> place = {record, use};
  const std::uint32_t head = crc32({bytes, sizeof(std::uint64_t)}, crc32(std::as_bytes(std::span(place))));
  return crc32({bytes + kHeaderBytes, codec_.bytes()}, head);
}

MissedRow RowFile::missed(std::uint32_t record, std::uint64_t hash, std::uint32_t position) const {
  return {hash, record, use_of(record), position, {file_, direct_}, place_of(record)};
}

const std::byte* RowFile::row_of(const MissedRow& row, std::byte* room) const {
  const std::byte* const encoded = row.bytes + kHeaderBytes;
  if (codec_.is_exact()) return encoded;
  codec_.decode(encoded, room);
  return room;
}

void RowFile::check(MissedRow& row) const {
  row.is_whole = loaded<std::uint64_t>(row.bytes) == row.hash &&
                 loaded<std::uint32_t>(row.bytes + sizeof(std::uint64_t)) == checksum(row.record, row.use, row.bytes);
}

void RowFile::fail(std::uint32_t record, const std::string& what) const {
  throw DamagedRow("A row was asked of the file of lane " + std::to_string(lane_) + " in " + folder_ +
                   ", but its record " + std::to_string(record) + " " + what +
                   ". The disk has lost or changed what was written: check it, and start from the last snapshot, or let "
                   "servers be started again (--max-restarts), which fills the file anew.");
}

void RowFile::discard(std::uint32_t record) {
  const std::uint32_t segment = segment_of(record);
  --live_;
  --segments_[segment].live;
  if (segment != open_) settle(segment);
  else if (segments_[segment].live == 0) filled_ = 0;
}

void RowFile::clear() {
  segments_.clear();
  free_.clear();
  sparse_.clear();
  asked_.clear();
  open_ = kNone;
  live_ = 0;
  // The room goes back if the system takes it; records are written over what it keeps.
  if (file_ >= 0 && ftruncate(file_, 0) == 0) bytes_ = 0;
}

bool RowFile::ask(std::uint32_t record) {
  const bool before = asked_[record];
  asked_[record] = true;
  return before;
}

bool RowFile::is_sparse(std::uint32_t segment) const {
  const Segment& written = segments_[segment];
  return segment != open_ && !written.is_passed_over && written.live > 0 && written.live < (records_ + 1) / 2;
}

// Notes what a written segment is good for, now that it has fewer living records, or has just been written.
void RowFile::settle(std::uint32_t segment) {
  if (segments_[segment].live == 0) {
    free_.push_back(segment);
  } else if (is_sparse(segment) && !segments_[segment].is_listed) {
    segments_[segment].is_listed = true;
    sparse_.push_back(segment);
  }
}

std::optional<std::uint32_t> RowFile::sparse_segment() {
  const bool is_open = open_ != kNone;
  const std::uint64_t written = (segments_.size() - free_.size() - is_open) * records_;
  if (written <= 2 * (live_ - (is_open ? segments_[open_].live : 0))) return std::nullopt;
  std::erase_if(sparse_, [&](std::uint32_t segment) {
    segments_[segment].is_listed = is_sparse(segment);
    return !segments_[segment].is_listed;
  });
  const auto least = std::min_element(sparse_.begin(), sparse_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return segments_[a].live < segments_[b].live;
  });
  return least == sparse_.end() ? std::nullopt : std::optional(*least);
}

std::vector<std::uint64_t> RowFile::hashes(std::uint32_t segment) {
  load(direct_ >= 0 ? direct_ : file_, first_record(segment), segment_bytes_);
  std::vector<std::uint64_t> hashes(records_);
  for (std::uint32_t i = 0; i < records_; ++i) {
    hashes[i] = loaded<std::uint64_t>(window_.data() + i * record_bytes_);
  }
  return hashes;
}

const std::byte* RowFile::encoded_row(std::uint32_t record, std::uint64_t hash) const {
  const std::byte* const bytes = window_.data() + record % records_ * record_bytes_;
  if (checked_hash(record, bytes) != hash) fail(record, "holds another row");
  return bytes + kHeaderBytes;
}

bool RowFile::open_segment() {
  if (file_ < 0 && !open_file()) return false;
  if (free_.empty() && !add_segment()) return false;
  if (buffer_.size() == 0) {
    buffer_ = PageBytes(segment_bytes_);
    std::memset(buffer_.data(), 0, buffer_.size());  // what follows the last record is written too
  }
  open_ = free_.back();
  free_.pop_back();
  segments_[open_].use = ++uses_;
  segments_[open_].is_passed_over = false;
  filled_ = 0;
  return true;
}

// Adds a place behind the others, if the disk has room for it: a segment there that could not be written would keep rows
// from places inside the file that become free. Where a system takes no room beforehand, the write will tell.
bool RowFile::add_segment() {
  const std::uint64_t number = segments_.size();
  if ((number + 1) * records_ > kMostRecords) return refuse("has as many records as it can name", EFBIG);
  const std::uint64_t place = number * segment_bytes_;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file_, static_cast<off_t>(place), static_cast<off_t>(segment_bytes_));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) return refuse("takes no more rows", error);
  asked_.resize((number + 1) * records_);
  segments_.emplace_back();
  free_.push_back(static_cast<std::uint32_t>(number));
  bytes_ = std::max(bytes_, place + segment_bytes_);
  return true;
}

bool RowFile::write_segment() {
  const std::uint64_t place = place_of(first_record(open_));
  for (std::size_t done = 0; done < segment_bytes_;) {
    const ssize_t put = write(done, place + done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return refuse("takes no more rows", put < 0 ? errno : ENOSPC);
    done += static_cast<std::size_t>(put);
  }
  const std::uint32_t written = open_;
  open_ = kNone;
  settle(written);
  return true;
}

// Writes what follows `done` bytes of the segment in memory; past the cache if the system takes it so.
ssize_t RowFile::write(std::size_t done, std::uint64_t place) {
  const auto put = [&](int file) {
    return pwrite(file, buffer_.data() + done, segment_bytes_ - done, static_cast<off_t>(place));
  };
  const bool is_aligned = done % PageBytes::kPage == 0;  // not so after a write that took a part
  if (direct_ < 0 || !is_aligned) return put(file_);
  const ssize_t written = put(direct_);
  return written < 0 && errno == EINVAL ? put(file_) : written;
}

bool RowFile::open_file() {
  file_ = open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) {  // not every file system makes files without a name
    std::string path = folder_ + "/rows-XXXXXX";
    file_ = mkostemp(path.data(), O_CLOEXEC);
    if (file_ < 0) return refuse("cannot be made", errno);
    unlink(path.c_str());
  }
  std::string same = "/proc/self/fd/";
  same += std::to_string(file_);
  direct_ = open(same.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);  // rows that are near each other in the file are not used together
  return true;
}

bool RowFile::refuse(const std::string& what, int error) {
  failure_ = "the file of lane " + std::to_string(lane_) + " in " + folder_ + " " + what + ": " + std::strerror(error);
  return false;
}

std::size_t RowFile::memory_bytes() const {
  return buffer_.size() + window_.size() + asked_.capacity() / 8 + segments_.capacity() * sizeof(Segment) +
         (free_.capacity() + sparse_.capacity()) * sizeof(std::uint32_t);
}

}  // namespace phalanx
