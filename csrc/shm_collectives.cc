// The collectives of Group, round by round.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "shm_group.h"

namespace phalanx {
namespace {

// Up to this many bytes in all slots every rank adds everything up itself: one round instead of two.
constexpr std::size_t kAtOnceBytes = 64 << 10;

// In front of a slot of an all_to_all, a cache line for each receiver.
struct PieceNote {
  std::size_t whole;      // bytes that this rank gets in all
  std::size_t at, bytes;  // its piece of this round, in the slot
};
static_assert(sizeof(PieceNote) <= kLine);

void move_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

// What of `whole` lies in the piece that begins at `begin`.
std::size_t part(std::size_t whole, std::size_t begin, std::size_t piece) {
  return whole <= begin ? 0 : std::min(whole - begin, piece);
}

// Cuts `count` elements into one run per rank, each but the last of whole cache lines.
struct Cut {
  std::size_t count, run;
  Cut(std::size_t count, int ranks, std::size_t width) : count(count) {
    const std::size_t line = kLine / width;
    const std::size_t even = (count + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks);
    run = (even + line - 1) / line * line;
  }
  std::size_t begin(int rank) const { return std::min(count, run * static_cast<std::size_t>(rank)); }
  std::size_t size(int rank) const { return begin(rank + 1) - begin(rank); }
};

std::size_t slot_share(int ranks) { return kSlotBytes / static_cast<std::size_t>(ranks) / kLine * kLine; }

// Cuts what a rank sends to the others into as few rounds as fit its slot, each with the same share of every part: no
// rank waits for the end of another's long part.
class Pieces {
 public:
  Pieces(const Group::Sizes& bytes, std::size_t own) : bytes_(bytes) {
    const std::size_t notes = bytes.size() * kLine, padding = 2 * notes;  // pieces begin and end at lines
    const std::size_t room = kSlotBytes - notes - padding;
    const std::size_t others = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}) - bytes[own];
    rounds_ = std::max<std::size_t>(1, (others + room - 1) / room);
  }
  std::size_t rounds() const { return rounds_; }
  // Where the piece of a round begins in the part of a rank; from the last round on, its end.
  std::size_t begin(std::size_t rank, std::size_t round) const {
    return round >= rounds_ ? bytes_[rank] : bytes_[rank] * round / rounds_ / kLine * kLine;
  }

 private:
  const Group::Sizes& bytes_;
  std::size_t rounds_;
};

Group::Sizes scaled(Group::Sizes counts, std::size_t width) {
  for (std::size_t& count : counts) count *= width;
  return counts;
}

}  // namespace

// Numbers the call and queues it under one hold of the lock, so that calls of several threads stay apart.
template <class Make>
Group::Op Group::call(CallSignature signature, Make task_of) {
  require_own_process();
  auto op = std::make_shared<Operation>();
  op->kind = static_cast<Kind>(signature.kind);
  op->label = label_of_calls();
  op->begun = Clock::now();
  const std::lock_guard guard(lock_);
  op->number = signature.sequence = ++calls_made_;
  op->signature = signature;
  op->deadline = deadline();
  if (!broken_ && region_.failure() != Failure::kNone) check_liveness(Clock::now());  // another rank's
  if (broken_) {
    finish(op, broken_);
    return op;
  }
  op->task = task_of(signature);
  calls_.push_back(op);
  advance();
  return op;
}

Group::Op Group::all_reduce(std::byte* data, std::size_t count, Type type, Reduce how) {
  const bool is_small = count * width_of(type) * static_cast<std::size_t>(region_.size()) <= kAtOnceBytes;
  return call(signature_of(Kind::kAllReduce, type, count, how), [&](const CallSignature& signature) {
    return is_small ? reduce_at_once_task(data, count, type, how, signature) : all_reduce_task(data, count, type, how, signature);
  });
}

