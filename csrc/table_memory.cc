#include "table_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>
#include <stdexcept>
#include <utility>

namespace phalanx {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;
constexpr std::size_t kSmall = 4096;
constexpr std::size_t kRowsAtLeast = 16;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::byte* map(std::size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(found);
}

}  // namespace

Pages::Pages(std::size_t bytes, bool huge) : bytes_(round_up(bytes, kSmall)) {
  if (bytes_ < kHuge) {
    data_ = map(bytes_);
    return;
  }
  std::byte* const start = map(bytes_ + kHuge);
  const std::size_t before = (kHuge - reinterpret_cast<std::uintptr_t>(start) % kHuge) % kHuge;
  if (before > 0) munmap(start, before);
  data_ = start + before;
  munmap(data_ + bytes_, kHuge - before);
  if (huge) madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: without huge pages the table is slower, not wrong
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Slab::Slab(std::size_t row_bytes, std::uint32_t limit) : row_bytes_(row_bytes), limit_(limit) {
  rows_per_block_ = static_cast<std::uint32_t>(std::max(kHuge / row_bytes, kRowsAtLeast));
  bits_ = std::bit_width(rows_per_block_ - 1);
  mask_ = (std::uint32_t{1} << bits_) - 1;
}

std::uint32_t Slab::take() {
  if (!free_.empty()) {
    const std::uint32_t row = free_.back();
    free_.pop_back();
    return row;
  }
  const std::size_t place = touched_ % rows_per_block_;
  const std::size_t block = touched_ / rows_per_block_;
  const std::uint64_t number = std::uint64_t{block} << bits_ | place;
  if (number >= limit_) throw std::length_error("a sixteenth of a table is full; use more servers");
  if (place == 0) blocks_.emplace_back(rows_per_block_ * row_bytes_, block > 0);
  ++touched_;
  return static_cast<std::uint32_t>(number);
}

void Slab::clear() {
  blocks_.clear();
  free_.clear();
  free_.shrink_to_fit();
  touched_ = 0;
}

}  // namespace phalanx
