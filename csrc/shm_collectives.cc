// The collectives of Group, round by round.

#include <algorithm>
#include <cstring>

#include "shm_group.h"

namespace phalanx {
namespace {

// Up to this many bytes in all slots every rank adds everything up itself: one round instead of two.
constexpr std::size_t kAtOnceBytes = 64 << 10;

constexpr std::size_t kNoteBytes = kLine;  // in front of every part of an all_to_all: how long it is in all

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

Group::Sizes scaled(Group::Sizes counts, std::size_t width) {
  for (std::size_t& count : counts) count *= width;
  return counts;
}

}  // namespace

// Numbers the call and queues it under one hold of the lock, so that calls of several threads stay apart.
template <class Make>
Group::Op Group::call(Said said, Make steps_of) {
  require_own_process();
  auto op = std::make_shared<Operation>();
  op->kind = static_cast<Kind>(said.kind);
  op->label = label_of_calls();
  const std::lock_guard held(lock_);
  op->number = said.sequence = ++calls_made_;
  op->deadline = deadline();
  if (!broken_ && region_.failure() != Failure::kNone) look_for_trouble(Clock::now());  // another rank's
  if (broken_) {
    finish(op, broken_);
    return op;
  }
  op->steps = steps_of(said);
  calls_.push_back(op);
  advance();
  return op;
}

Group::Op Group::all_reduce(std::byte* data, std::size_t count, Type type, Reduce how) {
  const bool is_small = count * width_of(type) * static_cast<std::size_t>(region_.size()) <= kAtOnceBytes;
  return call(said(Kind::kAllReduce, type, count, how), [&](const Said& said) {
    return is_small ? reduce_at_once_steps(data, count, type, how, said) : all_reduce_steps(data, count, type, how, said);
  });
}

Group::Op Group::reduce_to(std::byte* data, std::size_t count, Type type, Reduce how, int root) {
  return call(said(Kind::kReduce, type, count, how, root),
              [&](const Said& said) { return reduce_to_steps(data, count, type, how, said); });
}

Group::Op Group::reduce_scatter(Buffers in, std::byte* out, Sizes counts, Type type, Reduce how) {
  return call(said(Kind::kReduceScatter, type, counts, how), [&](const Said& said) {
    return reduce_scatter_steps(std::move(in), out, std::move(counts), type, how, said);
  });
}

Group::Op Group::all_gather(std::byte* in, Buffers out, Sizes counts, Type type) {
  return call(said(Kind::kAllGather, type, counts), [&](const Said& said) {
    return all_gather_steps(in, std::move(out), scaled(std::move(counts), width_of(type)), said);
  });
}

Group::Op Group::gather(std::byte* in, Buffers out, std::size_t count, Type type, int root) {
  return call(said(Kind::kGather, type, count, Reduce::kSum, root),
              [&](const Said& said) { return gather_steps(in, std::move(out), count * width_of(type), said); });
}

Group::Op Group::scatter(Buffers in, std::byte* out, std::size_t count, Type type, int root) {
  return call(said(Kind::kScatter, type, count, Reduce::kSum, root),
              [&](const Said& said) { return scatter_steps(std::move(in), out, count * width_of(type), said); });
}

Group::Op Group::broadcast(std::byte* data, std::size_t count, Type type, int root) {
  return call(said(Kind::kBroadcast, type, count, Reduce::kSum, root),
              [&](const Said& said) { return broadcast_steps(data, count * width_of(type), said); });
}

Group::Op Group::all_to_all(Buffers in, Sizes in_counts, Buffers out, Sizes out_counts, Type type) {
  const std::size_t width = width_of(type);
  return call(said(Kind::kAllToAll, type, 0), [&](const Said& said) {
    return all_to_all_steps(std::move(in), scaled(std::move(in_counts), width), std::move(out),
                            scaled(std::move(out_counts), width), said);
  });
}

Group::Op Group::barrier() {
  return call(said(Kind::kBarrier, Type::kUint8, 0), [&](const Said& said) { return barrier_steps(said); });
}

Steps Group::barrier_steps(Said said) {
  co_await writable();
  enter(said);
  co_await everyone_entered();
  compare(said);
  leave_round();
}

Steps Group::reduce_at_once_steps(std::byte* data, std::size_t count, Type type, Reduce how, Said said) {
  co_await writable();
  move_bytes(slot(region_.rank()), data, count * width_of(type));
  enter(said);
  co_await everyone_entered();
  compare(said);
  std::vector<const std::byte*> parts;
  for (int r = 0; r < region_.size(); ++r) parts.push_back(slot(r));
  reduce(type, how, data, parts, count);
  leave_round();
}

// Two rounds a chunk: every rank adds up one run of the chunk, then hands out the result.
Steps Group::all_reduce_steps(std::byte* data, std::size_t count, Type type, Reduce how, Said said) {
  const std::size_t width = width_of(type), chunk = kSlotBytes / width;
  const int rank = region_.rank(), size = region_.size();
  std::vector<const std::byte*> parts(static_cast<std::size_t>(size));
  for (std::size_t begin = 0; begin < count; begin += chunk) {
    const Cut cut(std::min(chunk, count - begin), size, width);
    std::byte* const here = data + begin * width;
    std::byte* const mine = here + cut.begin(rank) * width;

    co_await writable();
    for (int r = 0; r < size; ++r) {
      const std::size_t at = cut.begin(r) * width;
      if (r != rank) move_bytes(slot(rank) + at, here + at, cut.size(r) * width);
    }
    enter(said);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    for (int r = 0; r < size; ++r)
      parts[static_cast<std::size_t>(r)] = r == rank ? mine : slot(r) + cut.begin(rank) * width;
    reduce(type, how, mine, parts, cut.size(rank));
    leave_round();

    co_await writable();
    move_bytes(slot(rank), mine, cut.size(rank) * width);
    enter(said);
    co_await everyone_entered();
    for (int r = 0; r < size; ++r)
      if (r != rank) move_bytes(here + cut.begin(r) * width, slot(r), cut.size(r) * width);
    leave_round();
  }
}

Steps Group::reduce_to_steps(std::byte* data, std::size_t count, Type type, Reduce how, Said said) {
  const std::size_t width = width_of(type), chunk = kSlotBytes / width;
  const int rank = region_.rank();
  std::size_t begin = 0;
  do {
    const std::size_t n = part(count, begin, chunk);
    std::byte* const here = data + begin * width;
    co_await writable();
    if (rank != said.root) move_bytes(slot(rank), here, n * width);
    enter(said);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    if (rank == said.root) {
      std::vector<const std::byte*> parts;
      for (int r = 0; r < region_.size(); ++r) parts.push_back(r == rank ? here : slot(r));
      reduce(type, how, here, parts, n);
    }
    leave_round();
    begin += chunk;
  } while (begin < count);
}

Steps Group::reduce_scatter_steps(Buffers in, std::byte* out, Sizes counts, Type type, Reduce how, Said said) {
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
    enter(said);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    const std::size_t own = static_cast<std::size_t>(rank);
    for (std::size_t r = 0; r < in.size(); ++r)
      parts[r] = r == own ? in[r] + begin * width : slot(static_cast<int>(r)) + own * share;
    const std::size_t n = part(counts[own], begin, chunk);
    if (n > 0) reduce(type, how, out + begin * width, parts, n);
    leave_round();
    begin += chunk;
  } while (begin < longest);
}

