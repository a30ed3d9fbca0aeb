// The file of a lane: records against a map, segments that are emptied and used again, and disks that fail.

#include <linux/magic.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

#include "../../csrc/table_file.h"
#include "check.h"
#include "row_folder.h"

namespace {

using phalanx::DamagedRow;
using phalanx::RowFile;
using phalanx::StoredRow;

phalanx::RowCodec as_in_memory(std::size_t row_bytes) { return {phalanx::FileDtype::kFloat32, 0, row_bytes}; }

// Rows by record, each filled with a number of its own; records are moved out of sparse segments as a lane does.
class Rows {
 public:
  Rows(RowFile& file, std::size_t row_bytes) : file_(file), row_(row_bytes) {}

  void append(std::uint64_t hash) {
    CHECK(file_.make_room());
    std::fill(row_.begin(), row_.end(), static_cast<std::byte>(hash * 37));
    const std::uint32_t record = file_.append(hash, row_.data());
    CHECK(!file_.ask(record) && file_.ask(record));
    CHECK(hashes_.emplace(record, hash).second);
  }

  void discard(std::map<std::uint32_t, std::uint64_t>::iterator at) {
    file_.discard(at->first);
    hashes_.erase(at);
  }

  void compact() {
    while (const auto segment = file_.sparse_segment()) {
      const std::vector<std::uint64_t> there = file_.hashes(*segment);
      for (std::uint32_t i = 0; i < there.size(); ++i) {
        const auto at = hashes_.find(file_.first_record(*segment) + i);
        if (at == hashes_.end()) continue;
        CHECK(at->second == there[i]);
        discard(at);
        append(there[i]);
      }
    }
  }

  void check_all() {
    std::vector<StoredRow> wanted;
    std::vector<std::byte> read(hashes_.size() * row_.size());
    for (const auto& [record, hash] : hashes_) wanted.push_back({record, hash, read.data() + wanted.size() * row_.size()});
    std::shuffle(wanted.begin(), wanted.end(), std::mt19937(1));
    file_.read(wanted);
    for (const StoredRow& row : wanted) {
      for (std::size_t i = 0; i < row_.size(); ++i) CHECK(row.row[i] == static_cast<std::byte>(row.hash * 37));
    }
    CHECK(file_.live() == hashes_.size());
  }

  std::map<std::uint32_t, std::uint64_t>& hashes() { return hashes_; }

