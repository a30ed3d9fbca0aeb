#include "shm_mail.h"

#include <algorithm>
#include <cstring>

namespace phalanx {
namespace {

constexpr std::uint64_t kPiece = 64 << 10;  // bytes after which the other side is told, so that both copy at once

std::uint64_t lines(std::uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

Mail::Mail(const Region& region)
    : region_(region),
      inboxes_(static_cast<std::size_t>(region.size())),
      outboxes_(static_cast<std::size_t>(region.size())) {}

void Mail::add(const Message& message) {
  if (message->kind == Kind::kSend) {
    outboxes_[static_cast<std::size_t>(message->peer)].messages.push_back(message);
    ++sends_pending_;
  } else if (!take_stored(message)) {
    receives_.push_back(message);
  }
}

bool Mail::advance() {
  bool has_ended = false;
  for (int r = 0; r < region_.size() && sends_pending_ > 0; ++r) has_ended |= send_to(r);
  for (int r = 0; r < region_.size(); ++r)
    if (has_receiver(r)) has_ended |= receive_from(r);
  return has_ended;
}

std::vector<std::shared_ptr<Operation>> Mail::pending() const {
  std::vector<Message> all(receives_.begin(), receives_.end());
  for (const Outbox& outbox : outboxes_) all.insert(all.end(), outbox.messages.begin(), outbox.messages.end());
  for (const Inbox& inbox : inboxes_)
    if (inbox.receiver) all.push_back(inbox.receiver);
  return all;
}

void Mail::clear() {
  inboxes_ = std::vector<Inbox>(inboxes_.size());
  outboxes_ = std::vector<Outbox>(outboxes_.size());
  receives_.clear();
  sends_pending_ = 0;
}

bool Mail::send_to(int rank) {
  Outbox& outbox = outboxes_[static_cast<std::size_t>(rank)];
  Channel& channel = region_.channel(region_.rank(), rank);
  bool has_ended = false, has_moved = false;
  while (!outbox.messages.empty()) {
    const Message message = outbox.messages.front();
    const std::uint64_t at = channel.written.load(std::memory_order_relaxed);
    const std::uint64_t room = kRingBytes - (at - channel.read.load(std::memory_order_acquire));
    if (room == 0) break;
    has_moved = true;
    std::byte* const into = channel.ring + at % kRingBytes;
    if (!outbox.has_envelope) {
      const Envelope envelope{message->bytes, message->tag};
      std::memcpy(into, &envelope, sizeof envelope);
      channel.written.store(at + kLine, std::memory_order_release);
      outbox.has_envelope = true;
    } else if (outbox.moved < message->bytes) {
      const std::uint64_t piece =
          std::min({message->bytes - outbox.moved, room, kPiece, kRingBytes - at % kRingBytes});
      std::memcpy(into, message->memory + outbox.moved, piece);
      outbox.moved += piece;
      channel.written.store(at + lines(piece), std::memory_order_release);
      region_.ring(rank);
    }
    if (outbox.moved < message->bytes) continue;
    outbox.messages.pop_front();
    outbox.has_envelope = false;
    outbox.moved = 0;
    --sends_pending_;
    end(message);
    has_ended = true;
  }
  if (has_moved) region_.ring(rank);
  return has_ended;
}

bool Mail::receive_from(int rank) {
  Inbox& inbox = inboxes_[static_cast<std::size_t>(rank)];
  Channel& channel = region_.channel(rank, region_.rank());
  bool has_ended = false, has_moved = false;
  while (inbox.is_arriving || (has_receiver(rank) && open(rank))) {
    const std::uint64_t at = channel.read.load(std::memory_order_relaxed);
    const std::uint64_t ready = channel.written.load(std::memory_order_acquire) - at;
    const std::uint64_t piece = std::min({inbox.left, ready, kPiece, kRingBytes - at % kRingBytes});
    if (piece > 0) {
      std::memcpy(inbox.into, channel.ring + at % kRingBytes, piece);
      inbox.into += piece;
      inbox.left -= piece;
      channel.read.store(at + lines(piece), std::memory_order_release);
      region_.ring(rank);
      has_moved = true;
    }
    if (inbox.left > 0 && piece == 0) break;
    if (inbox.left > 0) continue;
    inbox.is_arriving = false;
    if (inbox.receiver) {
      end(inbox.receiver);
      inbox.receiver = nullptr;
      has_ended = true;
    } else {
      inbox.keeper->is_whole = true;
    }
    has_moved = true;
  }
  if (has_moved) region_.ring(rank);
  return has_ended;
}

bool Mail::open(int rank) {
  Inbox& inbox = inboxes_[static_cast<std::size_t>(rank)];
  Channel& channel = region_.channel(rank, region_.rank());
  const std::uint64_t at = channel.read.load(std::memory_order_relaxed);
  if (channel.written.load(std::memory_order_acquire) == at) return false;
  Envelope envelope;
  std::memcpy(&envelope, channel.ring + at % kRingBytes, sizeof envelope);
  channel.read.store(at + kLine, std::memory_order_release);
  inbox.left = envelope.bytes;
  inbox.is_arriving = true;
  if (const Message message = matching_receive(rank, envelope.tag)) {
    std::erase(receives_, message);
    inbox.receiver = message;
    claim(message, rank, envelope.bytes);
    inbox.into = message->memory;
  } else {
    inbox.stored.push_back(std::make_unique<Stored>(
        Stored{envelope.tag, std::vector<std::byte>(envelope.bytes), false}));
    inbox.keeper = inbox.stored.back().get();
    inbox.into = inbox.keeper->bytes.data();
  }
  return true;
}

bool Mail::take_stored(const Message& receive) {
  for (int r = 0; r < region_.size(); ++r) {
    if (receive->peer != kAnyRank && receive->peer != r) continue;
    Inbox& inbox = inboxes_[static_cast<std::size_t>(r)];
    const auto found = std::find_if(inbox.stored.begin(), inbox.stored.end(),
                                    [&](const auto& stored) { return stored->tag == receive->tag; });
    if (found == inbox.stored.end()) continue;
    Stored& stored = **found;
    claim(receive, r, stored.bytes.size());
    if (!stored.is_whole) {
      // Its last bytes are still to come: the rest goes where it is asked for.
      const std::size_t arrived = stored.bytes.size() - inbox.left;
      std::memcpy(receive->memory, stored.bytes.data(), arrived);
      inbox.into = receive->memory + arrived;
      inbox.receiver = receive;
      inbox.keeper = nullptr;
    } else {
      std::copy(stored.bytes.begin(), stored.bytes.end(), receive->memory);
      end(receive);
    }
    inbox.stored.erase(found);
    return true;
  }
  return false;
}

// A message that is arriving is read to its end; the next one is opened only when somebody waits for this sender.
bool Mail::has_receiver(int rank) const {
  if (inboxes_[static_cast<std::size_t>(rank)].is_arriving) return true;
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const Message& m) { return m->peer == kAnyRank || m->peer == rank; });
}

std::shared_ptr<Operation> Mail::matching_receive(int rank, std::int64_t tag) const {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const Message& m) {
    return (m->peer == kAnyRank || m->peer == rank) && m->tag == tag;
  });
  return found == receives_.end() ? nullptr : *found;
}

void Mail::claim(const Message& message, int rank, std::uint64_t bytes) const {
  message->peer = rank;
  if (message->bytes == bytes) return;
  throw Disagreement(region_.name_of(rank) + " sent " + std::to_string(bytes) + " bytes with tag " +
                     std::to_string(message->tag) + " to " + region_.name_of(region_.rank()) + ", which expects " +
                     std::to_string(message->bytes) + ". Make the shape and dtype of both tensors equal.");
}

void Mail::end(const Message& message) { message->is_done.store(true, std::memory_order_release); }

}  // namespace phalanx
