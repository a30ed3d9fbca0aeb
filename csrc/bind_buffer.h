// Memory of any Python object that has some: bytes, a memoryview, an array.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>

// Keeps the object's memory where it is for as long as this lives.
class Buffer {
 public:
  // Throws the Python error if it has none, or none to write to.
  explicit Buffer(nanobind::handle object, bool is_writable = false) {
    if (PyObject_GetBuffer(object.ptr(), &view_, is_writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw nanobind::python_error();
    }
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::span<std::byte> bytes() const {
    return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};
