#include "link_group.h"

#include <algorithm>
#include <cstring>

namespace phalanx {
namespace {

constexpr std::uint64_t kSmallestShared = 8 << 10;  // as ps/wire/segments.py

// Memory of this process alone.
std::shared_ptr<RequestMemory> own_memory(std::uint64_t bytes) {
  const auto values = std::make_shared<std::vector<std::byte>>(bytes);
  return std::make_shared<RequestMemory>(RequestMemory{*values, 0, -1, values});
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
  return *std::lower_bound(parts.begin(), parts.end(), server,
                           [](const SentPart& part, int wanted) { return part.server < wanted; });
}

std::vector<int> SentRequest::unanswered() const {
  std::vector<int> servers;
  for (const SentPart& part : parts) {
    if (part.seq != 0 && !part.has_reply) servers.push_back(part.server);
  }
  return servers;
}

bool SentRequest::is_done_by_all() const {
  return std::all_of(parts.begin(), parts.end(), [](const SentPart& part) {
    return part.has_reply && part.reply.status <= DataStatus::kAgain;
  });
}

std::shared_ptr<RequestMemory> LinkGroup::Link::free_memory(std::uint64_t bytes) const {
  const std::shared_ptr<RequestMemory>* smallest = nullptr;
  for (const std::shared_ptr<RequestMemory>& piece : memory) {
    if (piece.use_count() != 1 || piece->bytes.size() < bytes) continue;
    if (smallest == nullptr || piece->bytes.size() < (*smallest)->bytes.size()) smallest = &piece;
  }
  return smallest == nullptr ? nullptr : *smallest;
}

bool LinkGroup::has_room(const SentRequest& request) {
  return std::all_of(request.parts.begin(), request.parts.end(),
                     [&](const SentPart& part) { return link(part.server).has_room(part.payload_bytes); });
}

std::vector<std::pair<int, std::uint64_t>> LinkGroup::lacking_memory(const SentRequest& request) {
  std::vector<std::pair<int, std::uint64_t>> lacking;
  for (const SentPart& part : request.parts) {
    if (part.needs_shared() && !link(part.server).free_memory(part.memory_bytes())) {
      lacking.emplace_back(part.server, part.memory_bytes());
    }
  }
  return lacking;
}

void LinkGroup::begin(const std::shared_ptr<SentRequest>& request) {
  for (std::size_t i = 0; i < request->parts.size(); ++i) {
    SentPart& part = request->parts[i];
    Link& to = link(part.server);
    part.memory = part.needs_shared() ? to.free_memory(part.memory_bytes()) : own_memory(part.payload_bytes);
    part.seq = ++to.seq;
    to.due.push_back({part.seq, part.rows_bytes, request, i});
    to.due_bytes += part.payload_bytes;
  }
}

ServerFrame LinkGroup::frame_of(const SentPart& part) {
  const Link& to = link(part.server);
  const RequestMemory& memory = *part.memory;
  return {part.server, false, to.fd, to.client, part.seq, memory.segment, memory.bytes, memory.descriptor};
}

std::vector<DueReply> LinkGroup::due_on(std::span<const int> servers) {
  std::vector<DueReply> replies;
  for (const int server : servers) {
    const Link& from = link(server);
    DueReply& reply = replies.emplace_back();
    reply.fd = from.fd;
    reply.ahead = from.ahead;
    reply.seq = from.due.front().seq;
    reply.rows_bytes = from.due.front().rows_bytes;
  }
  return replies;
}

LinkGroup::Take LinkGroup::take(int server, const DueReply& reply) {
  Link& from = link(server);
  const Due due = from.due.front();
  const bool has_rows = due.request && reply.head.status <= DataStatus::kAgain && due.rows_bytes != 0;
  if (has_rows && reply.is_shared) {
    const RequestMemory& memory = *due.request->parts[due.part].memory;
    const std::uint64_t size = memory.bytes.size();
    if (memory.segment == 0 || reply.rows_at > size || due.rows_bytes > size - reply.rows_at) return Take::kBroken;
  }
  from.due.pop_front();
  from.has_answered = true;
  if (!due.request) return Take::kForPython;
  SentPart& part = due.request->parts[due.part];
  from.due_bytes -= part.payload_bytes;
  if (!has_rows) {
    part.memory.reset();
  } else if (reply.is_shared) {
    part.rows = part.memory->bytes.subspan(reply.rows_at, due.rows_bytes);
  } else {
    part.memory = own_memory(due.rows_bytes);
    part.rows = part.memory->bytes;
    std::memcpy(part.rows.data(), reply.ahead.buffer.data() + reply.rows_at, part.rows.size());
  }
  part.reply = reply.head;
  part.has_reply = true;
  return Take::kTaken;
}

void LinkGroup::hand_over() {
  for (Link& link : links_) {
    for (Due& due : link.due) due.request.reset();
    link.due_bytes = 0;
    link.memory.clear();
  }
}

}  // namespace phalanx
