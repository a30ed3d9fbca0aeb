// The bytes of a frame: header of 40 bytes, object, payload. Twin of ps/wire/frame.py, which draws them.
//
// Thread-safety: functions of their arguments alone.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace phalanx {

// What came is not a frame of ours; nothing after it on that connection can be read.
struct FrameError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr std::size_t kHeaderBytes = 40;
inline constexpr std::size_t kChecksumBytes = 4;
inline constexpr std::size_t kChunkBytes = std::size_t{4} << 20;
inline constexpr std::uint64_t kLargestObject = std::uint64_t{16} << 20;
inline constexpr std::uint64_t kLargestPayload = std::uint64_t{1} << 40;
inline constexpr std::uint64_t kAlignment = 64;

enum class FrameKind : std::uint8_t { kRequest = 1, kReply, kError, kWaiting, kPull, kPush, kRows };

inline constexpr std::uint8_t kShared = 1;      // flag: the payload lies in a shared segment
inline constexpr std::uint8_t kNewSegment = 2;  // flag: the descriptor of that segment comes with the header

struct FrameHeader {
  FrameKind kind;
  std::uint8_t flags = 0;
  std::uint64_t client = 0;
  std::uint64_t seq = 0;
  std::uint32_t object_bytes = 0;
  std::uint64_t payload_bytes = 0;
};

// The next place where an array may start.
constexpr std::uint64_t aligned(std::uint64_t offset) noexcept {
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

// The header, its lengths within limits. Throws FrameError if it is none. REQUIRES: raw has kHeaderBytes.
FrameHeader decode_header(std::span<const std::byte> raw);

// Throws FrameError unless the checksum of header and object holds. REQUIRES: header has kHeaderBytes.
void require_checksum(std::span<const std::byte> header, std::span<const std::byte> object);

// Header and object of a frame; the header's object_bytes are those of `object`.
std::string encode_frame(FrameHeader header, std::string_view object);

// The objects of frames `error` and `waiting`.
std::string error_object(std::string_view error, std::string_view message);
std::string waiting_object(std::string_view waits_for, bool is_connected);

}  // namespace phalanx
