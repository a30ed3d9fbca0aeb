// Bytes of pixels to the numbers a model takes, in one pass over the image.
//
// Thread-safety: no state; any thread may call it.

#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

// planes[c][i] = pixels[i][c] * scale[c] + shift[c], each operation rounded to float as it stands.
// REQUIRES: pixels holds count * channels bytes, planes as many floats, scale and shift `channels` floats; planes
// overlaps none of the others.
void scaled_planes(const std::uint8_t* pixels, std::size_t count, std::size_t channels, const float* scale,
                   const float* shift, float* planes) noexcept;

}  // namespace phalanx