Group::Op Group::reduce_to(std::byte* data, std::size_t count, Type type, Reduce how, int root) {
  return call(signature_of(Kind::kReduce, type, count, how, root),
              [&](const CallSignature& signature) { return reduce_to_task(data, count, type, how, signature); });
}

Group::Op Group::reduce_scatter(Buffers in, std::byte* out, Sizes counts, Type type, Reduce how) {
  return call(signature_of(Kind::kReduceScatter, type, counts, how), [&](const CallSignature& signature) {
    return reduce_scatter_task(std::move(in), out, std::move(counts), type, how, signature);
  });
}

Group::Op Group::all_gather(std::byte* in, Buffers out, Sizes counts, Type type) {
  return call(signature_of(Kind::kAllGather, type, counts), [&](const CallSignature& signature) {
    return all_gather_task(in, std::move(out), scaled(std::move(counts), width_of(type)), signature);
  });
}

Group::Op Group::gather(std::byte* in, Buffers out, std::size_t count, Type type, int root) {
  return call(signature_of(Kind::kGather, type, count, Reduce::kSum, root),
              [&](const CallSignature& signature) { return gather_task(in, std::move(out), count * width_of(type), signature); });
}

Group::Op Group::scatter(Buffers in, std::byte* out, std::size_t count, Type type, int root) {
  return call(signature_of(Kind::kScatter, type, count, Reduce::kSum, root),
              [&](const CallSignature& signature) { return scatter_task(std::move(in), out, count * width_of(type), signature); });
}

Group::Op Group::broadcast(std::byte* data, std::size_t count, Type type, int root) {
  return call(signature_of(Kind::kBroadcast, type, count, Reduce::kSum, root),
              [&](const CallSignature& signature) { return broadcast_task(data, count * width_of(type), signature); });
}

Group::Op Group::all_to_all(Buffers in, Sizes in_counts, Buffers out, Sizes out_counts, Type type) {
  const std::size_t width = width_of(type);
  return call(signature_of(Kind::kAllToAll, type, 0), [&](const CallSignature& signature) {
    return all_to_all_task(std::move(in), scaled(std::move(in_counts), width), std::move(out),
                            scaled(std::move(out_counts), width), signature);
  });
}

Group::Op Group::barrier() {
  return call(signature_of(Kind::kBarrier, Type::kUint8, 0), [&](const CallSignature& signature) { return barrier_task(signature); });
}

CollectiveTask Group::barrier_task(CallSignature signature) {
  co_await writable();
  enter(signature);
  co_await everyone_entered();
  compare(signature);
  leave_round();
}

CollectiveTask Group::reduce_at_once_task(std::byte* data, std::size_t count, Type type, Reduce how, CallSignature signature) {
  co_await writable();
  move_bytes(slot(region_.rank()), data, count * width_of(type));
  enter(signature);
  co_await everyone_entered();
  compare(signature);
  std::vector<const std::byte*> parts;
  for (int r = 0; r < region_.size(); ++r) parts.push_back(slot(r));
  reduce(type, how, data, parts, count);
  leave_round();
}

// Two rounds a chunk: every rank adds up one run of the chunk, then hands out the result.
CollectiveTask Group::all_reduce_task(std::byte* data, std::size_t count, Type type, Reduce how, CallSignature signature) {
  const std::size_t width = width_of(type), chunk = kSlotBytes / width;
  const int rank = region_.rank(), size = region_.size();
  std::vector<const std::byte*> parts(static_cast<std::size_t>(size));
  for (std::size_t begin = 0; begin < count; begin += chunk) {
    const Cut cut(std::min(chunk, count - begin), size, width);
    std::byte* const chunk_data = data + begin * width;
    std::byte* const mine = chunk_data + cut.begin(rank) * width;

    co_await writable();
    for (int r = 0; r < size; ++r) {
      const std::size_t at = cut.begin(r) * width;
      if (r != rank) move_bytes(slot(rank) + at, chunk_data + at, cut.size(r) * width);
    }
    enter(signature);
    co_await everyone_entered();
    if (begin == 0) compare(signature);
    for (int r = 0; r < size; ++r)
      parts[static_cast<std::size_t>(r)] = r == rank ? mine : slot(r) + cut.begin(rank) * width;
    reduce(type, how, mine, parts, cut.size(rank));
    leave_round();

    co_await writable();
    move_bytes(slot(rank), mine, cut.size(rank) * width);
    enter(signature);
    co_await everyone_entered();
    for (int r = 0; r < size; ++r)
      if (r != rank) move_bytes(chunk_data + cut.begin(r) * width, slot(r), cut.size(r) * width);
    leave_round();
  }
}

