// The bytes of a connected, non-blocking socket that Python made and closes, plain or under TLS (wire_tls.h).

#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <deque>
#include <span>
#include <stdexcept>
#include <vector>

namespace phalanx {

// The other end is gone; the text says how.
struct ConnectionEnded : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Descriptors that came and were not taken; closes those that are left.
class Descriptors {
 public:
  explicit Descriptors(std::vector<int> received = {}) : received_(received.begin(), received.end()) {}
  ~Descriptors();
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  void add(int descriptor) { received_.push_back(descriptor); }
  // The oldest one, the caller's to close. Throws FrameError if none came.
  int take();
  std::vector<int> take_all();
  std::size_t size() const { return received_.size(); }

 private:
  std::deque<int> received_;
};

// Thread-safety: one thread may receive while another sends.
class SocketStream {
 public:
  explicit SocketStream(int fd) : fd_(fd) {}
  virtual ~SocketStream() = default;
  SocketStream(const SocketStream&) = delete;
  SocketStream& operator=(const SocketStream&) = delete;

  int fd() const { return fd_; }

  // Whether what comes is proven to be what the other end wrote, so that chunks of a payload have no checksums.
  virtual bool is_authenticated() const { return false; }

  // Reads what is there, and returns how many bytes; 0: nothing yet, wait until the socket can be read. It must have
  // been asked in vain before such a wait. Throws ConnectionEnded if nothing comes any more.
  virtual std::size_t receive_some(std::span<std::byte> memory) = 0;

  // Writes the beginning of the parts, and returns how many bytes; 0: no room, wait until the socket can be written and
  // ask again with the same parts. Throws ConnectionEnded if the other end is gone.
  virtual std::size_t send_some(std::span<const iovec> parts) = 0;

 private:
  const int fd_;
};

class PlainStream : public SocketStream {
 public:
  // A TCP socket.
  explicit PlainStream(int fd) : SocketStream(fd) {}
  // A Unix socket, whose descriptors are added to those. REQUIRES: they live as long as this.
  PlainStream(int fd, Descriptors& descriptors) : SocketStream(fd), descriptors_(&descriptors) {}

  // Throws FrameError if more descriptors come than frames announce.
  std::size_t receive_some(std::span<std::byte> memory) override;
  std::size_t send_some(std::span<const iovec> parts) override;

 private:
  void take_descriptors(const msghdr& message);

  Descriptors* descriptors_ = nullptr;
};

}  // namespace phalanx
