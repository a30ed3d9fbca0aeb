// Memory of a table: pages from the system, and the slab of rows cut from them.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Rows of one size. A row's number is fixed until it is given back; numbers stay below `limit`.
//
// A number is `block << bits | place`. Blocks have 2 MiB, or 16 rows where these need more. The first one is left to
// small pages, so that a small table is small. Not thread-safe: its lane's lock guards it.
class Slab {
 public:
  Slab(std::size_t row_bytes, std::uint32_t limit);

  // A row with undefined content. Throws std::length_error at the limit, std::bad_alloc without memory.
  std::uint32_t take();
  void give_back(std::uint32_t row) { free_.push_back(row); }
  void clear();

  std::byte* row(std::uint32_t number) const {
    return blocks_[number >> bits_].data() + (number & mask_) * row_bytes_;
  }
  // Bytes of all rows ever in use at a time.
  std::size_t bytes() const { return touched_ * row_bytes_ + free_.capacity() * sizeof(std::uint32_t); }

 private:
  std::size_t row_bytes_;
  std::uint32_t limit_;
  std::uint32_t rows_per_block_;
  int bits_;
  std::uint32_t mask_;
  std::size_t touched_ = 0;
  std::vector<Pages> blocks_;
  std::vector<std::uint32_t> free_;
};

}  // namespace phalanx
