#include "shm_region.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace phalanx {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::size_t slots_at(int size) { return kPage + whole_pages(sizeof(Member) * static_cast<std::size_t>(size)); }
std::size_t channels_at(int size) { return slots_at(size) + static_cast<std::size_t>(size) * 2 * kSlotBytes; }

struct Process {
  char state = 'X';  // X: there is none
  std::uint64_t started = 0;
};

// The state letter and start time that /proc/PID/stat tells.
Process look_up(std::int64_t pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t n = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (n <= 0) return {};
  text[n] = 0;
  // The name in parentheses may hold anything, so fields are counted from the last parenthesis: state is field 3.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == 0) return {};
  Process found;
  found.state = at[2];
  int field = 2;
  for (++at; *at && field < 22; ++at) field += *at == ' ';
  found.started = std::strtoull(at, nullptr, 10);
  return found;
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* limit) {
  static_assert(sizeof word == 4);
  return ::syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

}  // namespace

std::size_t Region::bytes_for(int size) {
  return channels_at(size) + static_cast<std::size_t>(size) * static_cast<std::size_t>(size) * sizeof(Channel);
}

Region::Region(int fd, int rank, int size, const std::string& name)
    : rank_(rank), size_(size), bytes_(bytes_for(size)) {
  void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  base_ = static_cast<std::byte*>(base);
  head_ = reinterpret_cast<Head*>(base_);
  static_assert(sizeof(Head) <= kPage);
  members_ = reinterpret_cast<Member*>(base_ + kPage);
  slots_ = base_ + slots_at(size);
  channels_ = reinterpret_cast<Channel*>(base_ + channels_at(size));
  Member& own = me();
  own.pid = ::getpid();
  own.started = look_up(own.pid).started;
  std::strncpy(own.name, name.c_str(), sizeof own.name - 1);
}

Region::~Region() { ::munmap(base_, bytes_); }

void Region::ring(int rank) const {
  Member& member = members_[rank];
  // Either this sees the sleeper, or the sleeper, which counts itself in first, sees what was stored before.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (member.sleeping.load(std::memory_order_relaxed) == 0) return;
  member.bell.fetch_add(1, std::memory_order_release);
  futex(member.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void Region::ring_others() const {
  for (int r = 0; r < size_; ++r)
    if (r != rank_) ring(r);
}

void Region::sleep(std::uint32_t seen, int milliseconds) const {
  const timespec limit{milliseconds / 1000, milliseconds % 1000 * 1'000'000L};
  futex(me().bell, FUTEX_WAIT, seen, &limit);
}

std::string Region::loss_of(int rank) const {
  const Member& member = members_[rank];
  if (has_left(rank)) return "it left the group";
  const Process found = look_up(member.pid);
  if (found.state == 'X' || found.state == 'Z' || found.started != member.started) return "its process ended";
  return "";
}

void Region::fail(Failure kind, const std::string& text) const {
  std::uint32_t free = 0;
  if (!head_->claimed.compare_exchange_strong(free, 1)) return;
  std::strncpy(head_->text, text.c_str(), sizeof head_->text - 1);
  head_->failed.store(static_cast<std::uint32_t>(kind), std::memory_order_release);
  ring_others();
}

Failure Region::failure() const { return static_cast<Failure>(head_->failed.load(std::memory_order_acquire)); }

std::string Region::failure_text() const { return head_->text; }

}  // namespace phalanx
