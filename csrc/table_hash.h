// The hash that places an id, and the streams of numbers that belong to it. Twin of ps/table/placement.py and ps/table/initializers.py.
//
// The mixer is a bijection, so a hash stands for its id and the table stores hashes alone.

#pragma once

#include <bit>
#include <cstdint>

#include "mix.h"

namespace phalanx {

inline constexpr int kShardBits = 10;
inline constexpr int kShards = 1 << kShardBits;
inline constexpr std::uint64_t kAdmission = 0xD1B54A32D192ED03;
inline constexpr std::uint64_t kRounding = 0x8CB92BA72F3D8DD7;

// The inverse of mix64: the multipliers are the inverses modulo 2^64, the shifts are undone two or three at a time.
constexpr std::uint64_t unmix64(std::uint64_t z) noexcept {
  z = (z ^ (z >> 31) ^ (z >> 62)) * 0x319642B2D24D8EC3;
  z = (z ^ (z >> 27) ^ (z >> 54)) * 0x96DE1B173F119089;
  return z ^ (z >> 30) ^ (z >> 60);
}

static_assert(unmix64(mix64(0x0123456789ABCDEF)) == 0x0123456789ABCDEF);

constexpr std::uint64_t hash_of(std::int64_t id, std::uint64_t salt) noexcept {
  return mix64(std::bit_cast<std::uint64_t>(id) ^ salt);
}

constexpr int shard_of(std::uint64_t hash) noexcept { return static_cast<int>(hash >> (64 - kShardBits)); }

// Word `i`, from 0, of the stream of a number.
constexpr std::uint64_t word_of(std::uint64_t number, std::uint64_t i) noexcept {
  return mix64(number + (i + 1) * kStep);
}

}  // namespace phalanx
