#include "crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phalanx {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320;
constexpr std::size_t kSlices = 8;

using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

// tables[k][b]: what byte b adds when k bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t value = b;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
    tables[0][b] = value;
  }
  for (std::size_t k = 1; k < kSlices; ++k)
    for (std::size_t b = 0; b < 256; ++b)
      tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xFF];
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t by_table(const std::byte* data, std::size_t size, std::uint32_t state) {
  for (; size >= kSlices; size -= kSlices, data += kSlices) {
    std::uint64_t word;
    std::memcpy(&word, data, kSlices);
    word ^= state;
    state = 0;
    for (std::size_t k = 0; k < kSlices; ++k) state ^= kTables[kSlices - 1 - k][word >> 8 * k & 0xFF];
  }
  for (; size > 0; --size, ++data) state = state >> 8 ^ kTables[0][(state ^ static_cast<std::uint32_t>(*data)) & 0xFF];
  return state;
}

#if defined(__x86_64__)

constexpr std::size_t kLane = sizeof(__m128i), kFolded = 4 * kLane;

// Multiplies both halves by what 64 and 512, or 128, bits further on they are worth, and adds the next bytes.
// V. Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009, with its constants.
__attribute__((target("pclmul,sse4.1"))) inline __m128i folded(__m128i value, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00), high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

inline __m128i loaded(const std::byte* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

// Takes as many whole lanes as there are; REQUIRES: at least 64 bytes. The last lane's worth goes through the table.
__attribute__((target("pclmul,sse4.1"))) std::uint32_t by_folding(const std::byte*& data, std::size_t& size,
                                                                  std::uint32_t state) {
  const __m128i far = _mm_set_epi64x(0x1C6E41596, 0x154442BD4), near = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
  __m128i lanes[4];
  for (std::size_t i = 0; i < 4; ++i) lanes[i] = loaded(data + i * kLane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (data += kFolded, size -= kFolded; size >= kFolded; data += kFolded, size -= kFolded)
    for (std::size_t i = 0; i < 4; ++i) lanes[i] = folded(lanes[i], far, loaded(data + i * kLane));
  __m128i sum = lanes[0];
  for (std::size_t i = 1; i < 4; ++i) sum = folded(sum, near, lanes[i]);
  for (; size >= kLane; data += kLane, size -= kLane) sum = folded(sum, near, loaded(data));
  std::array<std::byte, kLane> rest;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest.data()), sum);
  return by_table(rest.data(), rest.size(), 0);
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#endif

}  // namespace

std::uint32_t crc32(std::span<const std::byte> data, std::uint32_t before) {
  const std::byte* at = data.data();
  std::size_t size = data.size();
  std::uint32_t state = ~before;
#if defined(__x86_64__)
  if (size >= kFolded && can_fold()) state = by_folding(at, size, state);
#endif
  return ~by_table(at, size, state);
}

}  // namespace phalanx
