#include "wire_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "crc32.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string encode_request(const PartitionedRequest& request, const RequestTerms& terms, const ServerFrame& frame,
                           std::uint64_t payload_bytes) {
  const auto [pushes, pulls] = request.counts(frame.server);
  RequestHead head;
  head.step = terms.step;
  head.weight = terms.weight;
  head.segment = frame.segment;
  head.segment_bytes = frame.is_shared() ? frame.memory.size() : 0;
  head.flags = terms.keep ? kKeepPull : 0;
  head.pushes = static_cast<std::uint32_t>(pushes);
  head.pulls = static_cast<std::uint32_t>(pulls);
  std::string object(reinterpret_cast<const char*>(&head), sizeof head);
  object += request.heads(frame.server, false);
  const auto flags = static_cast<std::uint8_t>((frame.is_shared() ? kShared : 0) |
                                               (frame.descriptor < 0 ? 0 : kNewSegment));
  return encode_frame({terms.kind, flags, frame.client, frame.seq, 0, payload_bytes}, object);
}

// Adds a payload of one chunk to a frame, and its checksum.
void append_payload(std::string& bytes, std::span<const std::byte> payload) {
  if (payload.empty()) return;
  const std::uint32_t checksum = crc32(payload);
  bytes.append(reinterpret_cast<const char*>(payload.data()), payload.size());
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
}

// Returns how many bytes the socket took; -1 for none, with errno.
ssize_t send_some(int fd, std::string& bytes, int descriptor) {
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
  }
  ssize_t sent;
  do sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  return sent;
}

bool is_sound(const DueReply& reply, const FrameHeader& header, const ReplyHead& head) {
  if (head.status > DataStatus::kNeedKeys) return false;
  return header.payload_bytes == (head.status <= DataStatus::kAgain ? reply.rows_bytes : 0);
}

// Moves what was read ahead to the start of the buffer, if a frame of this length would not fit behind it.
void make_room(ReadAhead& ahead, std::size_t count) {
  if (ahead.buffer.size() - ahead.start >= count) return;
  std::memmove(ahead.buffer.data(), ahead.buffer.data() + ahead.start, ahead.end - ahead.start);
  ahead.end -= ahead.start;
  ahead.start = 0;
}

// Takes the reply out of what was read ahead, if it is whole.
void take_reply(DueReply& reply) {
  constexpr std::size_t kHead = kHeaderBytes + sizeof(ReplyHead);
  ReadAhead& ahead = reply.ahead;
  make_room(ahead, kHead);
  const auto bytes = [&] { return std::span<const std::byte>(ahead.buffer).subspan(ahead.start, ahead.end - ahead.start); };
  if (bytes().size() < kHeaderBytes) return;
  const FrameHeader header = decode_header(bytes().first(kHeaderBytes));
  if (header.kind != FrameKind::kRows || header.seq != reply.seq || header.object_bytes != sizeof(ReplyHead) ||
      (header.flags & ~kShared) != 0) {
    throw FrameError("another frame than the reply");
  }
  if (bytes().size() < kHead) return;
  require_checksum(bytes().first(kHeaderBytes), bytes().subspan(kHeaderBytes, sizeof(ReplyHead)));
  ReplyHead head;
  std::memcpy(static_cast<void*>(&head), bytes().data() + kHeaderBytes, sizeof head);
  if (!is_sound(reply, header, head)) throw FrameError("a reply of something else");
  const bool is_shared = (header.flags & kShared) != 0;
  const std::uint64_t count = is_shared ? 0 : header.payload_bytes;
  const std::uint64_t length = kHead + count + (count == 0 ? 0 : kChecksumBytes);
  if (length > ahead.buffer.size()) throw FrameError("a reply that is longer than the buffer");
  make_room(ahead, length);
  if (bytes().size() < length) return;
  if (count != 0) {
    std::uint32_t checksum;
    std::memcpy(&checksum, bytes().data() + kHead + count, sizeof checksum);
    if (crc32(bytes().subspan(kHead, count)) != checksum) throw FrameError("the checksum of a payload is wrong");
  }
  reply.head = head;
  reply.is_shared = is_shared;
  reply.rows_at = is_shared ? head.at : ahead.start + kHead;
  reply.length = length;
  ahead.start += length;
  reply.state = DueReply::State::kArrived;
}

// As `take_reply`; what is no such reply is for Python, which reads it again and says what is wrong with it.
void look_at(DueReply& reply) {
  try {
    take_reply(reply);
  } catch (const FrameError&) {
    reply.state = DueReply::State::kForPython;
  }
}

// Reads what the socket has. Returns whether anything happened to it.
bool read_some(DueReply& reply) {
  ReadAhead& ahead = reply.ahead;
  if (ahead.start == ahead.end) ahead.start = ahead.end = 0;
  const std::span<std::byte> room = ahead.buffer.subspan(ahead.end);
  const ssize_t count = ::recv(reply.fd, room.data(), room.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (count <= 0) {
    reply.error = count < 0 ? errno : 0;
    reply.state = DueReply::State::kForPython;
    return true;
  }
  ahead.end += static_cast<std::size_t>(count);
  look_at(reply);
  return true;
}

milliseconds until(Clock::time_point deadline) {
  return std::max(milliseconds{0}, std::chrono::ceil<milliseconds>(deadline - Clock::now()));
}

}  // namespace

SentFrame send_frame(const PartitionedRequest& request, const RequestTerms& terms, const ServerFrame& frame) {
  const std::uint64_t count = request.payload_bytes(frame.server, false);
  request.write(frame.server, false, frame.memory.data());
  std::string bytes = encode_request(request, terms, frame, count);
  if (!frame.is_shared()) append_payload(bytes, frame.memory.first(count));
  const ssize_t sent = send_some(frame.fd, bytes, frame.descriptor);
  if (sent == static_cast<ssize_t>(bytes.size())) return {};
  if (sent >= 0) return {0, bytes.substr(static_cast<std::size_t>(sent)), true};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {0, std::move(bytes), false};
  return {errno, {}, false};
}

bool receive_replies(std::span<DueReply> replies, milliseconds patience, milliseconds hold) {
  using State = DueReply::State;
  const Clock::time_point start = Clock::now();
  Clock::time_point deadline = start + patience;
  bool has_news = false, has_arrived = false, is_first = true;
  for (DueReply& reply : replies) look_at(reply);
  std::vector<pollfd> due;
  while (true) {
    due.clear();
    for (const DueReply& reply : replies) {
      if (reply.state == State::kForPython) return true;
      if (reply.state == State::kDue) due.push_back({reply.fd, POLLIN, 0});
      if (reply.state == State::kArrived && !has_arrived) {
        has_arrived = true;
        deadline = std::min(deadline, Clock::now() + hold);
      }
    }
    if (due.empty()) return true;
    // The last is waited for alone, which wakes this thread once and not for each of them: until it comes, or would have
    // kept the others waiting for too long.
    const Clock::time_point end = is_first ? std::min(deadline, start + hold) : deadline;
    if (has_arrived || is_first) due.erase(due.begin(), due.end() - 1);
    const int ready = ::poll(due.data(), due.size(), static_cast<int>(until(end).count()));
    if (ready < 0 && errno == EINTR) return has_news || has_arrived;
    for (DueReply& reply : replies) {
      if (reply.state == State::kDue) has_news |= read_some(reply);
    }
    if (Clock::now() >= deadline || (ready <= 0 && (has_news || !is_first))) return true;
    is_first = false;
  }
}

}  // namespace phalanx
