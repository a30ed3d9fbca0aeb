// A socket as the native core reads and writes it between two control requests: what Python had read ahead comes first,
// and what is read ahead here goes back to it.
//
// Thread-safety: one thread at a time.

#pragma once

#include <cstddef>
#include <span>

#include "wire_stream.h"

namespace phalanx {

struct ReadAhead {
  std::span<std::byte> buffer;
  std::size_t start = 0, end = 0;  // what of it was read and not taken
};

class FrameSocket {
 public:
  // REQUIRES: the stream and the descriptors live as long as this.
  FrameSocket(SocketStream& stream, ReadAhead ahead, Descriptors& descriptors)
      : stream_(stream), ahead_(ahead), descriptors_(descriptors) {}

  // The next bytes, which stay unread. Waits for them. REQUIRES: count <= the buffer's size.
  std::span<const std::byte> peek(std::size_t count);

  // Reads exactly as many bytes as `memory` has. Both throw ConnectionEnded if the other end closes before, and
  // FrameError if more descriptors come than frames announce.
  void fill(std::span<std::byte> memory);

  // Writes all parts in order. Throws ConnectionEnded if the other end is gone.
  void write(std::span<const std::span<const std::byte>> parts);

  // Whether the chunks of a payload have checksums.
  bool has_checksums() const { return !stream_.is_authenticated(); }
  Descriptors& descriptors() { return descriptors_; }
  const ReadAhead& ahead() const { return ahead_; }

 private:
  std::size_t receive(std::span<std::byte> memory);
  void wait(short events) const;

  SocketStream& stream_;
  ReadAhead ahead_;
  Descriptors& descriptors_;
};

}  // namespace phalanx
