// Shared memory that a client handed over, on the server; see ps/wire/segments.py for the client's end.
//
// Ownership: each mapping lives as long as anybody has its SharedMemory. Thread-safety: one thread at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>

namespace phalanx {

class Mapping {
 public:
  // Maps a file. Throws std::system_error if it cannot be mapped.
  Mapping(int fd, std::size_t size);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<std::byte> bytes() const { return {base_, size_}; }

 private:
  std::byte* base_;
  std::size_t size_;
};

using SharedMemory = std::shared_ptr<const Mapping>;

class AttachedSegments {
 public:
  // Maps a segment that came, and closes the descriptor. Throws FrameError if the segment is not as it says, or could
  // shrink under the server: reading memory that was cut off kills the reader.
  SharedMemory attach(std::uint64_t number, std::uint64_t size, int fd);

  // A segment that came earlier. Throws FrameError if it did not.
  SharedMemory find(std::uint64_t number) const;

 private:
  std::unordered_map<std::uint64_t, SharedMemory> by_number_;
};

}  // namespace phalanx
