#include "table_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace phalanx {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;
constexpr std::size_t kSmall = 4096;
constexpr std::size_t kRowsAtLeast = 16;
constexpr std::size_t kFirstRange = 16;     // blocks: one for each lane
constexpr std::size_t kRange = 512;         // blocks that ranges double up to, 1 GiB as a rule
constexpr std::size_t kShareOfAll = 8;      // beyond, a range is this part of all before it

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

Arena::Arena(std::size_t block_bytes) : block_bytes_(round_up(block_bytes, kHuge)) {}

std::byte* Arena::take(bool huge) {
  const std::lock_guard locked(lock_);
  Ranges& ranges = ranges_[huge];
  if (!ranges.free.empty()) {
    std::byte* const block = ranges.free.back();
    ranges.free.pop_back();
    return block;
  }
  if (ranges.left == 0) reserve(ranges, huge);
  const Pages& last = ranges.pages.back();
  return last.data() + last.bytes() - block_bytes_ * ranges.left--;
}

void Arena::give_back(std::byte* block, bool huge) {
  madvise(block, block_bytes_, MADV_DONTNEED);  // locked memory stays, which costs room and nothing else
  const std::lock_guard locked(lock_);
  ranges_[huge].free.push_back(block);
}

// Where addresses are limited, half as many are asked for, down to one block.
void Arena::reserve(Ranges& ranges, bool huge) const {
  const std::size_t all = ranges.reserved;
  std::size_t blocks = std::max({kFirstRange, std::min(all, kRange), all / kShareOfAll});
  for (;; blocks /= 2) {
    try {
      ranges.pages.emplace_back(blocks * block_bytes_, huge);
      break;
    } catch (const std::bad_alloc&) {
      if (blocks == 1) throw;
    }
  }
  ranges.reserved += blocks;
  ranges.left = blocks;
}

std::size_t Slab::block_bytes(std::size_t row_bytes) { return std::max(kHuge, kRowsAtLeast * row_bytes); }

Slab::Slab(Arena& arena, std::size_t row_bytes, std::uint32_t limit, bool huge)
    : arena_(arena), row_bytes_(row_bytes), limit_(limit), huge_(huge) {
  rows_per_block_ = static_cast<std::uint32_t>(block_bytes(row_bytes) / row_bytes);
  bits_ = std::bit_width(rows_per_block_ - 1);
  mask_ = (std::uint32_t{1} << bits_) - 1;
}

std::uint32_t Slab::take() {
  while (!open_.empty() && !has_room(blocks_[open_.back()])) {
    blocks_[open_.back()].is_open = false;
    open_.pop_back();
  }
  if (open_.empty()) add_block();
  const std::uint32_t number = open_.back();
  Block& block = blocks_[number];
  std::uint32_t place = block.free;
  if (place != kNone) {
    std::memcpy(&block.free, data_[number] + place * row_bytes_, sizeof block.free);
  } else {
    place = block.touched++;
    ++touched_;
  }
  ++block.used;
  return number << bits_ | place;
}

void Slab::give_back(std::uint32_t row) {
  const std::uint32_t number = row >> bits_;
  Block& block = blocks_[number];
  std::memcpy(this->row(row), &block.free, sizeof block.free);
  block.free = row & mask_;
  --block.used;
  if (block.used == 0 && number != 0 && !open_.empty() && open_.back() != number) {
    arena_.give_back(std::exchange(data_[number], nullptr), is_huge(number));
    touched_ -= block.touched;
    // Without room for a row, so that it leaves `open_` if it is there.
    block = {.touched = rows_per_block_, .is_open = block.is_open};
    vacant_.push_back(number);
  } else if (!block.is_open) {
    block.is_open = true;
    open_.push_back(number);
  }
}

void Slab::add_block() {
  const auto number = vacant_.empty() ? static_cast<std::uint32_t>(data_.size()) : vacant_.back();
  if (((std::uint64_t{number} << bits_) | mask_) >= limit_) {
    throw std::length_error("a sixteenth of a table is full; use more servers");
  }
  if (vacant_.empty()) {
    data_.push_back(nullptr);
    blocks_.emplace_back();
    vacant_.push_back(number);
  }
  data_[number] = arena_.take(is_huge(number));
  vacant_.pop_back();
  // The number 0 is no row: it is what an empty entry of an index has.
  blocks_[number] = {.touched = std::uint32_t{number == 0}, .is_open = true};
  open_.push_back(number);
}

void Slab::clear() {
  for (std::size_t number = 0; number < data_.size(); ++number) {
    if (data_[number] != nullptr) arena_.give_back(data_[number], is_huge(number));
  }
  data_.clear();
  blocks_.clear();
  open_.clear();
  vacant_.clear();
  touched_ = 0;
}

}  // namespace phalanx
