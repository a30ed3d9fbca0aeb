#include "shm_reduce.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "numbers.h"

namespace phalanx {
namespace {

constexpr std::size_t kBlock = 512;  // elements whose running result stays in the first-level cache

// Whole numbers wrap around, also where C++ leaves a signed overflow open.
template <class T, class F>
T wrapped(T a, T b, F combine) {
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
    return static_cast<T>(combine(static_cast<Wide>(a), static_cast<Wide>(b)));
  } else {
    return combine(a, b);
  }
}

struct Add {
  template <class T>
  T operator()(T a, T b) const { return wrapped(a, b, [](auto x, auto y) { return x + y; }); }
};
struct Multiply {
  template <class T>
  T operator()(T a, T b) const { return wrapped(a, b, [](auto x, auto y) { return x * y; }); }
};
// What is not a number stays so, whichever rank has it.
struct Least {
  template <class T>
  T operator()(T a, T b) const { return b < a || b != b ? b : a; }
};
struct Greatest {
  template <class T>
  T operator()(T a, T b) const { return a < b || b != b ? b : a; }
};
struct And {
  template <class T>
  T operator()(T a, T b) const { return static_cast<T>(a & b); }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const { return static_cast<T>(a | b); }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const { return static_cast<T>(a ^ b); }
};

// The combination of parts [first, first + n) of a block: of their halves, where the left is the longest power of two.
template <class Number, class Combine>
void combine_halves(typename Number::Sum* out, std::span<const std::byte* const> parts, std::size_t begin, std::size_t n) {
  using Kept = typename Number::Kept;
  using Sum = typename Number::Sum;
  const Combine combine;
  const auto at = [&](std::size_t part) { return reinterpret_cast<const Kept*>(parts[part]) + begin; };
  const Kept* const first = at(0);
  if (parts.size() == 1) {
    for (std::size_t i = 0; i < n; ++i) out[i] = Number::widened(first[i]);
  } else if (parts.size() == 2) {
    const Kept* const second = at(1);
    for (std::size_t i = 0; i < n; ++i) out[i] = combine(Number::widened(first[i]), Number::widened(second[i]));
  } else {
    const std::size_t half = std::bit_floor(parts.size() - 1);
    alignas(64) Sum right[kBlock];
    combine_halves<Number, Combine>(out, parts.first(half), begin, n);
    combine_halves<Number, Combine>(right, parts.subspan(half), begin, n);
    for (std::size_t i = 0; i < n; ++i) out[i] = combine(out[i], right[i]);
  }
}

// The result of a block lies in `left` and `right` between the parts; two parts alone take one pass.
template <class Number, class Combine, bool kMean>
void run(std::byte* out, std::span<const std::byte* const> parts, std::size_t count) {
  using Kept = typename Number::Kept;
  using Sum = typename Number::Sum;
  const Combine combine;
  using Divisor = std::conditional_t<std::is_integral_v<Sum>, std::int64_t, Sum>;  // there may be 200 ranks of int8
  const auto divisor = static_cast<Divisor>(parts.size());
  const auto finished = [=](Sum sum) {
    if constexpr (kMean) sum = static_cast<Sum>(sum / divisor);  // whole numbers: towards zero, as NCCL does
    return Number::narrowed(sum);
  };
  const auto at = [&](std::size_t part, std::size_t begin) {
    return reinterpret_cast<const Kept*>(parts[part]) + begin;
  };
  const std::size_t half = parts.size() > 1 ? std::bit_floor(parts.size() - 1) : 1;
  alignas(64) Sum left[kBlock];
  alignas(64) Sum right[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    Kept* const into = reinterpret_cast<Kept*>(out) + begin;
    const Kept* const first = at(0, begin);
    const Kept* const last = at(parts.size() - 1, begin);
    if (parts.size() == 1) {
      for (std::size_t i = 0; i < n; ++i) into[i] = finished(Number::widened(first[i]));
    } else if (parts.size() == 2) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i)
        into[i] = finished(combine(Number::widened(first[i]), Number::widened(last[i])));
    } else if (parts.size() - half == 1) {
      combine_halves<Number, Combine>(left, parts.first(half), begin, n);
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) into[i] = finished(combine(left[i], Number::widened(last[i])));
    } else {
      combine_halves<Number, Combine>(left, parts.first(half), begin, n);
      combine_halves<Number, Combine>(right, parts.subspan(half), begin, n);
      for (std::size_t i = 0; i < n; ++i) into[i] = finished(combine(left[i], right[i]));
    }
  }
}

template <class Number>
void run_any(Reduce reduce, std::byte* out, std::span<const std::byte* const> parts, std::size_t count) {
  switch (reduce) {
    case Reduce::kSum: return run<Number, Add, false>(out, parts, count);
    case Reduce::kMean: return run<Number, Add, true>(out, parts, count);
    case Reduce::kProduct: return run<Number, Multiply, false>(out, parts, count);
    case Reduce::kMin: return run<Number, Least, false>(out, parts, count);
    case Reduce::kMax: return run<Number, Greatest, false>(out, parts, count);
    default: break;
  }
  if constexpr (std::is_integral_v<typename Number::Sum>) {
    switch (reduce) {
      case Reduce::kAnd: return run<Number, And, false>(out, parts, count);
      case Reduce::kOr: return run<Number, Or, false>(out, parts, count);
      case Reduce::kXor: return run<Number, Xor, false>(out, parts, count);
      default: break;
    }
  }
}

// Truth values: a sum is true where any is, a product where all are.
Reduce of_truths(Reduce reduce) {
  switch (reduce) {
    case Reduce::kSum: case Reduce::kMax: return Reduce::kOr;
    case Reduce::kProduct: case Reduce::kMin: return Reduce::kAnd;
    default: return reduce;
  }
}

}  // namespace

std::size_t width_of(Type type) {
  constexpr std::size_t kWidths[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
  return kWidths[static_cast<std::size_t>(type)];
}

const char* name_of(Type type) {
  constexpr const char* kNames[] = {"float32", "float64", "bfloat16", "float16", "uint8",
                                    "int8",    "int16",   "int32",    "int64",   "bool"};
  return kNames[static_cast<std::size_t>(type)];
}

const char* name_of(Reduce reduce) {
  constexpr const char* kNames[] = {"sum", "mean", "product", "min", "max", "and", "or", "xor"};
  return kNames[static_cast<std::size_t>(reduce)];
}

void reduce(Type type, Reduce reduce, std::byte* out, std::span<const std::byte* const> parts, std::size_t count) {
  switch (type) {
    case Type::kFloat32: return run_any<Plain<float>>(reduce, out, parts, count);
    case Type::kFloat64: return run_any<Plain<double>>(reduce, out, parts, count);
    case Type::kBfloat16: return run_any<Bfloat16>(reduce, out, parts, count);
    case Type::kFloat16: return run_any<Float16>(reduce, out, parts, count);
    case Type::kUint8: return run_any<Plain<std::uint8_t>>(reduce, out, parts, count);
    case Type::kInt8: return run_any<Plain<std::int8_t>>(reduce, out, parts, count);
    case Type::kInt16: return run_any<Plain<std::int16_t>>(reduce, out, parts, count);
    case Type::kInt32: return run_any<Plain<std::int32_t>>(reduce, out, parts, count);
    case Type::kInt64: return run_any<Plain<std::int64_t>>(reduce, out, parts, count);
    case Type::kBool: return run_any<Plain<std::uint8_t>>(of_truths(reduce), out, parts, count);
  }
}

}  // namespace phalanx
