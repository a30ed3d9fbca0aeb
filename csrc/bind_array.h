// How NumPy arrays come to the core, and how numbers made by the core become arrays.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

template <class T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using OutColumn = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Rows = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using OutRows = nanobind::ndarray<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// What a column holds; T is const for one that is only read.
template <class T>
std::span<T> view(const OutColumn<T>& column) {
  return {column.data(), column.size()};
}

// A one-dimensional array that owns the vector's numbers.
template <class T>
nanobind::object array_of(std::vector<T>&& numbers) {
  auto kept = std::make_unique<std::vector<T>>(std::move(numbers));
  std::vector<T>& values = *kept;
  nanobind::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nanobind::cast(
      nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>(values.data(), {values.size()}, owner));
}

// An array of these sides that owns the numbers.
template <class T, class... Sides>
nanobind::object array_of(std::unique_ptr<T[]>&& numbers, Sides... sides) {
  T* data = numbers.release();
  nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<sizeof...(sides)>>(data, {sides...}, owner));
}
