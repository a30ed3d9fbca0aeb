// Rows as a lane's file keeps them: as in memory, or with values of 16 or 8 bits.
//
// In bfloat16 a value is rounded to the nearest. In int8 a row has one scale, a 126th of its largest finite magnitude, and
// each value is the nearest multiple of it. The scale has 16 significant bits, so that multiples are exact: a row that was
// rounded and is written again gives the same bits. Infinities and NaN have codes of their own. Optimizer state and
// statistics are float32 always: a mean or a count that moves by less than a rounding step would stand still.

#pragma once

#include <cstddef>

#include "table_spec.h"

namespace phalanx {

class RowCodec {
 public:
  // REQUIRES: values in memory are float32, unless `dtype` is kFloat32, which takes rows as they are.
  RowCodec(FileDtype dtype, std::size_t dim, std::size_t row_bytes);
  explicit RowCodec(const TableSpec& spec) : RowCodec(spec.file_dtype, spec.dim, spec.row_bytes()) {}

  std::size_t bytes() const { return value_bytes_ + other_bytes_; }  // of a row in the file
  bool is_exact() const { return dtype_ == FileDtype::kFloat32; }

  // Both are aligned to 4 bytes.
  void encode(const std::byte* row, std::byte* to) const;
  void decode(const std::byte* from, std::byte* row) const;

 private:
  const FileDtype dtype_;
  const std::size_t dim_;
  const std::size_t value_bytes_;  // in the file
  const std::size_t other_bytes_;  // of what follows the values
};

}  // namespace phalanx
