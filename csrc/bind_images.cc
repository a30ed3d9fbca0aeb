// Python's view of images. No logic here: arrays in, an array filled, the GIL released in between.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "bind.h"
#include "bind_array.h"
#include "images.h"

namespace nb = nanobind;

namespace {

using Pixels = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Planes = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void scaled_planes(Pixels pixels, Column<float> scale, Column<float> shift, Planes planes) {
  const std::size_t images = pixels.shape(0), count = pixels.shape(1), channels = pixels.shape(2);
  if (planes.shape(0) != images || planes.shape(1) != channels || planes.shape(2) != count ||
      scale.size() != channels || shift.size() != channels) {
    throw std::invalid_argument("scaled_planes: the shapes of pixels, scale, shift and planes do not fit");
  }
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < images; ++i) {
    const std::size_t start = i * count * channels;
    phalanx::scaled_planes(pixels.data() + start, count, channels, scale.data(), shift.data(), planes.data() + start);
  }
}

}  // namespace

void bind_images(nb::module_& module) {
  module.def("scaled_planes", &scaled_planes, nb::arg("pixels").noconvert(), nb::arg("scale").noconvert(),
             nb::arg("shift").noconvert(), nb::arg("planes").noconvert(),
             nb::sig("def scaled_planes(pixels: numpy.typing.NDArray[numpy.uint8], "
                     "scale: numpy.typing.NDArray[numpy.float32], shift: numpy.typing.NDArray[numpy.float32], "
                     "planes: numpy.typing.NDArray[numpy.float32]) -> None"),
             "Fills planes (n, channels, pixels) with pixels (n, pixels, channels) * scale + shift, by channel.");
}