Steps Group::all_gather_steps(std::byte* in, Buffers out, Sizes bytes, Said said) {
  const auto own = static_cast<std::size_t>(region_.rank());
  const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
  std::size_t begin = 0;
  do {
    co_await writable();
    move_bytes(slot(region_.rank()), in + begin, part(bytes[own], begin, kSlotBytes));
    enter(said);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    for (std::size_t r = 0; r < out.size(); ++r) {
      const std::byte* const from = r == own ? in + begin : slot(static_cast<int>(r));
      move_bytes(out[r] + begin, from, part(bytes[r], begin, kSlotBytes));
    }
    leave_round();
    begin += kSlotBytes;
  } while (begin < longest);
}

Steps Group::gather_steps(std::byte* in, Buffers out, std::size_t bytes, Said said) {
  const int rank = region_.rank();
  std::size_t begin = 0;
  do {
    const std::size_t n = part(bytes, begin, kSlotBytes);
    co_await writable();
    if (rank != said.root) move_bytes(slot(rank), in + begin, n);
    enter(said);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    for (int r = 0; rank == said.root && r < region_.size(); ++r)
      move_bytes(out[static_cast<std::size_t>(r)] + begin, r == rank ? in + begin : slot(r), n);
    leave_round();
    begin += kSlotBytes;
  } while (begin < bytes);
}

