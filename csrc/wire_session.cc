#include "wire_session.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

#include "crc32.h"

namespace phalanx {
namespace {

constexpr std::size_t kKeptBytes = std::size_t{1} << 20;

std::string with_commas(std::uint64_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

std::string op_of(FrameKind kind) { return kind == FrameKind::kPush ? "'push'" : "'pull'"; }

bool is_data(FrameKind kind) { return kind == FrameKind::kPull || kind == FrameKind::kPush; }

Answer refusal(const Refusal& refused) { return {FrameKind::kError, error_object(refused.error, refused.what())}; }

template <class Number>
std::span<const std::byte> bytes_of(const Number& number) {
  return std::as_bytes(std::span(&number, 1));
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

void read_chunk(FrameSocket& socket, std::span<std::byte> chunk) {
  socket.fill(chunk);
  if (!socket.has_checksums()) return;
  std::uint32_t checksum;
  socket.fill(std::as_writable_bytes(std::span(&checksum, 1)));
  if (crc32(chunk) != checksum) throw FrameError("the checksum of a payload is wrong");
}

// The client that a request came from over a socket.
class SocketCaller : public Caller {
 public:
  SocketCaller(FrameSocket& socket, const ServerContext& context, const std::string& peer, const FrameHeader& request,
               ReplyRows& reply)
      : socket_(socket), context_(context), peer_(peer), request_(request), reply_(reply) {}

  float* rows(std::size_t count, std::size_t dim) override { return reply_.add(count, dim); }

  void report_wait(const std::string& waits_for, bool is_connected) override {
    FrameHeader header = request_;
    header.kind = FrameKind::kWaiting;
    header.flags = 0;
    header.payload_bytes = 0;
    const std::string frame = encode_frame(header, waiting_object(waits_for, is_connected));
    try {
      const std::span<const std::byte> part = bytes_of(frame);
      socket_.write({&part, 1});
    } catch (const ConnectionEnded& ended) {
      throw ConnectionEnded(peer_ + " went while " + context_.name + " waited for " + waits_for + ": " + ended.what());
    }
  }

 private:
  FrameSocket& socket_;
  const ServerContext& context_;
  const std::string& peer_;
  const FrameHeader& request_;
  ReplyRows& reply_;
};

}  // namespace

bool MemoryBudget::take(std::uint64_t count, std::chrono::milliseconds patience) {
  std::unique_lock locked(mutex_);
  const auto has_room = [&] { return count <= limit_ && used_ <= limit_ - count; };
  const bool fits = patience.count() == 0 ? has_room() : given_.wait_for(locked, patience, has_room);
  used_ += fits ? count : 0;
  return fits;
}

void MemoryBudget::give(std::uint64_t count) {
  {
    const std::lock_guard locked(mutex_);
    used_ -= count;
  }
  given_.notify_all();
}

std::uint64_t MemoryBudget::used() const {
  const std::lock_guard locked(mutex_);
  return used_;
}

void PayloadMemory::grow(std::size_t size) {
  if (size <= size_) return;
  // The system moves pages of large blocks instead of copying them, so to grow by one chunk costs little.
  void* data = std::realloc(data_, size);
  if (data == nullptr) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(data);
  size_ = size;
}

void PayloadMemory::clear() {
  std::free(data_);
  data_ = nullptr;
  size_ = 0;
}

Answer answer(ServerContext& context, const std::string& peer, DataFrame& frame, std::span<const std::byte> payload,
              Caller& caller, std::uint64_t at) {
  BudgetShare share(context.budget);
  const std::string op = op_of(frame.is_push() ? FrameKind::kPush : FrameKind::kPull);
  try {
    if (const std::uint64_t count = frame.widened_bytes(); !share.take(count, context.patience)) {
      throw Refusal("BackendError", op + " of " + peer + " needs " + with_commas(count) + " bytes for its bfloat16; " +
                                        context.name + " holds all it may (" + with_commas(context.budget.limit()) +
                                        " bytes). Use more servers, or smaller batches.");
    }
    const DataRequest& request = frame.read(payload);
    if (context.handler == nullptr) throw Refusal("ConfigError", "There are no tables here to pull from or push to.");
    return {FrameKind::kRows, reply_object(context.handler->answer(request, caller), at)};
  } catch (const Refusal& refused) {
    return refusal(refused);
  } catch (const ConnectionEnded&) {
    throw;
  } catch (const std::exception& error) {
    context.log_failure(context.name + " failed at " + op + " of " + peer + ": " + error.what());
    return refusal({"InternalError", context.name + " failed at " + op + " with " + error.what() +
                                         ". Its log has more."});
  }
}

bool DataSession::serve(FrameSocket& socket) {
  while (!context_.is_stopping.load(std::memory_order_acquire)) {
    const std::span<const std::byte> next = socket.peek(kHeaderBytes);
    FrameHeader header = decode_header(next);
    if (!is_data(header.kind)) return true;
    header.client = client_;  // the one that was admitted, whatever a frame says
    std::byte raw[kHeaderBytes];
    socket.fill(raw);
    object_.resize(header.object_bytes);
    socket.fill(object_);
    require_checksum(raw, object_);
    DataFrame frame(header, object_);
    serve_frame(socket, header, frame);
    if (payload_.size() > kKeptBytes) payload_.clear();
    if (object_.capacity() > kKeptBytes) object_ = {};
  }
  return false;
}

void DataSession::serve_frame(FrameSocket& socket, const FrameHeader& header, DataFrame& frame) {
  const SharedMemory shared = shared_memory(socket, header, frame);
  BudgetShare share(context_.budget);
  std::span<const std::byte> payload;
  std::span<std::byte> room;
  const std::uint64_t after = aligned(header.payload_bytes);
  try {
    if (shared == nullptr) {
      payload = read_payload(socket, header, share);
    } else {
      payload = shared->bytes().first(header.payload_bytes);
      room = shared->bytes().subspan(std::min<std::size_t>(after, shared->bytes().size()));
    }
  } catch (const Refusal& refused) {
    send(socket, header, refusal(refused), {});
    return;
  }
  ReplyRows rows(room, frame.narrow_rows());
  SocketCaller caller(socket, context_, peer_, header, rows);
  const Answer answered = answer(context_, peer_, frame, payload, caller, after);
  rows.finish();
  const bool has_rows = answered.kind == FrameKind::kRows;
  FrameHeader reply = header;
  reply.flags = has_rows && rows.is_shared() ? kShared : 0;
  reply.payload_bytes = has_rows ? rows.payload_bytes() : 0;
  send(socket, reply, answered, reply.flags == 0 && has_rows ? rows.pieces() : std::vector<std::span<const std::byte>>());
}

SharedMemory DataSession::shared_memory(FrameSocket& socket, const FrameHeader& header, const DataFrame& frame) {
  if ((header.flags & kShared) == 0) return nullptr;
  const SharedMemory memory = (header.flags & kNewSegment) != 0
                                  ? segments_.attach(frame.segment(), frame.segment_bytes(), socket.descriptors().take())
                                  : segments_.find(frame.segment());
  if (header.payload_bytes > memory->bytes().size()) {
    throw FrameError("arrays of " + std::to_string(header.payload_bytes) + " bytes in a segment of " +
                     std::to_string(memory->bytes().size()));
  }
  return memory;
}

std::span<const std::byte> DataSession::read_payload(FrameSocket& socket, const FrameHeader& header,
                                                     BudgetShare& share) {
  const std::uint64_t count = header.payload_bytes;
  const std::string brings = op_of(header.kind) + " of " + peer_ + " brings " + with_commas(count) + " bytes; ";
  if (count > context_.max_frame_bytes) {
    discard(socket, count);
    throw Refusal("ConfigError", brings + context_.name + " takes " + with_commas(context_.max_frame_bytes) +
                                     " at once. Send fewer rows at a time.");
  }
  for (std::uint64_t start = 0; start < count; start += kChunkBytes) {
    const std::uint64_t end = std::min<std::uint64_t>(start + kChunkBytes, count);
    if (!share.take(end - start, context_.patience)) {
      discard(socket, count - start);
      throw Refusal("BackendError", brings + context_.name + " holds all it may (" +
                                        with_commas(context_.budget.limit()) +
                                        " bytes). Use more servers, or smaller batches.");
    }
    payload_.grow(end);
    read_chunk(socket, payload_.first(end).subspan(start));
  }
  return payload_.first(count);
}

void DataSession::discard(FrameSocket& socket, std::uint64_t count) {
  payload_.grow(std::min<std::uint64_t>(count, kChunkBytes));
  while (count > 0) {
    const std::uint64_t chunk = std::min<std::uint64_t>(count, kChunkBytes);
    read_chunk(socket, payload_.first(chunk));
    count -= chunk;
  }
}

void DataSession::send(FrameSocket& socket, const FrameHeader& header, const Answer& answer,
                       std::span<const std::span<const std::byte>> payload) {
  FrameHeader reply = header;
  reply.kind = answer.kind;
  if (answer.kind == FrameKind::kError) {
    reply.flags = 0;
    reply.payload_bytes = 0;
  }
  const std::string head = encode_frame(reply, answer.object);
  std::deque<std::uint32_t> checksums;
  std::vector<std::span<const std::byte>> parts =
      socket.has_checksums() ? chunks(payload, checksums) : std::vector(payload.begin(), payload.end());
  parts.insert(parts.begin(), bytes_of(head));
  socket.write(parts);
}

std::vector<std::span<const std::byte>> chunks(std::span<const std::span<const std::byte>> payload,
                                               std::deque<std::uint32_t>& checksums) {
  std::vector<std::span<const std::byte>> parts;
  std::size_t room = kChunkBytes;
  std::uint32_t checksum = 0;
  const auto end_chunk = [&] {
    parts.push_back(bytes_of(checksums.emplace_back(checksum)));
    room = kChunkBytes;
    checksum = 0;
  };
  for (std::span<const std::byte> rest : payload) {
    while (!rest.empty()) {
      const std::span<const std::byte> part = rest.first(std::min(room, rest.size()));
      parts.push_back(part);
      checksum = crc32(part, checksum);
      room -= part.size();
      rest = rest.subspan(part.size());
      if (room == 0) end_chunk();
    }
  }
  if (room < kChunkBytes) end_chunk();
  return parts;
}

}  // namespace phalanx
