#include "wire_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "wire_frame.h"

namespace phalanx {
namespace {

constexpr std::size_t kMostParts = 512;
constexpr std::size_t kMostDescriptors = 4;

[[noreturn]] void throw_ended(int error) { throw ConnectionEnded(std::strerror(error)); }

}  // namespace

Descriptors::~Descriptors() {
  for (const int descriptor : received_) ::close(descriptor);
}

int Descriptors::take() {
  if (received_.empty()) throw FrameError("a frame announces a descriptor that did not come with it");
  const int first = received_.front();
  received_.pop_front();
  return first;
}

std::vector<int> Descriptors::take_all() {
  std::vector<int> all(received_.begin(), received_.end());
  received_.clear();
  return all;
}

std::span<const std::byte> FrameSocket::peek(std::size_t count) {
  if (ahead_.buffer.size() - ahead_.start < count) {
    std::memmove(ahead_.buffer.data(), ahead_.buffer.data() + ahead_.start, ahead_.end - ahead_.start);
    ahead_.end -= ahead_.start;
    ahead_.start = 0;
  }
  while (ahead_.end - ahead_.start < count) ahead_.end += receive(ahead_.buffer.subspan(ahead_.end));
  return ahead_.buffer.subspan(ahead_.start, count);
}

void FrameSocket::fill(std::span<std::byte> memory) {
  while (!memory.empty()) {
    if (ahead_.start == ahead_.end) {
      if (memory.size() >= ahead_.buffer.size()) {
        memory = memory.subspan(receive(memory));
        continue;
      }
      ahead_.start = ahead_.end = 0;
      ahead_.end = receive(ahead_.buffer);
    }
    const std::size_t count = std::min(ahead_.end - ahead_.start, memory.size());
    std::memcpy(memory.data(), ahead_.buffer.data() + ahead_.start, count);
    ahead_.start += count;
    memory = memory.subspan(count);
  }
}

void FrameSocket::write(std::span<const std::span<const std::byte>> parts) {
  std::vector<iovec> left;
  for (const std::span<const std::byte> part : parts) {
    if (!part.empty()) left.push_back({const_cast<std::byte*>(part.data()), part.size()});
  }
  std::size_t done = 0;
  while (done < left.size()) {
    msghdr message{};
    message.msg_iov = left.data() + done;
    message.msg_iovlen = std::min(left.size() - done, kMostParts);
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        wait(POLLOUT);
      } else if (errno != EINTR) {
        throw_ended(errno);
      }
      continue;
    }
    for (std::size_t count = static_cast<std::size_t>(sent); count > 0;) {
      iovec& first = left[done];
      const std::size_t taken = std::min(count, first.iov_len);
      first.iov_base = static_cast<std::byte*>(first.iov_base) + taken;
      first.iov_len -= taken;
      count -= taken;
      if (first.iov_len == 0) ++done;
    }
  }
}

std::size_t FrameSocket::receive(std::span<std::byte> memory) {
  iovec into{memory.data(), memory.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control;
  while (true) {
    msghdr message{};
    message.msg_iov = &into;
    message.msg_iovlen = 1;
    if (is_unix_) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
    }
    const ssize_t count = ::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC);
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        wait(POLLIN);
      } else if (errno != EINTR) {
        throw_ended(errno);
      }
      continue;
    }
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      for (std::size_t at = 0; at + sizeof(int) <= part->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
        int descriptor;
        std::memcpy(&descriptor, CMSG_DATA(part) + at, sizeof descriptor);
        descriptors_.add(descriptor);
      }
    }
    if ((message.msg_flags & MSG_CTRUNC) != 0 || descriptors_.size() > kMostDescriptors) {
      throw FrameError("more descriptors came than frames announce");
    }
    if (count == 0) throw ConnectionEnded("it closed the connection");
    return static_cast<std::size_t>(count);
  }
}

void FrameSocket::wait(short events) const {
  pollfd waiting{fd_, events, 0};
  while (::poll(&waiting, 1, -1) < 0) {
    if (errno != EINTR) throw_ended(errno);
  }
}

}  // namespace phalanx
