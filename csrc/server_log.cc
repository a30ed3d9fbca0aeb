#include "server_log.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "server_request.h"

namespace phalanx {
namespace {

constexpr std::size_t kMostParts = 512;  // of one writev; the system takes at most 1024

// Returns 0, or the errno of a write that failed.
int write_all(int fd, std::vector<iovec> parts) {
  std::span<iovec> left = parts;
  while (!left.empty()) {
    const ssize_t count = ::writev(fd, left.data(), static_cast<int>(std::min(left.size(), kMostParts)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    auto written = static_cast<std::size_t>(count);
    while (!left.empty() && written >= left.front().iov_len) {
      written -= left.front().iov_len;
      left = left.subspan(1);
    }
    if (written > 0) {
      left.front().iov_base = static_cast<std::byte*>(left.front().iov_base) + written;
      left.front().iov_len -= written;
    }
  }
  return 0;
}

}  // namespace

ServerLog::ServerLog(std::string directory, bool is_durable)
    : directory_(std::move(directory)), is_durable_(is_durable) {}

ServerLog::~ServerLog() {
  if (fd_ >= 0) ::close(fd_);
}

std::uint64_t ServerLog::append(std::span<const Bytes> parts) {
  std::size_t size = 0;
  std::vector<iovec> buffers;
  for (const Bytes& part : parts) {
    if (part.empty()) continue;
    buffers.push_back({const_cast<std::byte*>(part.data()), part.size()});
    size += part.size();
  }
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  if (const int error = write_all(fd_, std::move(buffers)); error != 0) {
    if (::ftruncate(fd_, before) != 0) {
      throw Refusal("InternalError", "The log in " + directory_ + " took a part of a record that could not be removed: " +
                                         std::strerror(errno) + ". Remove what follows byte " + std::to_string(before) +
                                         " of its newest segment.");
    }
    throw Refusal("BackendError", refused(size, error));
  }
  const std::lock_guard locked(lock_);
  return end_ += size;
}

void ServerLog::sync(std::uint64_t position) {
  if (!is_durable_) return;
  std::unique_lock locked(lock_);
  for (;;) {
    flushed_.wait(locked, [&] { return !is_syncing_; });
    if (failed_) {
      throw Refusal("BackendError", directory_ + " could not be flushed to disk: [Errno " + std::to_string(*failed_) +
                                        "] " + std::strerror(*failed_) + ". Replace the disk.");
    }
    if (synced_ >= position) return;
    flush(locked);
  }
}

void ServerLog::flush(std::unique_lock<std::mutex>& locked) {
  is_syncing_ = true;
  const std::uint64_t target = end_;
  const int fd = fd_;
  locked.unlock();
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  locked.lock();
  is_syncing_ = false;
  ++syncs_;
  if (error != 0) {
    failed_ = error;
  } else {
    synced_ = std::max(synced_, target);
  }
  flushed_.notify_all();
}

void ServerLog::open(const std::string& path) {
  sync(position());
  std::unique_lock locked(lock_);
  flushed_.wait(locked, [&] { return !is_syncing_; });
  const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

void ServerLog::close() {
  sync(position());
  std::unique_lock locked(lock_);
  flushed_.wait(locked, [&] { return !is_syncing_; });
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::uint64_t ServerLog::position() const {
  const std::lock_guard locked(lock_);
  return end_;
}

std::uint64_t ServerLog::syncs() const {
  const std::lock_guard locked(lock_);
  return syncs_;
}

std::string ServerLog::refused(std::size_t size, int error) const {
  struct statvfs disk {};
  ::statvfs(directory_.c_str(), &disk);
  const std::uint64_t free = std::uint64_t{disk.f_bavail} * disk.f_frsize;
  return "A record of " + std::to_string(size) + " bytes was to be written to the log in " + directory_ + ", which has " +
         std::to_string(free) + " bytes free: " + std::strerror(error) +
         ". Nothing was changed; make room there and push again.";
}

}  // namespace phalanx
