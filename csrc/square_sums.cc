#include "square_sums.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#include "numbers.h"

namespace phalanx {
namespace {

constexpr std::size_t kPiece = 1 << 17;  // elements that one thread takes at once
constexpr std::size_t kLanes = 8;

// A run of one array.
struct Piece {
  std::size_t array;
  std::size_t begin;
  std::size_t count;
};

std::vector<Piece> cut(std::span<const Numbers> arrays) {
  std::vector<Piece> pieces;
  for (std::size_t array = 0; array < arrays.size(); ++array) {
    for (std::size_t begin = 0; begin < arrays[array].count; begin += kPiece) {
      pieces.push_back({array, begin, std::min(kPiece, arrays[array].count - begin)});
    }
  }
  return pieces;
}

// Runs work(result, piece) for all pieces, each thread with a result of its own, and returns the results.
template <class Result, class Work>
std::vector<Result> in_pieces(std::span<const Numbers> arrays, int threads, const Result& empty, const Work& work) {
  const std::vector<Piece> pieces = cut(arrays);
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += piece.count;
  const std::size_t useful = std::max<std::size_t>(1, total / (2 * kPiece));  // a thread takes as long to start as one
  const std::size_t count = std::min({static_cast<std::size_t>(threads), useful, std::max<std::size_t>(1, pieces.size())});
  std::vector<Result> results(count, empty);
  std::atomic<std::size_t> next{0};
  const auto take = [&](Result& result) {
    for (std::size_t at = next++; at < pieces.size(); at = next++) work(result, pieces[at]);
  };
  std::vector<std::jthread> others;
  for (std::size_t number = 1; number < count; ++number) {
    try {
      others.emplace_back([&, number] { take(results[number]); });
    } catch (const std::system_error&) {
      break;  // no further thread: these do it
    }
  }
  take(results[0]);
  others.clear();
  return results;
}

// The magnitudes of floating-point numbers are in the order of their bits, and what is no number is above all.
template <class Number>
struct Magnitude {
  using Kept = typename Number::Kept;
  using Bits = std::conditional_t<sizeof(Kept) == 8, std::int64_t,
                                  std::conditional_t<sizeof(Kept) == 4, std::int32_t, std::int16_t>>;

  [[gnu::always_inline]] static double largest(const Kept* numbers, std::size_t count) {
    constexpr Bits kNoSign = std::numeric_limits<Bits>::max();
    Bits most = 0;
    for (std::size_t i = 0; i < count; ++i) {
      most = std::max(most, static_cast<Bits>(std::bit_cast<Bits>(numbers[i]) & kNoSign));
    }
    return static_cast<double>(Number::widened(std::bit_cast<Kept>(most)));
  }
};

template <class Number>
[[gnu::always_inline]] inline void add_squares(const typename Number::Kept* numbers, std::size_t count, Shifts shifts,
                                               double* sums) {
  double first[kLanes] = {}, second[kLanes] = {};
  const auto add = [&](std::size_t i, std::size_t lane) __attribute__((always_inline)) {
    const double number = static_cast<double>(Number::widened(numbers[i]));
    const double square = number * number;
    const double rounded = (square + shifts.first) - shifts.first;
    const double rest = square - rounded;
    first[lane] += rounded;
    second[lane] += (rest + shifts.second) - shifts.second;
  };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (; i < count; ++i) add(i, 0);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    sums[0] += first[lane];
    sums[1] += second[lane];
  }
}

template <class Number>
double largest_of(const Numbers& array, const Piece& piece) {
  return Magnitude<Number>::largest(static_cast<const typename Number::Kept*>(array.data) + piece.begin, piece.count);
}

template <class Number>
void add_of(const Numbers& array, const Piece& piece, Shifts shifts, double* sums) {
  add_squares<Number>(static_cast<const typename Number::Kept*>(array.data) + piece.begin, piece.count, shifts, sums);
}

#if defined(__x86_64__)
template <class Number>
[[gnu::target("avx2")]] double largest_of_avx2(const Numbers& array, const Piece& piece) {
  return Magnitude<Number>::largest(static_cast<const typename Number::Kept*>(array.data) + piece.begin, piece.count);
}

template <class Number>
[[gnu::target("avx2")]] void add_of_avx2(const Numbers& array, const Piece& piece, Shifts shifts, double* sums) {
  add_squares<Number>(static_cast<const typename Number::Kept*>(array.data) + piece.begin, piece.count, shifts, sums);
}

const bool kHasAvx2 = __builtin_cpu_supports("avx2");
#endif

template <class Number>
double largest_here(const Numbers& array, const Piece& piece) {
#if defined(__x86_64__)
  if (kHasAvx2) return largest_of_avx2<Number>(array, piece);
#endif
  return largest_of<Number>(array, piece);
}

template <class Number>
void add_here(const Numbers& array, const Piece& piece, Shifts shifts, double* sums) {
#if defined(__x86_64__)
  if (kHasAvx2) return add_of_avx2<Number>(array, piece, shifts, sums);
#endif
  add_of<Number>(array, piece, shifts, sums);
}

double largest_in(const Numbers& array, const Piece& piece) {
  switch (array.type) {
    case Type::kFloat64: return largest_here<Plain<double>>(array, piece);
    case Type::kBfloat16: return largest_here<Bfloat16>(array, piece);
    case Type::kFloat16: return largest_here<Float16>(array, piece);
    default: return largest_here<Plain<float>>(array, piece);
  }
}

void add_in(const Numbers& array, const Piece& piece, Shifts shifts, double* sums) {
  switch (array.type) {
    case Type::kFloat64: return add_here<Plain<double>>(array, piece, shifts, sums);
    case Type::kBfloat16: return add_here<Bfloat16>(array, piece, shifts, sums);
    case Type::kFloat16: return add_here<Float16>(array, piece, shifts, sums);
    default: return add_here<Plain<float>>(array, piece, shifts, sums);
  }
}

}  // namespace

void largest_magnitudes(std::span<const Numbers> arrays, int threads, std::span<double> largest) {
  const auto take = [](double& most, double value) { most = most != most || value <= most ? most : value; };
  const std::vector<double> none(arrays.size(), 0.0);
  const auto results = in_pieces(arrays, threads, none, [&](std::vector<double>& result, const Piece& piece) {
    take(result[piece.array], largest_in(arrays[piece.array], piece));
  });
  std::fill(largest.begin(), largest.end(), 0.0);
  for (const std::vector<double>& result : results) {
    for (std::size_t array = 0; array < arrays.size(); ++array) take(largest[array], result[array]);
  }
}

void square_sums(std::span<const Numbers> arrays, std::span<const Shifts> shifts, int threads, std::span<double> first,
                 std::span<double> second) {
  const std::vector<double> none(2 * arrays.size(), 0.0);
  const auto results = in_pieces(arrays, threads, none, [&](std::vector<double>& result, const Piece& piece) {
    add_in(arrays[piece.array], piece, shifts[piece.array], &result[2 * piece.array]);
  });
  std::fill(first.begin(), first.end(), 0.0);
  std::fill(second.begin(), second.end(), 0.0);
  for (const std::vector<double>& result : results) {
    for (std::size_t array = 0; array < arrays.size(); ++array) {
      first[array] += result[2 * array];
      second[array] += result[2 * array + 1];
    }
  }
}

}  // namespace phalanx
