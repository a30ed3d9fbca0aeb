// The checksum of records and frames, equal to zlib's crc32.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace phalanx {

// The checksum of what `before` is the checksum of, followed by these bytes. Any thread.
std::uint32_t crc32(std::span<const std::byte> data, std::uint32_t before = 0);

}  // namespace phalanx