CollectiveTask Group::reduce_to_task(std::byte* data, std::size_t count, Type type, Reduce how, CallSignature signature) {
  const std::size_t width = width_of(type), chunk = kSlotBytes / width;
  const int rank = region_.rank();
  std::size_t begin = 0;
  do {
    const std::size_t n = part(count, begin, chunk);
    std::byte* const chunk_data = data + begin * width;
    co_await writable();
    if (rank != signature.root) move_bytes(slot(rank), chunk_data, n * width);
    enter(signature);
    co_await everyone_entered();
    if (begin == 0) compare(signature);
    if (rank == signature.root) {
      std::vector<const std::byte*> parts;
      for (int r = 0; r < region_.size(); ++r) parts.push_back(r == rank ? chunk_data : slot(r));
      reduce(type, how, chunk_data, parts, n);
    }
    leave_round();
    begin += chunk;
  } while (begin < count);
}

CollectiveTask Group::reduce_scatter_task(Buffers in, std::byte* out, Sizes counts, Type type, Reduce how, CallSignature signature) {
  const int rank = region_.rank(), size = region_.size();
  const std::size_t width = width_of(type), share = slot_share(size), chunk = share / width;
  const std::size_t longest = *std::max_element(counts.begin(), counts.end());
  std::vector<const std::byte*> parts(in.size());
  std::size_t begin = 0;
  do {
    co_await writable();
    for (std::size_t r = 0; r < in.size(); ++r) {
      const std::size_t n = part(counts[r], begin, chunk);
      if (static_cast<int>(r) != rank) move_bytes(slot(rank) + r * share, in[r] + begin * width, n * width);
    }
    enter(signature);
    co_await everyone_entered();
    if (begin == 0) compare(signature);
    const std::size_t own = static_cast<std::size_t>(rank);
    for (std::size_t r = 0; r < in.size(); ++r)
      parts[r] = r == own ? in[r] + begin * width : slot(static_cast<int>(r)) + own * share;
    const std::size_t n = part(counts[own], begin, chunk);
    if (n > 0) reduce(type, how, out + begin * width, parts, n);
    leave_round();
    begin += chunk;
  } while (begin < longest);
}

CollectiveTask Group::all_gather_task(std::byte* in, Buffers out, Sizes bytes, CallSignature signature) {
  const auto own = static_cast<std::size_t>(region_.rank());
  const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
  std::size_t begin = 0;
  do {
    co_await writable();
    move_bytes(slot(region_.rank()), in + begin, part(bytes[own], begin, kSlotBytes));
    enter(signature);
    co_await everyone_entered();
    if (begin == 0) compare(signature);
    for (std::size_t r = 0; r < out.size(); ++r) {
      const std::byte* const from = r == own ? in + begin : slot(static_cast<int>(r));
      move_bytes(out[r] + begin, from, part(bytes[r], begin, kSlotBytes));
    }
    leave_round();
    begin += kSlotBytes;
  } while (begin < longest);
}

