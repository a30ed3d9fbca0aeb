// Collectives and messages over shared memory, each rank a thread. Ranks are processes otherwise, each with the memory
// at an address of its own; here all see it at one address, so that ThreadSanitizer can tell what meets there.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <string>

#include "../../csrc/shm_group.h"
#include "check.h"

namespace {

std::mutex mapped_lock;
std::map<int, std::pair<void*, std::size_t>> mapped;  // by descriptor

}  // namespace

extern "C" {
void* __real_mmap(void* at, std::size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* at, std::size_t bytes);

// Gives the same memory for the same file; linked with --wrap=mmap.
void* __wrap_mmap(void* at, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fd < 0) return __real_mmap(at, bytes, protection, flags, fd, offset);
  const std::lock_guard guard(mapped_lock);
  const auto known = mapped.find(fd);
  if (known != mapped.end()) return known->second.first;
  void* base = __real_mmap(at, bytes, protection, flags, fd, offset);
  mapped[fd] = {base, bytes};
  return base;
}

int __wrap_munmap(void* at, std::size_t bytes) {
  const std::lock_guard guard(mapped_lock);
  for (const auto& [fd, memory] : mapped)
    if (memory.first == at) return 0;  // other ranks still use it
  return __real_munmap(at, bytes);
}
}

namespace {

using phalanx::Group;
using phalanx::Reduce;
using phalanx::Type;

std::byte* bytes_of(std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); }

// The groups of all ranks over one file.
class Ranks {
 public:
  explicit Ranks(int size, double timeout_s = 30) : size_(size), fd_(::memfd_create("group", MFD_CLOEXEC)) {
    CHECK(fd_ >= 0);
    CHECK(::ftruncate(fd_, static_cast<off_t>(phalanx::Region::bytes_for(size))) == 0);
    for (int rank = 0; rank < size; ++rank)
      groups_.push_back(std::make_unique<Group>(fd_, rank, size, "rank " + std::to_string(rank), timeout_s));
  }
  ~Ranks() {
    groups_.clear();
    void* base = mapped[fd_].first;
    mapped.erase(fd_);
    ::munmap(base, phalanx::Region::bytes_for(size_));
    ::close(fd_);
  }
  Group& operator[](int rank) { return *groups_[static_cast<std::size_t>(rank)]; }

 private:
  int size_, fd_;
  std::vector<std::unique_ptr<Group>> groups_;
};

// Every collective on `count` elements; counts around and beyond one slot take one round or several.
void call_all(Group& group, int rank, int size, std::size_t count) {
  const auto n = static_cast<std::size_t>(size);
  const float sum = static_cast<float>(size * (size + 1) / 2);
  std::vector<float> mine(count, static_cast<float>(rank + 1)), all(count * n);
  const Group::Sizes counts(n, count);
  const auto parts = [&] {
    Group::Buffers buffers;
    for (std::size_t r = 0; r < n; ++r) buffers.push_back(bytes_of(all) + r * count * sizeof(float));
    return buffers;
  };
  group.wait(group.all_gather(bytes_of(mine), parts(), counts, Type::kFloat32), 0);
  for (std::size_t i = 0; i < all.size(); ++i) CHECK(all[i] == static_cast<float>(i / count + 1));
  group.wait(group.reduce_scatter(parts(), bytes_of(mine), counts, Type::kFloat32, Reduce::kSum), 0);
  for (const float value : mine) CHECK(value == static_cast<float>(size * (rank + 1)));
  std::fill(mine.begin(), mine.end(), static_cast<float>(rank + 1));
  group.wait(group.all_reduce(bytes_of(mine), count, Type::kFloat32, Reduce::kSum), 0);
  for (const float value : mine) CHECK(value == sum);
  group.wait(group.reduce_to(bytes_of(mine), count, Type::kFloat32, Reduce::kMax, 0), 0);
  group.wait(group.broadcast(bytes_of(mine), count, Type::kFloat32, size - 1), 0);
  for (const float value : mine) CHECK(value == sum);
  std::vector<float> out(count * n);
  Group::Buffers to;
  for (std::size_t r = 0; r < n; ++r) to.push_back(bytes_of(out) + r * count * sizeof(float));
  group.wait(group.all_to_all(parts(), counts, to, counts, Type::kFloat32), 0);
  group.wait(group.gather(bytes_of(mine), rank == 0 ? to : Group::Buffers{}, count, Type::kFloat32, 0), 0);
  group.wait(group.scatter(rank == 0 ? to : Group::Buffers{}, bytes_of(mine), count, Type::kFloat32, 0), 0);
  for (const float value : mine) CHECK(value == sum);
  group.wait(group.barrier(), 0);
}

void test_all_collectives() {
  for (const int size : {1, 2, 3}) {
    Ranks ranks(size);
    in_threads(size, [&](int rank) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, phalanx::kSlotBytes / 4 + 3})
        call_all(ranks[rank], rank, size, count);
    });
  }
}

