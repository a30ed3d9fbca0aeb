// Memory of a table: pages from the system, the arena of a table's rows, and the slabs of its lanes cut from it.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace phalanx {

// Asks memory for the first lines of something that is used soon; the processor sees the rest coming.
inline void prefetch(const void* start, std::size_t bytes) {
  constexpr std::size_t kCacheLine = 64, kMost = 4 * kCacheLine;
  const auto* first = static_cast<const std::byte*>(start);
  for (std::size_t offset = 0; offset < std::min(bytes, kMost); offset += kCacheLine) {
    __builtin_prefetch(first + offset);
  }
}

// Zeroed pages, aligned to 2 MiB and advised to be huge ones where they reach that size. Given back at the end.
class Pages {
 public:
  Pages() = default;
  // Throws std::bad_alloc when the system has none.
  Pages(std::size_t bytes, bool huge);
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Blocks of one size for the lanes of a table, cut from large ranges of addresses. The system ends a process at 65,530
// mappings by default; ranges grow with the table, so that it has some tens of them at any size. Memory is used when a
// block is written and goes back to the system with the block; addresses stay. Thread-safe.
class Arena {
 public:
  explicit Arena(std::size_t block_bytes);  // rounded up to 2 MiB
  Arena(const Arena&) = delete;

  // A block of undefined content, on huge pages or not. Throws std::bad_alloc when the system has none.
  std::byte* take(bool huge);
  void give_back(std::byte* block, bool huge);

 private:
  struct Ranges {
    std::vector<Pages> pages;
    std::size_t reserved = 0;  // blocks of all ranges
    std::size_t left = 0;      // blocks of the last range that were never handed out
    std::vector<std::byte*> free;
  };

  void reserve(Ranges& ranges, bool huge) const;

  const std::size_t block_bytes_;
  std::mutex lock_;
  std::array<Ranges, 2> ranges_;  // of small pages, of huge ones
};

// Rows of one size. A row's number is fixed until it is given back; numbers are at least 1 and stay below `limit`.
//
// A number is `block << bits | place`. The first block is left to small pages, so that a small table is small. A block
// without rows goes back to the arena, but for the first one and the one that rows are taken from. Not thread-safe: its
// lane's lock guards it.
class Slab {
 public:
  // On huge pages, but for the first block; or on small ones, which cost more to reach and less to get.
  Slab(Arena& arena, std::size_t row_bytes, std::uint32_t limit, bool huge);

  // Bytes of a block: 2 MiB, or 16 rows where these need more.
  static std::size_t block_bytes(std::size_t row_bytes);

  // A row with undefined content. Throws std::length_error at the limit, std::bad_alloc without memory.
  std::uint32_t take();
  void give_back(std::uint32_t row);
  void clear();

  std::byte* row(std::uint32_t number) const { return data_[number >> bits_] + (number & mask_) * row_bytes_; }
  // Bytes of the rows that were in use at a time, in the blocks that are there.
  std::size_t bytes() const { return touched_ * row_bytes_; }

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  struct Block {
    std::uint32_t touched = 0;    // places that were in use at a time
    std::uint32_t used = 0;       // places in use
    std::uint32_t free = kNone;   // a place in use no longer; its first bytes are the next one's number
    bool is_open = false;         // whether it is in `open_`
  };

  bool has_room(const Block& block) const { return block.free != kNone || block.touched < rows_per_block_; }
  bool is_huge(std::size_t number) const { return huge_ && number != 0; }
  void add_block();

  Arena& arena_;
  std::size_t row_bytes_;
  std::uint32_t limit_;
  bool huge_;
  std::uint32_t rows_per_block_;
  int bits_;
  std::uint32_t mask_;
  std::size_t touched_ = 0;
  std::vector<std::byte*> data_;  // of each block; null for a number without one
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> open_;    // blocks that may have room, the one rows are taken from last
  std::vector<std::uint32_t> vacant_;  // numbers without a block
};

}  // namespace phalanx