CollectiveTask Group::gather_task(std::byte* in, Buffers out, std::size_t bytes, CallSignature signature) {
  const int rank = region_.rank();
  std::size_t begin = 0;
  do {
    const std::size_t n = part(bytes, begin, kSlotBytes);
    co_await writable();
    if (rank != signature.root) move_bytes(slot(rank), in + begin, n);
    enter(signature);
    co_await everyone_entered();
    if (begin == 0) compare(signature);
    for (int r = 0; rank == signature.root && r < region_.size(); ++r)
      move_bytes(out[static_cast<std::size_t>(r)] + begin, r == rank ? in + begin : slot(r), n);
    leave_round();
    begin += kSlotBytes;
  } while (begin < bytes);
}

CollectiveTask Group::scatter_task(Buffers in, std::byte* out, std::size_t bytes, CallSignature signature) {
  const int rank = region_.rank();
  const std::size_t share = slot_share(region_.size());
  std::size_t begin = 0;
  do {
    const std::size_t n = part(bytes, begin, share);
    co_await writable();
    for (int r = 0; rank == signature.root && r < region_.size(); ++r) {
      const auto to = static_cast<std::size_t>(r);
      move_bytes(r == rank ? out + begin : slot(rank) + to * share, in[to] + begin, n);
    }
    enter(signature);
    co_await everyone_entered();
    if (begin == 0) compare(signature);
    if (rank != signature.root) move_bytes(out + begin, slot(signature.root) + static_cast<std::size_t>(rank) * share, n);
    leave_round();
    begin += share;
  } while (begin < bytes);
}

CollectiveTask Group::broadcast_task(std::byte* data, std::size_t bytes, CallSignature signature) {
  const int rank = region_.rank();
  std::size_t begin = 0;
  do {
    const std::size_t n = part(bytes, begin, kSlotBytes);
    co_await writable();
    if (rank == signature.root) move_bytes(slot(rank), data + begin, n);
    enter(signature);
    co_await everyone_entered();
    if (begin == 0) compare(signature);
    if (rank != signature.root) move_bytes(data + begin, slot(signature.root), n);
    leave_round();
    begin += kSlotBytes;
  } while (begin < bytes);
}

// Ranks do not know each other's sizes, so a round continues as long as anybody has more to send.
CollectiveTask Group::all_to_all_task(Buffers in, Sizes in_bytes, Buffers out, Sizes out_bytes, CallSignature signature) {
  const int rank = region_.rank();
  const auto own = static_cast<std::size_t>(rank);
  const Pieces pieces(in_bytes, own);
  Sizes arrived(out.size());
  bool has_more = true;
  for (std::size_t round = 0; has_more; ++round) {
    co_await writable();
    std::size_t end = in.size() * kLine;
    for (std::size_t r = 0; r < in.size(); ++r) {
      const std::size_t begin = pieces.begin(r, round);
      const PieceNote note = {in_bytes[r], end, pieces.begin(r, round + 1) - begin};
      std::memcpy(slot(rank) + r * kLine, &note, sizeof note);
      if (r == own) continue;
      move_bytes(slot(rank) + end, in[r] + begin, note.bytes);
      end += (note.bytes + kLine - 1) / kLine * kLine;
    }
    enter(signature, pieces.rounds() > round + 1);
    co_await everyone_entered();
    if (round == 0) compare(signature);
    has_more = false;
    for (std::size_t r = 0; r < out.size(); ++r) {
      const int from = static_cast<int>(r);
      PieceNote note;
      std::memcpy(&note, slot(from) + own * kLine, sizeof note);
      if (note.whole != out_bytes[r])
        throw Disagreement("In call " + std::to_string(signature.sequence) + " of the group, all_to_all, " +
                           region_.name_of(from) + " sends " + std::to_string(note.whole) + " bytes to " +
                           region_.name_of(rank) + ", which expects " + std::to_string(out_bytes[r]) +
                           ". Make the split sizes of both fit.");
      move_bytes(out[r] + arrived[r], r == own ? in[r] + arrived[r] : slot(from) + note.at, note.bytes);
      arrived[r] += note.bytes;
      has_more |= region_.member(from).rounds[round_ & 1].has_more != 0;
    }
    leave_round();
  }
}

}  // namespace phalanx
