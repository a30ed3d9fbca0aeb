#include "wire_data.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "numbers.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kMostTables = std::uint64_t{1} << 16;
constexpr std::array<std::byte, kAlignment> kZeros = {};

// Reads fixed parts one after the other.
class ObjectReader {
 public:
  explicit ObjectReader(std::span<const std::byte> object) : rest_(object) {}

  template <class Part>
  Part next() {
    if (rest_.size() < sizeof(Part)) throw FrameError("the object of a pull or push is cut off");
    Part part;
    std::memcpy(static_cast<void*>(&part), rest_.data(), sizeof part);
    rest_ = rest_.subspan(sizeof part);
    return part;
  }

  void require_end() const {
    if (!rest_.empty()) throw FrameError("the object of a pull or push is too long");
  }

 private:
  std::span<const std::byte> rest_;
};

// The places of arrays, one after the other.
class PayloadCursor {
 public:
  explicit PayloadCursor(std::span<const std::byte> payload = {}) : payload_(payload) {}

  // Counts an array of count * width values in. Throws FrameError if no payload is that long.
  std::uint64_t skip(std::uint64_t count, std::uint64_t width, std::uint64_t item) {
    if (count != 0 && width > kLargestPayload / item / count) throw FrameError("a pull or push claims too many rows");
    const std::uint64_t at = aligned(end_);
    end_ = at + count * width * item;
    if (end_ > kLargestPayload) throw FrameError("a pull or push claims too many rows");
    return at;
  }

  template <class T>
  std::span<const T> next(std::uint64_t count, std::uint64_t width = 1) {
    const std::uint64_t at = skip(count, width, sizeof(T));
    return {reinterpret_cast<const T*>(payload_.data() + at), static_cast<std::size_t>(count * width)};
  }

  std::uint64_t end() const { return end_; }

 private:
  std::span<const std::byte> payload_;
  std::uint64_t end_ = 0;
};

bool is_narrow(const PushHead& push) { return (push.columns & kBfloat16Values) != 0; }

std::uint64_t payload_of(std::span<const PushHead> pushes, std::span<const PullHead> pulls) {
  PayloadCursor cursor;
  for (const PushHead& push : pushes) {
    if (push.pull == 0) cursor.skip(push.rows, 1, sizeof(std::int64_t));
    cursor.skip(push.rows, push.dim, is_narrow(push) ? sizeof(std::uint16_t) : sizeof(float));
    for (const std::uint8_t column : {kHasCounts, kHasShows, kHasClicks}) {
      if (push.columns & column) cursor.skip(push.rows, 1, sizeof(float));
    }
  }
  for (const PullHead& pull : pulls) cursor.skip(pull.keys, 1, sizeof(std::int64_t));
  return cursor.end();
}

// Values that came as bfloat16 are `widened`.
TablePush read_push(const PushHead& head, PayloadCursor& cursor, std::vector<std::unique_ptr<float[]>>& widened) {
  TablePush push;
  push.table = head.table;
  push.kind = static_cast<UpdateKind>(head.kind);
  push.pull = head.pull;
  push.rows = head.rows;
  if (head.pull == 0) push.keys = cursor.next<std::int64_t>(head.rows);
  if (is_narrow(head)) {
    const std::span<const std::uint16_t> values = cursor.next<std::uint16_t>(head.rows, head.dim);
    widened.push_back(std::make_unique_for_overwrite<float[]>(values.size()));
    widen(values, widened.back().get());
    push.values = {widened.back().get(), values.size()};
  } else {
    push.values = cursor.next<float>(head.rows, head.dim);
  }
  push.has_lr = (head.columns & kHasLr) != 0;
  push.lr = head.lr;
  if (head.columns & kHasCounts) push.counts = cursor.next<std::uint32_t>(head.rows).data();
  if (head.columns & kHasShows) push.shows = cursor.next<float>(head.rows).data();
  if (head.columns & kHasClicks) push.clicks = cursor.next<float>(head.rows).data();
  return push;
}

}  // namespace

