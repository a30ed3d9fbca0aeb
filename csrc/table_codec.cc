#include "table_codec.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "table_values.h"

namespace phalanx {
namespace {

constexpr std::int8_t kMostCode = 126, kInfinity = 127, kNan = -128;

std::size_t whole_words(std::size_t bytes) { return (bytes + 3) / 4 * 4; }

std::size_t value_bytes_of(FileDtype dtype, std::size_t dim, std::size_t row_bytes) {
  switch (dtype) {
    case FileDtype::kBfloat16: return whole_words(dim * sizeof(std::uint16_t));
    case FileDtype::kInt8: return sizeof(float) + whole_words(dim);
    case FileDtype::kFloat32: break;
  }
  return row_bytes;
}

// At least the smallest normal number, so that values of a row near zero have one too.
float scale_of(const float* values, std::size_t dim) {
  float most = 0;
  for (std::size_t j = 0; j < dim; ++j) {
    const float size = std::fabs(values[j]);
    if (size <= FLT_MAX) most = std::max(most, size);
  }
  return std::max(std::bit_cast<float>(std::bit_cast<std::uint32_t>(most / kMostCode) & 0xFFFFFF00), FLT_MIN);
}

std::int8_t code_of(float value, float scale) {
  if (std::isnan(value)) return kNan;
  if (std::isinf(value)) return value > 0 ? kInfinity : -kInfinity;
  return static_cast<std::int8_t>(std::lrint(value / scale));
}

float value_of(std::int8_t code, float scale) {
  if (code == kNan) return NAN;
  if (code == kInfinity || code == -kInfinity) return std::copysign(INFINITY, static_cast<float>(code));
  return static_cast<float>(code) * scale;
}

}  // namespace

RowCodec::RowCodec(FileDtype dtype, std::size_t dim, std::size_t row_bytes)
    : dtype_(dtype), dim_(dim), value_bytes_(value_bytes_of(dtype, dim, row_bytes)),
      other_bytes_(dtype == FileDtype::kFloat32 ? 0 : row_bytes - dim * sizeof(float)) {}

void RowCodec::encode(const std::byte* row, std::byte* to) const {
  if (is_exact()) {
    std::memcpy(to, row, value_bytes_);
    return;
  }
  const auto* const values = reinterpret_cast<const float*>(row);
  if (dtype_ == FileDtype::kBfloat16) {
    store_nearest(to, true, values, dim_);
  } else {
    const float scale = scale_of(values, dim_);
    std::memcpy(to, &scale, sizeof scale);
    auto* const codes = reinterpret_cast<std::int8_t*>(to + sizeof scale);
    for (std::size_t j = 0; j < dim_; ++j) codes[j] = code_of(values[j], scale);
  }
  std::memcpy(to + value_bytes_, values + dim_, other_bytes_);
}

void RowCodec::decode(const std::byte* from, std::byte* row) const {
  if (is_exact()) {
    std::memcpy(row, from, value_bytes_);
    return;
  }
  auto* const values = reinterpret_cast<float*>(row);
  if (dtype_ == FileDtype::kBfloat16) {
    load_values(from, true, values, dim_);
  } else {
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    const auto* const codes = reinterpret_cast<const std::int8_t*>(from + sizeof scale);
    for (std::size_t j = 0; j < dim_; ++j) values[j] = value_of(codes[j], scale);
  }
  std::memcpy(values + dim_, from + value_bytes_, other_bytes_);
}

}  // namespace phalanx
