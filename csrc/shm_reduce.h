// Element by element reductions of several ranks' numbers.
//
// Thread-safety: functions of their arguments alone.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace phalanx {

enum class Type : std::uint32_t { kFloat32, kFloat64, kBfloat16, kFloat16, kUint8, kInt8, kInt16, kInt32, kInt64, kBool };
enum class Reduce : std::uint32_t { kSum, kMean, kProduct, kMin, kMax, kAnd, kOr, kXor };

std::size_t width_of(Type type);
const char* name_of(Type type);
const char* name_of(Reduce reduce);

// out[i] = parts[0][i] (+) parts[1][i] (+) ...: by halves, of which the left is the longest power of two of the parts that
// is not all of them; 16-bit floats in float32 and rounded once. So sums of aligned runs of the parts combine to the same
// bits (`phalanx.parallel.data.replicas.replica_sums`).
// The mean of whole numbers is their sum, which wraps around, divided towards zero. `out` may be one of the parts.
// REQUIRES: 1 <= parts.size(); no bits of numbers with a fraction.
void reduce(Type type, Reduce reduce, std::byte* out, std::span<const std::byte* const> parts, std::size_t count);

}  // namespace phalanx
