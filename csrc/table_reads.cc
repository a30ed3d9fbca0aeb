#include "table_reads.h"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "page_bytes.h"

namespace phalanx {
namespace {

constexpr std::size_t kPage = PageBytes::kPage;
constexpr std::size_t kMostDepth = 256;        // requests under way
constexpr std::size_t kLeastSlot = 2 * kPage;  // of places beside each other

std::uint64_t start_of(const FilePiece& piece) { return piece.place / kPage * kPage; }
std::uint64_t end_of(const FilePiece& piece) { return (piece.place + piece.size + kPage - 1) / kPage * kPage; }

void read_cached(FilePiece& piece) {
  std::size_t done = 0;
  while (done < piece.size) {
    const ssize_t got = pread(piece.file.cached, piece.to + done, piece.size - done, static_cast<off_t>(piece.place + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += static_cast<std::size_t>(got);
  }
  piece.is_whole = done == piece.size;
}

void read_through_cache(std::span<FilePiece> pieces) {
  if (pieces.size() > 1) {
    for (const FilePiece& piece : pieces) {
      posix_fadvise(piece.file.cached, static_cast<off_t>(piece.place), static_cast<off_t>(piece.size), POSIX_FADV_WILLNEED);
    }
  }
  for (FilePiece& piece : pieces) read_cached(piece);
}

}  // namespace

class ReadQueues::Queue {
 public:
  Queue(std::size_t piece_bytes, std::size_t most_bytes)
      : slot_bytes_(std::max(kLeastSlot, PageBytes::rounded(piece_bytes) + kPage)),
        slots_(std::clamp<std::size_t>(most_bytes / slot_bytes_, 1, kMostDepth)), memory_(slots_.size() * slot_bytes_) {
    for (std::size_t i = 0; i < slots_.size(); ++i) free_.push_back(i);
    to_submit_.reserve(slots_.size());
    events_.resize(slots_.size());
    // Last, as nothing gives it back if what follows throws.
    if (syscall(SYS_io_setup, slots_.size(), &context_) != 0) memory_ = PageBytes();
  }
  Queue(const Queue&) = delete;
  ~Queue() {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
  }

  std::size_t bytes() const { return memory_.size(); }

  void read(std::span<FilePiece> pieces) {
    if (pieces.empty()) return;
    if (memory_.size() == 0 || pieces[0].file.direct < 0) return read_through_cache(pieces);
    std::vector<FilePiece*> waiting;
    for (FilePiece& piece : pieces) {
      if (piece.file.direct < 0) read_cached(piece);
      else waiting.push_back(&piece);
    }
    std::sort(waiting.begin(), waiting.end(), [](const FilePiece* a, const FilePiece* b) {
      return a->file.direct != b->file.direct ? a->file.direct < b->file.direct : a->place < b->place;
    });
    for (std::span<FilePiece* const> rest = waiting; !rest.empty() || free_.size() < slots_.size();) {
      while (!rest.empty() && !free_.empty()) {
        const std::size_t count = neighbours(rest);
        prepare(rest.first(count));
        rest = rest.subspan(count);
      }
      submit();
      collect(rest.empty());
    }
  }

 private:
  struct Slot {
    iocb request{};
    std::span<FilePiece* const> pieces;
  };
  // How many of these pieces, the first ones, are asked for together: whose pages touch and fit in a slot.
  std::size_t neighbours(std::span<FilePiece* const> pieces) const {
    const std::uint64_t start = start_of(*pieces[0]);
    std::size_t count = 1;
    for (; count < pieces.size(); ++count) {
      const FilePiece &before = *pieces[count - 1], &piece = *pieces[count];
      if (piece.file.direct != before.file.direct || start_of(piece) > end_of(before)) break;
      if (end_of(piece) - start > slot_bytes_) break;
    }
    return count;
  }

  std::byte* memory_of(std::size_t slot) const { return memory_.data() + slot * slot_bytes_; }

  void prepare(std::span<FilePiece* const> pieces) {
    const std::size_t number = free_.back();
    free_.pop_back();
    Slot& slot = slots_[number];
    slot.pieces = pieces;
    iocb& request = slot.request;
    request = {};
    request.aio_data = number;
    request.aio_lio_opcode = IOCB_CMD_PREAD;
    request.aio_fildes = static_cast<std::uint32_t>(pieces.front()->file.direct);
    request.aio_buf = reinterpret_cast<std::uint64_t>(memory_of(number));
    request.aio_offset = static_cast<std::int64_t>(start_of(*pieces.front()));
    request.aio_nbytes = end_of(*pieces.back()) - start_of(*pieces.front());
    to_submit_.push_back(&request);
  }

  // What the system does not take is read through the cache.
  void submit() {
    std::span<iocb*> rest = to_submit_;
    while (!rest.empty()) {
      const long taken = syscall(SYS_io_submit, context_, rest.size(), rest.data());
      if (taken < 0 && errno == EINTR) continue;
      if (taken <= 0) break;
      rest = rest.subspan(static_cast<std::size_t>(taken));
    }
    for (const iocb* request : rest) finish(request->aio_data, -1);
    to_submit_.clear();
  }

  // Waits for what is under way; for half of it if more is to come.
  void collect(bool is_last) {
    const std::size_t under_way = slots_.size() - free_.size(), least = is_last ? under_way : (under_way + 1) / 2;
    if (under_way == 0) return;
    long got = -1;
    do {
      got = syscall(SYS_io_getevents, context_, least, under_way, events_.data(), nullptr);
    } while (got < 0 && errno == EINTR);
    for (long i = 0; i < got; ++i) finish(events_[static_cast<std::size_t>(i)].data, events_[static_cast<std::size_t>(i)].res);
  }

  // Hands out what came of a request; `bytes` is negative for an error.
  void finish(std::size_t number, std::int64_t bytes) {
    const std::uint64_t start = start_of(*slots_[number].pieces.front());
    for (FilePiece* const piece : slots_[number].pieces) {
      const std::uint64_t from = piece->place - start;
      if (bytes < 0 || from + piece->size > static_cast<std::uint64_t>(bytes)) {
        read_cached(*piece);
        continue;
      }
      std::memcpy(piece->to, memory_of(number) + from, piece->size);
      piece->is_whole = true;
    }
    free_.push_back(number);
  }

  const std::size_t slot_bytes_;
  std::vector<Slot> slots_;
  PageBytes memory_;
  aio_context_t context_ = 0;
  std::vector<std::size_t> free_;
  std::vector<iocb*> to_submit_;
  std::vector<io_event> events_;
};

ReadQueues::ReadQueues(std::size_t piece_bytes, std::size_t most_bytes)
    : piece_bytes_(piece_bytes), most_bytes_(most_bytes) {}

ReadQueues::~ReadQueues() = default;

void ReadQueues::read(std::span<FilePiece> pieces) {
  std::unique_ptr<Queue> queue = take();
  queue->read(pieces);
  const std::lock_guard locked(lock_);
  idle_.push_back(std::move(queue));
}

std::unique_ptr<ReadQueues::Queue> ReadQueues::take() {
  {
    const std::lock_guard locked(lock_);
    if (!idle_.empty()) {
      std::unique_ptr<Queue> queue = std::move(idle_.back());
      idle_.pop_back();
      return queue;
    }
  }
  auto queue = std::make_unique<Queue>(piece_bytes_, most_bytes_);
  bytes_ += queue->bytes();
  return queue;
}

}  // namespace phalanx
