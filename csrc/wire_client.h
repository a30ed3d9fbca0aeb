// The client's side of pulls and pushes on many servers at once: frames out to all of them, their replies in from all.
//
// Python numbers requests, hands out memory and connects; what comes here is the case in which all goes well. A socket
// that is full, a frame that is no reply of rows, and a broken connection go back to Python as they are.
//
// Ownership: sockets, memory and requests are the caller's. Thread-safety: one thread at a time for each socket and
// direction.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "partition.h"
#include "wire_data.h"
#include "wire_frame.h"
#include "wire_socket.h"

namespace phalanx {

// What the frames of one request have in common.
struct RequestTerms {
  FrameKind kind = FrameKind::kPull;
  std::uint64_t step = 0;
  double weight = 1;
  bool keep = false;  // whether servers remember the keys of a pull for a push
};

// A server's frame of a request, and where it goes.
struct ServerFrame {
  int server = 0;
  int fd = -1;
  std::uint64_t client = 0, seq = 0;
  std::uint64_t segment = 0;    // number of a shared segment; 0: the payload goes through the socket
  std::span<std::byte> memory;  // where the payload is written: the whole segment, or memory of the client alone
  int descriptor = -1;          // of the segment, where the server does not have it yet

  bool is_shared() const { return segment != 0; }
};

// How far a frame came.
struct SentFrame {
  int error = 0;          // errno of a broken connection
  std::string rest;       // what the socket had no room for
  bool has_begun = true;  // whether any of it went out, and with it the descriptor
};

// Writes the payload and the frame of one server, as far as the socket takes it without waiting.
// REQUIRES: the memory holds the payload; a payload that goes through the socket is of one chunk.
SentFrame send_frame(const PartitionedRequest& request, const RequestTerms& terms, const ServerFrame& frame);

// A reply that is due on a socket.
struct DueReply {
  enum class State { kDue, kArrived, kForPython };

  int fd = -1;
  ReadAhead ahead;
  std::uint64_t seq = 0;
  std::uint64_t rows_bytes = 0;  // payload of the reply if all goes well

  State state = State::kDue;
  int error = 0;         // errno of a broken connection
  ReplyHead head;        // once it arrived, and so are these
  bool is_shared = false;
  std::uint64_t rows_at = 0;  // where its rows are said to lie in shared memory, or lie in the buffer that was read ahead
  std::size_t length = 0;     // of the frame
};

// Takes replies off their sockets until all have arrived, one is for Python, or `patience` has passed; those that came
// wait only about `hold` for the others, as whoever else waits for frames of these sockets waits for this.
// False if a signal came before anything else did.
bool receive_replies(std::span<DueReply> replies, std::chrono::milliseconds patience, std::chrono::milliseconds hold);

}  // namespace phalanx