// Parts of other lengths for each pair, some of no bytes.
void test_exchange_of_uneven_parts() {
  constexpr std::size_t kSize = 3, kLong = 9 * phalanx::kSlotBytes / 4 + 5;
  const std::size_t counts[kSize][kSize] = {{kLong, 3, 0}, {kLong, 0, 1}, {7, kLong, 100'000}};
  Ranks ranks(kSize);
  in_threads(kSize, [&](int rank) {
    const auto me = static_cast<std::size_t>(rank);
    std::vector<std::vector<float>> in, out;
    Group::Buffers from, to;
    Group::Sizes in_counts, out_counts;
    for (std::size_t r = 0; r < kSize; ++r) {
      in_counts.push_back(counts[me][r]), out_counts.push_back(counts[r][me]);
      in.emplace_back(counts[me][r]), out.emplace_back(counts[r][me]);
      for (std::size_t i = 0; i < in[r].size(); ++i) in[r][i] = static_cast<float>(i % 1000 + kSize * me + r);
      from.push_back(bytes_of(in[r])), to.push_back(bytes_of(out[r]));
    }
    ranks[rank].wait(ranks[rank].all_to_all(from, in_counts, to, out_counts, Type::kFloat32), 0);
    for (std::size_t r = 0; r < kSize; ++r)
      for (std::size_t i = 0; i < out[r].size(); ++i) CHECK(out[r][i] == static_cast<float>(i % 1000 + kSize * r + me));
  });
}

// Two threads of each rank: one calls and waits, one moves on what was called, as the background thread of a rank does.
void test_progress_in_the_background() {
  constexpr int kSize = 2, kCalls = 60;
  Ranks ranks(kSize);
  std::vector<std::vector<Group::Op>> calls(kSize);
  std::vector<std::vector<float>> values(kSize, std::vector<float>(kCalls * 64, 1));
  std::vector<std::atomic<int>> made(kSize);
  for (auto& of_rank : calls) of_rank.resize(kCalls);
  in_threads(2 * kSize, [&](int thread) {
    const int rank = thread / 2;
    const auto r = static_cast<std::size_t>(rank);
    Group& group = ranks[rank];
    for (int call = 0; call < kCalls; ++call) {
      const auto c = static_cast<std::size_t>(call);
      if (thread % 2 == 0) {
        Group::label_calls(call % 2 ? "gradients" : "");
        std::byte* at = bytes_of(values[r]) + c * 64 * sizeof(float);
        calls[r][c] = group.all_reduce(at, 64, Type::kFloat32, Reduce::kMean);
        made[r].store(call + 1, std::memory_order_release);
        if (call % 7 == 0) group.wait(calls[r][c], 0);
      } else {
        while (made[r].load(std::memory_order_acquire) <= call) std::this_thread::yield();
        group.waited_for();
        group.missing_from(calls[r][c]);
        group.progress(calls[r][c]);
        CHECK(calls[r][c]->is_done.load());
      }
    }
  });
  for (const auto& of_rank : values)
    for (const float value : of_rank) CHECK(value == 1);
}

// Messages of every length, in and out of order, to a rank and from any.
void test_messages() {
  Ranks ranks(2);
  in_threads(2, [&](int rank) {
    Group& group = ranks[rank];
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{64}, phalanx::kRingBytes * 2 + 5}) {
      std::vector<std::byte> one(bytes, std::byte{1}), two(bytes, std::byte{2});
      if (rank == 0) {
        const Group::Op first = group.send(one.data(), bytes, 1, 5), second = group.send(two.data(), bytes, 1, 6);
        group.wait(first, 0);
        group.wait(second, 0);
      } else {
        std::vector<std::byte> other(bytes), any(bytes);
        const Group::Op later = group.receive(other.data(), bytes, 0, 6);
        const Group::Op first = group.receive(any.data(), bytes, phalanx::kAnyRank, 5);
        group.wait(first, 0);
        group.wait(later, 0);
        CHECK(any == one && other == two && first->peer == 0);
      }
    }
  });
}

template <class Error>
bool fails(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void test_failures() {
  {  // Ranks that call different things both hear of it, and so does who calls later.
    Ranks ranks(2);
    in_threads(2, [&](int rank) {
      std::vector<float> values(static_cast<std::size_t>(8 + rank), 1);
      Group& group = ranks[rank];
      const auto reduce = [&] {
        group.wait(group.all_reduce(bytes_of(values), values.size(), Type::kFloat32, Reduce::kSum), 0);
      };
      CHECK(fails<phalanx::Disagreement>(reduce));
      CHECK(fails<phalanx::Disagreement>(reduce));
    });
  }
  {  // A rank that leaves, and one that does not come in time.
    Ranks ranks(3, 0.3);
    in_threads(3, [&](int rank) {
      if (rank == 0) return ranks[0].close();
      if (rank == 1) return;
      CHECK(fails<phalanx::PeerLost>([&] { ranks[2].wait(ranks[2].barrier(), 0); }));
    });
  }
  {  // Another rank ends the group while one waits.
    Ranks ranks(2);
    in_threads(2, [&](int rank) {
      if (rank == 0) {
        const Group::Op call = ranks[0].barrier();
        CHECK(fails<phalanx::Disagreement>([&] {
          while (!ranks[0].ends_within(call, 0.1)) continue;
        }));
      } else {
        ::usleep(20'000);
        ranks[1].disagree("somebody says so");
      }
    });
  }
}

}  // namespace

void test_collectives() {
  test_all_collectives();
  test_exchange_of_uneven_parts();
  test_progress_in_the_background();
  test_messages();
  test_failures();
}
