#include "wire_frame.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "crc32.h"

namespace phalanx {
namespace {

constexpr char kMagic[4] = {'P', 'H', 'L', 'X'};
constexpr std::uint16_t kWireVersion = 4;
constexpr std::size_t kChecked = kHeaderBytes - kChecksumBytes;
constexpr std::size_t kLongestMessage = std::size_t{1} << 16;

template <class T>
T read_at(std::span<const std::byte> raw, std::size_t at) {
  T value;
  std::memcpy(&value, raw.data() + at, sizeof value);
  return value;
}

template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[7];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// At most so many bytes of UTF-8, whole characters.
std::string_view cut(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

}  // namespace

FrameHeader decode_header(std::span<const std::byte> raw) {
  if (std::memcmp(raw.data(), kMagic, sizeof kMagic) != 0 || read_at<std::uint16_t>(raw, 4) != kWireVersion) {
    throw FrameError("a frame starts with other bytes than ours, or with another wire version");
  }
  const auto kind = read_at<std::uint8_t>(raw, 6), flags = read_at<std::uint8_t>(raw, 7);
  if (kind < static_cast<int>(FrameKind::kRequest) || kind > static_cast<int>(FrameKind::kRows) ||
      (flags & ~(kShared | kNewSegment)) != 0) {
    throw FrameError("a frame of kind " + std::to_string(kind) + " with flags " + std::to_string(flags));
  }
  const FrameHeader header{static_cast<FrameKind>(kind),        flags,
                           read_at<std::uint64_t>(raw, 8),      read_at<std::uint64_t>(raw, 16),
                           read_at<std::uint32_t>(raw, 24),     read_at<std::uint64_t>(raw, 28)};
  if (header.object_bytes > kLargestObject || header.payload_bytes > kLargestPayload) {
    throw FrameError("a frame claims " + std::to_string(header.object_bytes) + " and " +
                     std::to_string(header.payload_bytes) + " bytes");
  }
  return header;
}

void require_checksum(std::span<const std::byte> header, std::span<const std::byte> object) {
  if (crc32(object, crc32(header.first(kChecked))) != read_at<std::uint32_t>(header, kChecked)) {
    throw FrameError("the checksum of a frame is wrong");
  }
}

std::string encode_frame(FrameHeader header, std::string_view object) {
  std::string out(kMagic, sizeof kMagic);
  append(out, kWireVersion);
  append(out, header.kind);
  append(out, header.flags);
  append(out, header.client);
  append(out, header.seq);
  append(out, static_cast<std::uint32_t>(object.size()));
  append(out, header.payload_bytes);
  append(out, crc32(bytes_of(object), crc32(bytes_of(out))));
  return out.append(object);
}

std::string error_object(std::string_view error, std::string_view message) {
  return "{\"error\":" + json_text(error) + ",\"message\":" + json_text(cut(message, kLongestMessage)) + "}";
}

std::string waiting_object(std::string_view waits_for, bool is_connected) {
  return "{\"for\":" + json_text(waits_for) + ",\"here\":" + (is_connected ? "true" : "false") + "}";
}

}  // namespace phalanx
