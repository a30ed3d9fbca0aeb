#include "table_values.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace phalanx {
namespace {

std::uint16_t* halves(std::byte* row) { return reinterpret_cast<std::uint16_t*>(row); }

}  // namespace

void Starter::fill(std::uint64_t hash, float* values, std::size_t dim) const {
  if (init_.kind == InitKind::kConstant) {
    std::fill_n(values, dim, static_cast<float>(init_.scale));
    return;
  }
  const std::uint64_t number = number_of(hash);
  const auto scale = static_cast<float>(init_.scale);
  for (std::size_t j = 0; j < dim; j += 2) {
    const std::uint64_t word = word_of(number, j / 2);
    float pair[2];
    if (init_.kind == InitKind::kUniform) {  // 24 bits a value; all but the product with the scale is exact
      pair[0] = (static_cast<float>(word >> 40 & 0xFFFFFF) * 0x1p-23f - 1.0f) * scale;
      pair[1] = (static_cast<float>(word >> 8 & 0xFFFFFF) * 0x1p-23f - 1.0f) * scale;
    } else {  // G. E. P. Box, M. E. Muller, "A note on the generation of random normal deviates", 1958
      const double radius = std::sqrt(-2 * std::log((static_cast<double>(word >> 32) + 1) * 0x1p-32));
      const double angle = static_cast<double>(word & 0xFFFFFFFF) * (0x1p-31 * std::numbers::pi);
      pair[0] = static_cast<float>(radius * std::cos(angle) * static_cast<double>(scale));
      pair[1] = static_cast<float>(radius * std::sin(angle) * static_cast<double>(scale));
    }
    std::copy_n(pair, std::min<std::size_t>(2, dim - j), values + j);
  }
}

void store_nearest(std::byte* row, bool is_bfloat16, const float* values, std::size_t dim) {
  if (!is_bfloat16) {
    std::memcpy(row, values, dim * sizeof(float));
    return;
  }
  for (std::size_t j = 0; j < dim; ++j) halves(row)[j] = nearest(values[j]);
}

void store_stochastic(std::byte* row, std::uint64_t number, std::uint64_t tick, const float* values, std::size_t dim) {
  const std::uint64_t stream = mix64((number ^ kRounding) + tick * kStep);
  for (std::size_t j = 0; j < dim; j += 4) {
    const std::uint64_t draws = word_of(stream, j / 4);
    for (std::size_t k = 0; k < 4 && j + k < dim; ++k) {
      halves(row)[j + k] = cut(values[j + k], static_cast<std::uint32_t>(draws >> 16 * k & 0xFFFF));
    }
  }
}

}  // namespace phalanx
