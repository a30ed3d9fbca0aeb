// The packed object of pulls, pushes and their replies, in place of JSON; little-endian, without gaps but those named.
//
//     request   step u64 | weight f64 | segment u64 | its bytes u64 | flags u32 | pushes u32 | pulls u32 | 0 u32
//               per push   table u64 | pull u64 | lr f64 | rows u32 | dim u32 | kind u8 | columns u8 | 0 u8[6]
//               per pull   table u64 | keys u32 | flags u32
//     reply     status u8 | 0 u8[7] | number u64 | dropped u64 | at u64
//
// The payload of a request has per push its keys (without an earlier pull), values, counts, shows, clicks, then per
// pull its keys; that of a reply the rows of each pull. Each array starts at a multiple of 64 bytes. Values and rows are
// float32, or bfloat16 where the head of their table says so. The twin of the client's side is ps/wire/data_frame.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server_request.h"
#include "wire_frame.h"

namespace phalanx {

inline constexpr std::uint32_t kKeepPull = 1;  // flag of a request: remember its keys for a push
inline constexpr std::uint8_t kHasLr = 1, kHasCounts = 2, kHasShows = 4, kHasClicks = 8;  // columns of a push
inline constexpr std::uint8_t kBfloat16Values = 16;  // beside them: its values are bfloat16
inline constexpr std::uint32_t kBfloat16Rows = 1;    // flag of a pull

struct RequestHead {
  std::uint64_t step = 0;
  double weight = 1;
  std::uint64_t segment = 0, segment_bytes = 0;
  std::uint32_t flags = 0, pushes = 0, pulls = 0, zero = 0;
};

struct PushHead {
  std::uint64_t table = 0, pull = 0;
  double lr = 0;
  std::uint32_t rows = 0, dim = 0;
  std::uint8_t kind = 0, columns = 0, zero[6] = {};
};

struct PullHead {
  std::uint64_t table = 0;
  std::uint32_t keys = 0, flags = 0;
};

struct ReplyHead {
  DataStatus status = DataStatus::kDone;
  std::uint8_t zero[7] = {};
  std::uint64_t number = 0, dropped = 0, at = 0;
};

static_assert(sizeof(RequestHead) == 48 && sizeof(PushHead) == 40 && sizeof(PullHead) == 16 && sizeof(ReplyHead) == 32);

// A pull or a push as it came: its object is decoded before its payload is there.
class DataFrame {
 public:
  // Throws FrameError if the object makes no sense, or is of a payload of another length than the header's.
  DataFrame(const FrameHeader& header, std::span<const std::byte> object);

  bool is_push() const { return request_.is_push; }
  // Which pulls ask for rows in bfloat16.
  std::vector<bool> narrow_rows() const;
  // Bytes that `read` adds to the payload for values that came as bfloat16.
  std::uint64_t widened_bytes() const;

  std::uint64_t segment() const { return head_.segment; }
  std::uint64_t segment_bytes() const { return head_.segment_bytes; }

  // The request, whose arrays are views of the payload, or of this where values came as bfloat16. REQUIRES: it has the header's length and starts at a multiple
  // of 8 bytes.
  const DataRequest& read(std::span<const std::byte> payload);

 private:
  RequestHead head_;
  std::vector<PushHead> pushes_;
  std::vector<PullHead> pulls_;
  DataRequest request_;
  std::vector<std::unique_ptr<float[]>> widened_;
};

// The rows of a reply, in the client's memory as long as that has room.
class ReplyRows {
 public:
  // `narrow`: of each array whether it goes out as bfloat16; none does if this is empty.
  explicit ReplyRows(std::span<std::byte> room, std::vector<bool> narrow = {})
      : room_(room), narrow_(std::move(narrow)) {}

  // Returns where to write the next array, as float32.
  float* add(std::size_t count, std::size_t dim);
  // Ends writing: rounds what goes out as bfloat16. The rest of this class is for afterwards.
  void finish();

  std::uint64_t payload_bytes() const { return end_; }
  // Whether every array lies in the client's memory, where it belongs.
  bool is_shared() const { return own_.empty() && room_.data() != nullptr; }
  // The payload piece by piece, gaps included, as it goes through a socket.
  std::vector<std::span<const std::byte>> pieces() const;

 private:
  struct Array {
    std::uint64_t at, bytes;
    const std::byte* data;
  };

  struct Wide {
    std::unique_ptr<float[]> values;
    std::size_t count;
    std::byte* to;
  };

  // Returns where so many bytes of the reply are.
  std::byte* place(std::uint64_t bytes);

  std::span<std::byte> room_;
  std::vector<bool> narrow_;
  std::uint64_t end_ = 0;
  std::vector<Array> arrays_;
  std::vector<std::unique_ptr<std::byte[]>> own_;
  std::vector<Wide> wide_;
};

// The object of a reply; `at`: where in the shared segment its rows lie.
std::string reply_object(const DataReply& reply, std::uint64_t at);

}  // namespace phalanx