Steps Group::scatter_steps(Buffers in, std::byte* out, std::size_t bytes, Said said) {
  const int rank = region_.rank();
  const std::size_t share = slot_share(region_.size());
  std::size_t begin = 0;
  do {
    const std::size_t n = part(bytes, begin, share);
    co_await writable();
    for (int r = 0; rank == said.root && r < region_.size(); ++r) {
      const auto to = static_cast<std::size_t>(r);
      move_bytes(r == rank ? out + begin : slot(rank) + to * share, in[to] + begin, n);
    }
    enter(said);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    if (rank != said.root) move_bytes(out + begin, slot(said.root) + static_cast<std::size_t>(rank) * share, n);
    leave_round();
    begin += share;
  } while (begin < bytes);
}

Steps Group::broadcast_steps(std::byte* data, std::size_t bytes, Said said) {
  const int rank = region_.rank();
  std::size_t begin = 0;
  do {
    const std::size_t n = part(bytes, begin, kSlotBytes);
    co_await writable();
    if (rank == said.root) move_bytes(slot(rank), data + begin, n);
    enter(said);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    if (rank != said.root) move_bytes(data + begin, slot(said.root), n);
    leave_round();
    begin += kSlotBytes;
  } while (begin < bytes);
}

// Ranks do not know each other's sizes, so a round goes on as long as anybody has more to send.
Steps Group::all_to_all_steps(Buffers in, Sizes in_bytes, Buffers out, Sizes out_bytes, Said said) {
  const int rank = region_.rank(), size = region_.size();
  const auto own = static_cast<std::size_t>(rank);
  const std::size_t share = slot_share(size), piece = share - kNoteBytes;
  const std::size_t longest = *std::max_element(in_bytes.begin(), in_bytes.end());
  bool has_more = true;
  for (std::size_t begin = 0; has_more; begin += piece) {
    co_await writable();
    for (std::size_t r = 0; r < in.size(); ++r) {
      std::byte* const to = slot(rank) + r * share;
      std::memcpy(to, &in_bytes[r], sizeof in_bytes[r]);
      if (r != own) move_bytes(to + kNoteBytes, in[r] + begin, part(in_bytes[r], begin, piece));
    }
    enter(said, longest > begin + piece);
    co_await everyone_entered();
    if (begin == 0) compare(said);
    has_more = false;
    for (std::size_t r = 0; r < out.size(); ++r) {
      const int from = static_cast<int>(r);
      const std::byte* const sent = slot(from) + own * share;
      std::size_t bytes;
      std::memcpy(&bytes, sent, sizeof bytes);
      if (bytes != out_bytes[r])
        throw Disagreement("In call " + std::to_string(said.sequence) + " of the group, all_to_all, " +
                           region_.name_of(from) + " sends " + std::to_string(bytes) + " bytes to " +
                           region_.name_of(rank) + ", which expects " + std::to_string(out_bytes[r]) +
                           ". Make the split sizes of both fit.");
      move_bytes(out[r] + begin, r == own ? in[r] + begin : sent + kNoteBytes, part(bytes, begin, piece));
      has_more |= region_.member(from).rounds[round_ & 1].has_more != 0;
    }
    leave_round();
  }
}

}  // namespace phalanx
