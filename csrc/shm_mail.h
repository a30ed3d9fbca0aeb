// Messages between two ranks through the rings of a Region. A message is an envelope and its bytes, both padded to
// whole cache lines. Messages of one sender with one tag arrive in order; one that is not asked for yet waits in the
// ring, or in memory of the receiver when another one behind it is asked for.
//
// Thread-safety: none; the group calls it under its lock.

#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "shm_operation.h"
#include "shm_region.h"

namespace phalanx {

class Mail {
 public:
  explicit Mail(const Region& region);

  void add(const std::shared_ptr<Operation>& message);
  // Moves what can be moved; returns whether a message came to its end. Throws Disagreement for one of another size.
  bool advance();
  // Messages that have not come to their end.
  std::vector<std::shared_ptr<Operation>> pending() const;
  void clear();

 private:
  using Message = std::shared_ptr<Operation>;
  struct Envelope {
    std::uint64_t bytes;
    std::int64_t tag;
  };
  struct Stored {
    std::int64_t tag;
    std::vector<std::byte> bytes;
    bool is_whole;
  };
  struct Inbox {
    std::deque<std::unique_ptr<Stored>> stored;
    // Where the message goes whose bytes are arriving now: to a receiver, or to what is stored.
    bool is_arriving = false;
    Message receiver;
    Stored* keeper = nullptr;
    std::byte* into = nullptr;
    std::uint64_t left = 0;
  };
  struct Outbox {
    std::deque<Message> messages;
    bool has_envelope = false;
    std::uint64_t moved = 0;
  };

  bool send_to(int rank);
  bool receive_from(int rank);
  bool open(int rank);                     // begins the next message of the ring
  bool take_stored(const Message& receive);  // gives an receive message what waits for it
  bool has_receiver(int rank) const;
  Message matching_receive(int rank, std::int64_t tag) const;
  void claim(const Message& message, int rank, std::uint64_t bytes) const;
  void end(const Message& message);

  const Region& region_;
  std::vector<Inbox> inboxes_;
  std::vector<Outbox> outboxes_;
  std::deque<Message> receives_;  // in the order they were asked for
  std::size_t sends_pending_ = 0;
};

}  // namespace phalanx
