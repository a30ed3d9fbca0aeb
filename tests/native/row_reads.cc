// Reads of many places of files: whatever is asked for in whatever order, from the cache, the disk or both.

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/table_reads.h"
#include "check.h"
#include "row_folder.h"

namespace {

using phalanx::FilePiece;
using phalanx::ReadableFile;
using phalanx::ReadQueues;

constexpr std::size_t kBytes = 300'001;

// A file whose byte at each place is known.
class Numbers {
 public:
  Numbers(const Folder& folder, int salt) : salt_(salt) {
    std::string path = folder.path() + "/numbers-XXXXXX";
    file_.cached = mkostemp(path.data(), O_CLOEXEC);
    CHECK(file_.cached >= 0);
    file_.direct = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    unlink(path.c_str());
    std::vector<std::byte> bytes(kBytes);
    for (std::size_t place = 0; place < kBytes; ++place) bytes[place] = at(place);
    CHECK(pwrite(file_.cached, bytes.data(), kBytes, 0) == static_cast<ssize_t>(kBytes));
  }
  Numbers(const Numbers&) = delete;
  ~Numbers() {
    close(file_.cached);
    if (file_.direct >= 0) close(file_.direct);
  }

  std::byte at(std::uint64_t place) const { return static_cast<std::byte>((place * 2654435761u >> 13) + salt_); }
  const ReadableFile& file() const { return file_; }

 private:
  int salt_;
  ReadableFile file_;
};

void read_somewhere(ReadQueues& queues, const std::vector<const Numbers*>& files, bool is_direct, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  constexpr std::size_t kSize = 1300, kPieces = 500;
  std::vector<std::byte> memory(kPieces * kSize);
  std::vector<FilePiece> pieces;
  std::vector<const Numbers*> of;
  for (std::size_t i = 0; i < kPieces; ++i) {
    of.push_back(files[random() % files.size()]);
    ReadableFile file = of.back()->file();
    if (!is_direct) file.direct = -1;
    pieces.push_back({file, random() % (kBytes - kSize), kSize - i % 7, memory.data() + i * kSize});
  }
  pieces[0].place = kBytes - pieces[0].size;      // the last byte
  pieces[1].place = kBytes - pieces[1].size + 1;  // one byte behind
  queues.read(pieces);
  for (std::size_t i = 0; i < kPieces; ++i) {
    CHECK(pieces[i].is_whole == (i != 1));
    if (i == 1) continue;
    for (std::size_t byte = 0; byte < pieces[i].size; ++byte) CHECK(pieces[i].to[byte] == of[i]->at(pieces[i].place + byte));
  }
}

}  // namespace

void test_row_reads() {
  const Folder folder;
  const Numbers first(folder, 1), second(folder, 77);
  ReadQueues queues(1300, 4 << 20), wide(9 << 20, 4 << 20), none(8, 0);
  none.read({});
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    if (seed % 2 == 0) folder.drop_cache();
    read_somewhere(seed < 4 ? queues : wide, {&first, &second}, seed != 3, seed);
  }
  folder.drop_cache();
  in_threads(3, [&](int number) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      if (number == 0) folder.drop_cache();
      read_somewhere(queues, {&first, &second}, true, 10 * seed + static_cast<std::uint64_t>(number));
    }
  });
  CHECK(queues.bytes() > 0 && queues.bytes() <= std::size_t{3} * 256 * 8 * 1024);
}
