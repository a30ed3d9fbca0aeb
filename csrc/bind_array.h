// How numbers made by the core become NumPy arrays.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

// A one-dimensional array that owns the vector's numbers.
template <class T>
nanobind::object array_of(std::vector<T>&& numbers) {
  auto* kept = new std::vector<T>(std::move(numbers));
  nanobind::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nanobind::cast(
      nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>(kept->data(), {kept->size()}, owner));
}