 private:
  RowFile& file_;
  std::vector<std::byte> row_;
  std::map<std::uint32_t, std::uint64_t> hashes_;
};

void file_is_a_map(const Folder& folder, std::size_t row_bytes, std::size_t segment_bytes) {
  RowFile file(folder.path(), 3, as_in_memory(row_bytes), segment_bytes);
  Rows rows(file, row_bytes);
  std::mt19937_64 random(row_bytes);
  const std::size_t kMost = 2000;
  for (std::size_t step = 0; step < 8000; ++step) {
    if (rows.hashes().size() < kMost && random() % 5 < 3) {
      rows.append(random());
    } else if (!rows.hashes().empty()) {
      const auto at = rows.hashes().lower_bound(static_cast<std::uint32_t>(random() % (2 * kMost)));
      rows.discard(at != rows.hashes().end() ? at : rows.hashes().begin());
    }
    if (step % 64 == 0) rows.compact();
    if (step % 1000 == 0) rows.check_all();
  }
  rows.compact();
  rows.check_all();
  const std::size_t records = std::max<std::size_t>(segment_bytes / (row_bytes + 12), 1);
  CHECK(file.bytes() <= (2 * (kMost + 64) / records + 4) * phalanx::PageBytes::rounded(records * (row_bytes + 12)));
  CHECK(std::filesystem::is_empty(folder.path()));
  file.clear();
  CHECK(file.live() == 0 && file.bytes() == 0);
  rows.hashes().clear();
  for (std::uint64_t hash = 0; hash < 100; ++hash) rows.append(hash);
  rows.check_all();
}

// A byte that the disk changed is an error that names lane and record, whether rows are read or a segment is emptied.
void damage_is_named(const Folder& folder) {
  RowFile file(folder.path(), 7, as_in_memory(20), 320);  // ten records a segment
  Rows rows(file, 20);
  for (std::uint64_t hash = 0; hash < 35; ++hash) rows.append(hash);
  const char wrong = 99;
  CHECK(pwrite(folder.open_file(), &wrong, 1, 4096 + 2 * 32 + 25) == 1);
  std::vector<std::byte> row(20);
  std::vector<StoredRow> whole{{11, 11, row.data()}}, broken{{12, 12, row.data()}}, other{{13, 12, row.data()}};
  file.read(whole);
  try {
    file.read(broken);
    CHECK(false);
  } catch (const DamagedRow& error) {
    const std::string message = error.what();
    CHECK(message.find("lane 7 in " + folder.path()) != std::string::npos);
    CHECK(message.find("record 12 has checksum") != std::string::npos);
  }
  CHECK(throws<DamagedRow>([&] { file.read(other); }));
  CHECK(file.hashes(1)[2] == 12);
  CHECK(std::memcmp(file.encoded_row(11, 11), row.data(), 20) == 0);
  CHECK(throws<DamagedRow>([&] { file.encoded_row(12, 12); }));
  CHECK(file.hashes(0).size() == 10);
  CHECK(ftruncate(folder.open_file(), 100) == 0);
  CHECK(throws<DamagedRow>([&] { file.read(whole); }));
}

// A row of an earlier use of its place, which a lost write leaves there, is broken, though number and hash are its own.
void lost_writes_are_named(const Folder& folder) {
  RowFile file(folder.path(), 2, as_in_memory(20), 320);
  Rows rows(file, 20);
  std::array<char, 320> before;
  for (const bool is_cleared : {false, true}) {
    for (std::uint64_t hash = 0; hash < 11; ++hash) rows.append(hash);
    CHECK(pread(folder.open_file(), before.data(), 320, 0) == 320);
    if (is_cleared) {
      file.clear();
      rows.hashes().clear();
    } else {
      for (std::uint32_t record = 0; record < 10; ++record) rows.discard(rows.hashes().find(record));
      for (std::uint64_t hash = 11; hash < 20; ++hash) rows.append(hash);
    }
    for (std::uint64_t hash = 0; hash < 11; ++hash) rows.append(hash);
    CHECK(rows.hashes().at(0) == 0);
    rows.check_all();
    CHECK(pwrite(folder.open_file(), before.data(), 320, 0) == 320);
    CHECK(throws<DamagedRow>([&] { rows.check_all(); }));
    file.clear();
    rows.hashes().clear();
  }
}

// A segment that cannot be emptied is named no more, until its place is used again.
void segments_are_passed_over(const Folder& folder) {
  RowFile file(folder.path(), 1, as_in_memory(20), 320);
  Rows rows(file, 20);
  const auto discard = [&](std::uint32_t first, std::uint32_t end) {
    for (std::uint32_t record = first; record < end; ++record) rows.discard(rows.hashes().find(record));
  };
  for (std::uint64_t hash = 0; hash < 11; ++hash) rows.append(hash);
  discard(0, 6);
  CHECK(file.sparse_segment() == 0u && file.live(0) == 4);
  file.pass_over(0);
  CHECK(!file.sparse_segment());
  discard(6, 9);
  CHECK(!file.sparse_segment());
  rows.check_all();
  discard(9, 10);
  for (std::uint64_t hash = 11; hash < 31; ++hash) rows.append(hash);
  CHECK(file.live(0) == 10);
  discard(0, 6);
  discard(11, 16);
  CHECK(file.sparse_segment() == 0u);
}

// Nothing is emptied while half of the file lives; then the segment of which least lives is.
void emptiest_segments_go_first(const Folder& folder) {
  RowFile file(folder.path(), 1, as_in_memory(20), 320);
  Rows rows(file, 20);
  for (std::uint64_t hash = 0; hash < 41; ++hash) rows.append(hash);  // four segments of ten, and one row
  const auto leave = [&](std::uint32_t segment, std::uint32_t living) {
    for (std::uint32_t i = living; i < 10; ++i) rows.discard(rows.hashes().find(10 * segment + i));
  };
  leave(0, 3);
  leave(2, 1);
  leave(3, 6);
  CHECK(!file.sparse_segment());  // 20 of 40
  leave(1, 9);
  CHECK(file.sparse_segment() == 2u);
  rows.compact();
  CHECK(file.live(2) == 0 && file.live(0) == 3);  // 18 of 30
  rows.check_all();
}

// The system's cache holds nothing of what was written, where the file system is one that lets writes pass it by.
void writes_pass_the_cache_by(const Folder& folder) {
  struct statfs system;
  CHECK(statfs(folder.path().c_str(), &system) == 0);
  if (system.f_type != EXT4_SUPER_MAGIC && system.f_type != XFS_SUPER_MAGIC) return;
  RowFile file(folder.path(), 1, as_in_memory(100), 64 << 10);
  Rows rows(file, 100);
  for (std::uint64_t hash = 0; hash < 5000; ++hash) rows.append(hash);
  std::array<std::uint64_t, 2> all{0, file.bytes()};
  std::array<std::uint64_t, 5> pages{};  // cached, dirty, being written, gone, gone lately
  const bool is_told = syscall(451, folder.open_file(), all.data(), pages.data(), 0) == 0;  // cachestat, since Linux 6.5
  if (is_told) CHECK(file.bytes() > 500'000 && pages[0] == 0);
  rows.check_all();
}

// What a full disk does not take stays in memory, and is written once there is room.
void full_disk_loses_nothing(const Folder& folder) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit small = {3 * 4096 + 1000, before.rlim_max};
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  RowFile file(folder.path(), 0, as_in_memory(20), 320);
  Rows rows(file, 20);
  std::uint64_t hash = 0;
  while (file.make_room()) rows.append(hash++);
  CHECK(hash == 30);  // three segments
  CHECK(file.failure().find("lane 0 in " + folder.path() + " takes no more rows: File too large") != std::string::npos);
  CHECK(!file.make_room());
  rows.check_all();
  for (std::uint32_t record = 0; record < 10; ++record) rows.discard(rows.hashes().find(record));
  while (file.make_room()) rows.append(hash++);  // a place inside the file
  CHECK(hash == 40 && file.bytes() == 3 * 4096);
  rows.check_all();
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  rows.append(hash);
  CHECK(file.failure().empty());
  rows.check_all();
  RowFile nowhere(folder.path() + "/absent", 1, as_in_memory(20), 320);
  CHECK(!nowhere.make_room());
  CHECK(nowhere.failure().find("cannot be made: No such file") != std::string::npos);
}

}  // namespace

void test_row_file() {
  const Folder folder;
  file_is_a_map(folder, 4, 4096);
  file_is_a_map(folder, 128, 4096);
  file_is_a_map(folder, 128, 64 << 10);
  file_is_a_map(folder, 5000, 4096);  // a segment is one record
  damage_is_named(folder);
  lost_writes_are_named(folder);
  segments_are_passed_over(folder);
  emptiest_segments_go_first(folder);
  writes_pass_the_cache_by(folder);
  full_disk_loses_nothing(folder);
}
