// Memory that the ranks of one group on one host share, and what a rank needs to wait there: counters that others
// raise, a bell to sleep on, and who still lives.
//
// Nothing in it is ever locked: a rank that dies leaves counters that no longer rise, which the others notice.
// Ownership: Region owns the mapping; the file behind it is closed by the caller. Thread-safety: all methods const or
// atomic, but `failure` text, which one rank writes before it raises `failed`.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace phalanx {

// Another rank ended, left or did not come in time.
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Ranks called different things.
struct Disagreement : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kSlotBytes = std::size_t{1} << 20;
inline constexpr std::size_t kRingBytes = std::size_t{256} << 10;
inline constexpr std::size_t kLabelBytes = 192;

// What a rank says of the collective it is in; ranks compare these before they touch data.
struct CallSignature {
  std::uint32_t kind, type, reduce;
  std::int32_t root;
  std::uint64_t count, sequence;
  std::uint64_t parts;  // a digest of how long each rank's part is, where they may differ
  std::uint64_t label;  // a digest of what the call is for, 0 for none
  bool operator==(const CallSignature&) const = default;
};

// Counters wrap, so they are compared by their difference.
inline bool reached(const std::atomic<std::uint32_t>& counter, std::uint32_t target) {
  return static_cast<std::int32_t>(counter.load(std::memory_order_acquire) - target) >= 0;
}

struct Member {
  alignas(kLine) std::atomic<std::uint32_t> entered;  // rounds this rank has written its slot for
  alignas(kLine) std::atomic<std::uint32_t> left;     // rounds this rank has read the others' slots of
  alignas(kLine) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleeping;  // threads of this rank that wait for its bell
  struct alignas(kLine) Round {
    CallSignature signature;
    std::int64_t entered_at;  // nanoseconds of the clock that all processes of a host share
    std::uint32_t has_more;
    char label[kLabelBytes];  // what the call is for, in words; read only where ranks disagree
  } rounds[2];
  alignas(kLine) std::int64_t pid;
  std::uint64_t started;  // when the process started, so that another one of the same id is not taken for it
  std::atomic<std::uint32_t> has_left_group;
  std::atomic<std::uint32_t> main_waits;  // 1 while the main thread of this rank waits for the end of a collective
  char name[160];
};

// Bytes on the way from one rank to another, as a ring.
struct Channel {
  alignas(kLine) std::atomic<std::uint64_t> written;
  alignas(kLine) std::atomic<std::uint64_t> read;
  alignas(kLine) std::byte ring[kRingBytes];
};

enum class Failure : std::uint32_t { kNone, kLost, kDisagreement };

class Region {
 public:
  // Maps the file, which is as long as bytes_for(size) says and zero at first, and enters this rank.
  // Throws std::system_error if it cannot be mapped.
  Region(int fd, int rank, int size, const std::string& name);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  static std::size_t bytes_for(int size);

  int rank() const { return rank_; }
  int size() const { return size_; }
  Member& member(int rank) const { return members_[rank]; }
  Member& me() const { return members_[rank_]; }
  // Where a rank puts its part of a round.
  std::byte* slot(int rank, std::uint32_t round) const {
    return slots_ + (static_cast<std::size_t>(rank) * 2 + (round & 1)) * kSlotBytes;
  }
  Channel& channel(int from, int to) const { return channels_[from * size_ + to]; }

  // Wakes the threads of one rank, or of all others, that sleep. Call after what they wait for has been stored.
  void ring(int rank) const;
  void ring_others() const;
  // Sleeps until the bell has rung since it read `seen`, or the time is over.
  void sleep(std::uint32_t seen, int milliseconds) const;

  bool has_left(int rank) const { return members_[rank].has_left_group.load(std::memory_order_acquire) != 0; }
  // How a rank was lost, in words; empty while it lives and is in the group.
  std::string loss_of(int rank) const;
  // `rank 1 (host h, pid p)`
  std::string name_of(int rank) const { return members_[rank].name; }

  // The first failure of any rank stands for all of them.
  void fail(Failure kind, const std::string& text) const;
  Failure failure() const;
  std::string failure_text() const;

 private:
  struct Head {
    std::atomic<std::uint32_t> claimed, failed;
    char text[1000];
  };

  int rank_, size_;
  std::size_t bytes_;
  std::byte* base_;
  Head* head_;
  Member* members_;
  std::byte* slots_;
  Channel* channels_;
};

}  // namespace phalanx