DataFrame::DataFrame(const FrameHeader& header, std::span<const std::byte> object) {
  ObjectReader reader(object);
  head_ = reader.next<RequestHead>();
  request_.is_push = header.kind == FrameKind::kPush;
  if (head_.pushes > kMostTables || head_.pulls > kMostTables || (head_.pushes != 0 && !request_.is_push) ||
      (head_.flags & ~kKeepPull) != 0) {
    throw FrameError("a pull or push of " + std::to_string(head_.pushes) + " and " + std::to_string(head_.pulls) +
                     " tables with flags " + std::to_string(head_.flags));
  }
  for (std::uint32_t i = 0; i < head_.pushes; ++i) {
    const PushHead& push = pushes_.emplace_back(reader.next<PushHead>());
    if (push.kind > static_cast<int>(UpdateKind::kAssign) ||
        (push.columns & ~(kHasLr | kHasCounts | kHasShows | kHasClicks | kBfloat16Values)) != 0) {
      throw FrameError("a push of kind " + std::to_string(push.kind) + " with columns " + std::to_string(push.columns));
    }
  }
  for (std::uint32_t i = 0; i < head_.pulls; ++i) {
    const PullHead& pull = pulls_.emplace_back(reader.next<PullHead>());
    if ((pull.flags & ~kBfloat16Rows) != 0) throw FrameError("a pull with flags " + std::to_string(pull.flags));
  }
  reader.require_end();
  const std::uint64_t bytes = payload_of(pushes_, pulls_);
  if (bytes != header.payload_bytes) {
    throw FrameError("a payload of " + std::to_string(header.payload_bytes) + " bytes for arrays of " +
                     std::to_string(bytes));
  }
  request_.client = header.client;
  request_.seq = header.seq;
  request_.step = head_.step;
  request_.weight = head_.weight;
  request_.keep = (head_.flags & kKeepPull) != 0;
}

std::vector<bool> DataFrame::narrow_rows() const {
  std::vector<bool> narrow;
  for (const PullHead& pull : pulls_) narrow.push_back((pull.flags & kBfloat16Rows) != 0);
  return narrow;
}

std::uint64_t DataFrame::widened_bytes() const {
  std::uint64_t bytes = 0;
  for (const PushHead& push : pushes_) bytes += is_narrow(push) ? std::uint64_t{4} * push.rows * push.dim : 0;
  return bytes;
}

const DataRequest& DataFrame::read(std::span<const std::byte> payload) {
  PayloadCursor cursor(payload);
  request_.pushes.clear();
  request_.pulls.clear();
  widened_.clear();
  for (const PushHead& push : pushes_) request_.pushes.push_back(read_push(push, cursor, widened_));
  for (const PullHead& pull : pulls_) request_.pulls.push_back({pull.table, cursor.next<std::int64_t>(pull.keys)});
  return request_;
}

float* ReplyRows::add(std::size_t count, std::size_t dim) {
  const std::size_t index = arrays_.size(), size = count * dim;
  if (index >= narrow_.size() || !narrow_[index]) return reinterpret_cast<float*>(place(size * sizeof(float)));
  std::byte* const to = place(size * sizeof(std::uint16_t));
  wide_.push_back({std::make_unique_for_overwrite<float[]>(size), size, to});
  return wide_.back().values.get();
}

void ReplyRows::finish() {
  for (const Wide& wide : wide_) narrow({wide.values.get(), wide.count}, reinterpret_cast<std::uint16_t*>(wide.to));
  wide_.clear();
}

std::byte* ReplyRows::place(std::uint64_t bytes) {
  const std::uint64_t at = aligned(end_);
  std::byte* data;
  if (own_.empty() && room_.data() != nullptr && at <= room_.size() && bytes <= room_.size() - at) {
    data = room_.data() + at;
  } else {
    own_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
    data = own_.back().get();
  }
  arrays_.push_back({at, bytes, data});
  end_ = at + bytes;
  return data;
}

std::vector<std::span<const std::byte>> ReplyRows::pieces() const {
  std::vector<std::span<const std::byte>> out;
  std::uint64_t end = 0;
  for (const Array& array : arrays_) {
    if (array.at > end) out.emplace_back(kZeros.data(), array.at - end);
    if (array.bytes != 0) out.emplace_back(array.data, array.bytes);
    end = array.at + array.bytes;
  }
  return out;
}

std::string reply_object(const DataReply& reply, std::uint64_t at) {
  ReplyHead head;
  head.status = reply.status;
  head.number = reply.number;
  head.dropped = reply.dropped;
  head.at = at;
  return {reinterpret_cast<const char*>(&head), sizeof head};
}

}  // namespace phalanx
