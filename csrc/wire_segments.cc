#include "wire_segments.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "wire_frame.h"

namespace phalanx {
namespace {

constexpr std::size_t kMostAttached = 128;
constexpr std::uint64_t kLargestSegment = std::uint64_t{1} << 30;

struct Closing {
  int fd;
  ~Closing() { ::close(fd); }
};

void require_fixed_size(int fd, std::uint64_t size) {
  struct stat status;
  const std::int64_t actual = ::fstat(fd, &status) == 0 ? status.st_size : -1;
  if (size == 0 || size > kLargestSegment || static_cast<std::int64_t>(size) > actual) {
    throw FrameError("a segment of " + std::to_string(size) + " bytes has " + std::to_string(actual));
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw FrameError("a segment could shrink while it is read");
}

}  // namespace

Mapping::Mapping(int fd, std::size_t size) : size_(size) {
  void* base = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  base_ = static_cast<std::byte*>(base);
}

Mapping::~Mapping() { ::munmap(base_, size_); }

SharedMemory AttachedSegments::attach(std::uint64_t number, std::uint64_t size, int fd) {
  const Closing closing{fd};
  if (by_number_.size() >= kMostAttached || by_number_.contains(number)) {
    throw FrameError("segment " + std::to_string(number) + " after " + std::to_string(by_number_.size()) + " others");
  }
  require_fixed_size(fd, size);
  try {
    return by_number_[number] = std::make_shared<const Mapping>(fd, size);
  } catch (const std::system_error& error) {
    by_number_.erase(number);
    throw FrameError("segment " + std::to_string(number) + " of " + std::to_string(size) +
                     " bytes cannot be mapped: " + std::strerror(error.code().value()));
  }
}

SharedMemory AttachedSegments::find(std::uint64_t number) const {
  const auto found = by_number_.find(number);
  if (found == by_number_.end()) throw FrameError("segment " + std::to_string(number) + " was never handed over");
  return found->second;
}

}  // namespace phalanx
