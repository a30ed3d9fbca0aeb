#include "client_link.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace phalanx {
namespace {

constexpr std::uint64_t kSmallestShared = 8 << 10;  // as ps/wire/segments.py

// Memory of this process alone.
std::shared_ptr<RequestMemory> own_memory(std::uint64_t bytes) {
  const auto values = std::make_shared<std::vector<std::byte>>(bytes);
  return std::make_shared<RequestMemory>(RequestMemory{*values, 0, -1, values});
}

bool has_rows_at(const RequestMemory& memory, std::uint64_t at, std::uint64_t count) {
  return memory.segment != 0 && at <= memory.bytes.size() && count <= memory.bytes.size() - at;
}

}  // namespace

bool SentPart::needs_shared() const { return payload_bytes >= kSmallestShared || rows_bytes >= kSmallestShared; }

SentRequest::SentRequest(const PartitionedRequest& request, std::span<const int> servers) {
  parts.reserve(servers.size());
  for (const int server : servers) {
    SentPart& part = parts.emplace_back();
    part.server = server;
    part.payload_bytes = request.payload_bytes(server, false);
    part.rows_bytes = request.rows_bytes(server);
  }
}

const SentPart& SentRequest::part_of(int server) const {
  const auto part = std::lower_bound(parts.begin(), parts.end(), server,
                                     [](const SentPart& one, int rank) { return one.server < rank; });
  if (part == parts.end() || part->server != server) throw std::out_of_range("the request has no part of that server");
  return *part;
}

bool SentRequest::is_done_by_all() const {
  return std::all_of(parts.begin(), parts.end(), [](const SentPart& part) {
    return part.state == SentPart::State::kAnswered && part.reply.status <= DataStatus::kAgain;
  });
}

std::shared_ptr<RequestMemory> ClientLink::free_memory(std::uint64_t bytes) const {
  const std::shared_ptr<RequestMemory>* smallest = nullptr;
  for (const std::shared_ptr<RequestMemory>& piece : memory) {
    if (piece.use_count() != 1 || piece->bytes.size() < bytes) continue;
    if (smallest == nullptr || piece->bytes.size() < (*smallest)->bytes.size()) smallest = &piece;
  }
  return smallest == nullptr ? nullptr : *smallest;
}

void ClientLink::begin(const std::shared_ptr<SentRequest>& request, std::size_t index, std::shared_ptr<void> owner) {
  SentPart& part = request->parts[index];
  part.memory = part.needs_shared() ? free_memory(part.memory_bytes()) : own_memory(part.payload_bytes);
  due.push_back({request, index, std::move(owner)});
  due_bytes += part.payload_bytes;
  part.seq = ++seq;
  part.state = SentPart::State::kUnderWay;
}

ServerFrame ClientLink::frame_of(const SentPart& part) const {
  const RequestMemory& of_part = *part.memory;
  return {part.server, fd, client, part.seq, of_part.segment, of_part.bytes, of_part.descriptor};
}

DueReply ClientLink::next_reply(const ReadAhead& ahead) const {
  const SentPart& part = due.front().get();
  DueReply reply;
  reply.fd = fd;
  reply.ahead = ahead;
  reply.seq = part.seq;
  reply.rows_bytes = part.rows_bytes;
  return reply;
}

bool ClientLink::take(const DueReply& reply) {
  if (due.empty() || due.front().get().seq != reply.seq) return false;
  SentPart& part = due.front().get();
  const std::uint64_t count = reply.head.status <= DataStatus::kAgain ? part.rows_bytes : 0;
  if (reply.is_shared && count != 0 && !has_rows_at(*part.memory, reply.rows_at, count)) return false;
  const auto of_part = part.memory;
  if (count == 0) {
    part.memory.reset();
  } else if (reply.is_shared) {
    part.rows = part.memory->bytes.subspan(reply.rows_at, count);
  } else {
    part.memory = own_memory(count);
    part.rows = part.memory->bytes;
    std::memcpy(part.rows.data(), reply.ahead.buffer.data() + reply.rows_at, count);
  }
  part.reply = reply.head;
  part.state = SentPart::State::kAnswered;
  due_bytes -= part.payload_bytes;
  has_answered = true;
  const Due answered = std::move(due.front());  // what it frees, it frees last: that may be objects of Python
  due.pop_front();
  return true;
}

void ClientLink::hand_over() {
  const Due first = std::move(due.front());
  due.pop_front();
  SentPart& part = first.get();
  part.state = SentPart::State::kTakenOver;
  due_bytes -= part.payload_bytes;
  const auto of_part = std::move(part.memory);
  const auto lent = std::move(memory);
  memory.clear();
}

}  // namespace phalanx
