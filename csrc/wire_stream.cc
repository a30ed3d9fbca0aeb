#include "wire_stream.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "wire_frame.h"

namespace phalanx {
namespace {

constexpr std::size_t kMostParts = 512;
constexpr std::size_t kMostDescriptors = 4;

// Whether the call that failed may be repeated at once. Throws ConnectionEnded if never again.
bool is_interrupted() {
  if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
  if (errno != EINTR) throw ConnectionEnded(std::strerror(errno));
  return true;
}

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

std::size_t PlainStream::receive_some(std::span<std::byte> memory) {
  iovec into{memory.data(), memory.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control;
  msghdr message{};
  ssize_t count;
  do {
    message = {};
    message.msg_iov = &into;
    message.msg_iovlen = 1;
    if (descriptors_ != nullptr) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
    }
    count = ::recvmsg(fd(), &message, MSG_CMSG_CLOEXEC);
  } while (count < 0 && is_interrupted());
  if (count < 0) return 0;
  if (descriptors_ != nullptr) take_descriptors(message);
  if (count == 0) throw ConnectionEnded("it closed the connection");
  return static_cast<std::size_t>(count);
}

void PlainStream::take_descriptors(const msghdr& message) {
  auto& from = const_cast<msghdr&>(message);  // CMSG_NXTHDR reads alone
  for (cmsghdr* part = CMSG_FIRSTHDR(&from); part != nullptr; part = CMSG_NXTHDR(&from, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= part->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int descriptor;
      std::memcpy(&descriptor, CMSG_DATA(part) + at, sizeof descriptor);
      descriptors_->add(descriptor);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0 || descriptors_->size() > kMostDescriptors) {
    throw FrameError("more descriptors came than frames announce");
  }
}

std::size_t PlainStream::send_some(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = std::min(parts.size(), kMostParts);
  ssize_t sent;
  do sent = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
  while (sent < 0 && is_interrupted());
  return sent < 0 ? 0 : static_cast<std::size_t>(sent);
}

}  // namespace phalanx
