// Reads of many places of files at a time, as the disk answers them.
//
// All are asked of the disk together, past the system's cache (O_DIRECT), through the system calls of Linux for
// asynchronous reads: up to 256 requests under way, each for the pages of places that lie beside each other. Where the
// system has no such calls, or the file system no such reads, all goes through the cache, which is told of every place
// before the first one is waited for.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace phalanx {

// A file as it is read: through the system's cache, and past it, where -1 says that the file system does not.
struct ReadableFile {
  int cached = -1;
  int direct = -1;
};

// Bytes that are to be read.
struct FilePiece {
  ReadableFile file;
  std::uint64_t place;
  std::size_t size;
  std::byte* to;
  bool is_whole = false;  // whether all of them came
};

// Thread-safe: each call works with a queue of its own, which the next call takes when it is idle.
class ReadQueues {
 public:
  // Bytes of the pieces it is for, and of the memory that a queue may take; room for one piece it has always.
  ReadQueues(std::size_t piece_bytes, std::size_t most_bytes);
  ReadQueues(const ReadQueues&) = delete;
  ~ReadQueues();

  // Reads all pieces, and says of each whether it is whole. REQUIRES: none has more than `piece_bytes`.
  void read(std::span<FilePiece> pieces);
  // Memory that queues take.
  std::size_t bytes() const { return bytes_; }

 private:
  class Queue;

  std::unique_ptr<Queue> take();

  const std::size_t piece_bytes_, most_bytes_;
  std::atomic<std::size_t> bytes_ = 0;
  std::mutex lock_;
  std::vector<std::unique_ptr<Queue>> idle_;
};

}  // namespace phalanx
