#include "images.h"

namespace phalanx {
namespace {

// Three planes at once: compilers make vector code of this loop, reading 3 bytes a pixel by shuffles. Processors that
// have no instruction for such shuffles (x86 before AVX2) run it pixel by pixel.
[[gnu::always_inline]] inline void three(const std::uint8_t* __restrict pixels, std::size_t count, const float* scale,
                                         const float* shift, float* __restrict planes) noexcept {
  float* __restrict first = planes;
  float* __restrict second = planes + count;
  float* __restrict third = planes + 2 * count;
  const float scale0 = scale[0], scale1 = scale[1], scale2 = scale[2];
  const float shift0 = shift[0], shift1 = shift[1], shift2 = shift[2];
  for (std::size_t i = 0; i < count; ++i) {
    first[i] = static_cast<float>(pixels[3 * i]) * scale0 + shift0;
    second[i] = static_cast<float>(pixels[3 * i + 1]) * scale1 + shift1;
    third[i] = static_cast<float>(pixels[3 * i + 2]) * scale2 + shift2;
  }
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void three_avx2(const std::uint8_t* pixels, std::size_t count, const float* scale,
                                        const float* shift, float* planes) noexcept {
  three(pixels, count, scale, shift, planes);
}

const bool kHasAvx2 = __builtin_cpu_supports("avx2");
#endif

}  // namespace

void scaled_planes(const std::uint8_t* pixels, std::size_t count, std::size_t channels, const float* scale,
                   const float* shift, float* planes) noexcept {
  if (channels == 3) {
#if defined(__x86_64__)
    if (kHasAvx2) return three_avx2(pixels, count, scale, shift, planes);
#endif
    return three(pixels, count, scale, shift, planes);
  }
  for (std::size_t channel = 0; channel < channels; ++channel) {
    const float factor = scale[channel], added = shift[channel];
    float* __restrict plane = planes + channel * count;
    for (std::size_t i = 0; i < count; ++i) {
      plane[i] = static_cast<float>(pixels[i * channels + channel]) * factor + added;
    }
  }
}

}  // namespace phalanx
