// Memory that reads and writes past the system's cache go to and come from: it begins at a page.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace phalanx {

class PageBytes {
 public:
  static constexpr std::size_t kPage = 4096;

  // The least multiple of a page that holds so many bytes.
  static constexpr std::size_t rounded(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  PageBytes() = default;
  // Undefined content. Throws std::bad_alloc.
  explicit PageBytes(std::size_t bytes)
      : size_(rounded(bytes)), memory_(static_cast<std::byte*>(std::aligned_alloc(kPage, size_))) {
    if (!memory_) throw std::bad_alloc();
  }

  std::byte* data() const { return memory_.get(); }
  std::size_t size() const { return memory_ ? size_ : 0; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  std::size_t size_ = 0;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace phalanx
