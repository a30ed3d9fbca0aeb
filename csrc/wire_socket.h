// A non-blocking stream socket that Python made and closes, as the native core reads and writes it between two control
// requests: what Python had read ahead comes first, and what is read ahead here goes back to it.
//
// Thread-safety: one thread at a time.

#pragma once

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
  explicit Descriptors(std::vector<int> received) : received_(received.begin(), received.end()) {}
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

struct ReadAhead {
  std::span<std::byte> buffer;
  std::size_t start = 0, end = 0;  // what of it was read and not taken
};

class FrameSocket {
 public:
  FrameSocket(int fd, bool is_unix, ReadAhead ahead, std::vector<int> descriptors)
      : fd_(fd), is_unix_(is_unix), ahead_(ahead), descriptors_(std::move(descriptors)) {}

  // The next bytes, which stay unread. Waits for them. REQUIRES: count <= the buffer's size.
  std::span<const std::byte> peek(std::size_t count);

  // Reads exactly as many bytes as `memory` has. Both throw ConnectionEnded if the other end closes before, and
  // FrameError if more descriptors come than frames announce.
  void fill(std::span<std::byte> memory);

  // Writes all parts in order. Throws ConnectionEnded if the other end is gone.
  void write(std::span<const std::span<const std::byte>> parts);

  Descriptors& descriptors() { return descriptors_; }
  const ReadAhead& ahead() const { return ahead_; }

 private:
  std::size_t receive(std::span<std::byte> memory);
  void wait(short events) const;

  int fd_;
  bool is_unix_;
  ReadAhead ahead_;
  Descriptors descriptors_;
};

}  // namespace phalanx
