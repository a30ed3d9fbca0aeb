#include "wire_socket.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace phalanx {

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
    std::size_t count = stream_.send_some(std::span(left).subspan(done));
    if (count == 0) wait(POLLOUT);
    while (count > 0) {
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
  while (true) {
    if (const std::size_t count = stream_.receive_some(memory); count > 0) return count;
    wait(POLLIN);
  }
}

void FrameSocket::wait(short events) const {
  pollfd waiting{stream_.fd(), events, 0};
  while (::poll(&waiting, 1, -1) < 0) {
    if (errno != EINTR) throw ConnectionEnded(std::strerror(errno));
  }
}

}  // namespace phalanx
