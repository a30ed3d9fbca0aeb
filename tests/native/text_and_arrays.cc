// The parser of click logs on text that is broken in every way, and the functions on arrays at their borders.

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "../../csrc/bags.h"
#include "../../csrc/images.h"
#include "../../csrc/shm_reduce.h"
#include "../../csrc/shuffle.h"
#include "../../csrc/slots.h"
#include "../../csrc/square_sums.h"
#include "../../csrc/unique.h"
#include "check.h"

namespace {

const std::vector<std::string> kLines = {
    "1\t0.5\t-2e3\tann\tx\n0\t\t.5\t\t\xff\n1\t1e-40\t7.\tb\tc\r\n",
    "1 age:0.5 user:ann item:77 item:78\n0\tprice:-2e3  user:\n0.25 age:1 price:3.5e2\r\n",
    "",
};

void parse(const phalanx::SlotParser& parser, std::string_view text) {
  // A copy of the exact length: what reads behind it is seen.
  const std::unique_ptr<char[]> exact(new char[text.size()]);
  std::memcpy(exact.get(), text.data(), text.size());
  const phalanx::SlotRows rows = parser.parse({exact.get(), text.size()});
  CHECK(rows.label.size() == static_cast<std::size_t>(rows.rows));
  CHECK(rows.dense.size() == 2 * static_cast<std::size_t>(rows.rows));
  CHECK(rows.first_broken.has_value() == (rows.broken > 0));
}

void test_slots() {
  std::mt19937_64 chance(5);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(chance() % n); };
  for (const bool is_columns : {true, false}) {
    for (const std::uint64_t space : {std::uint64_t{0}, std::uint64_t{7}}) {
      const phalanx::SlotParser parser({true, {"age", "price"}, {"user", "item"}, {"user", "user"}, space}, is_columns);
      for (int round = 0; round < 5000; ++round) {
        std::string text = kLines[below(kLines.size())];
        for (std::size_t change = below(6); change > 0; --change) {
          const std::size_t at = below(text.size() + 1);
          switch (below(4)) {
            case 0: text.resize(at); break;
            case 1: text.insert(at, 1, "\t\n :.-+e019\0\r\xff"[below(14)]); break;
            case 2: text.insert(at, std::string(below(400), '9')); break;
            default: if (at < text.size()) text[at] = static_cast<char>(chance()); break;
          }
        }
        parse(parser, text);
      }
    }
  }
}

void test_unique() {
  const std::vector<std::int64_t> one = {5, -1, 5, INT64_MIN, INT64_MAX}, two = {}, three = {7, 5};
  const std::vector<std::span<const std::int64_t>> arrays = {one, two, three};
  std::vector<std::int64_t> places(7);
  const phalanx::Distinct distinct = phalanx::unique(arrays, places);
  CHECK(distinct.keys.size() == 5 && distinct.counts[0] == 3);
  const std::vector<float> rows(7 * 3, 1);
  std::vector<float> sums(5 * 3);
  phalanx::add_weighted(places, rows.data(), 3, 0.5f, sums.data());
  CHECK(sums[0] == 1.5f);
  std::vector<std::int64_t> order(7), offsets(1025);
  std::vector<std::int64_t> ids(one);
  ids.insert(ids.end(), three.begin(), three.end());
  for (const int servers : {1, 3, 1024}) {
    phalanx::split_by_owner(ids, 9, servers, order, std::span(offsets).first(static_cast<std::size_t>(servers) + 1));
    CHECK(offsets[static_cast<std::size_t>(servers)] == 7);
  }
}

// More ids than one block of the search has, in two arrays.
void test_unique_of_many() {
  std::vector<std::int64_t> ids(1000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i % 130) << 40;
  const std::vector<std::span<const std::int64_t>> arrays = {std::span(ids).first(65), std::span(ids).subspan(65)};
  std::vector<std::int64_t> places(ids.size());
  const phalanx::Distinct distinct = phalanx::unique(arrays, places);
  CHECK(distinct.keys.size() == 130 && distinct.counts.size() == 130 && distinct.counts[129] == 7);
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK(distinct.keys[static_cast<std::size_t>(places[i])] == ids[i]);
}

void test_unique_of_none() {
  const phalanx::Distinct distinct = phalanx::unique({}, {});
  CHECK(distinct.keys.empty() && distinct.counts.empty());
}

// Rows of all kinds of blocks of values, and of too many for blocks; one bag is empty and the last id in none.
void test_bags() {
  const std::vector<std::int64_t> places = {2, 0, 1, 2, 2, 0}, starts = {0, 3, 3, 5};
  const std::vector<float> weights = {1, 2, 3, 4, 5, 6};
  for (const std::size_t dim : {1, 4, 8, 15, 16, 17, 33, 300}) {
    std::vector<float> rows(3 * dim), pooled(3 * dim, -1);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i / dim + 1);
    phalanx::pool_bags({places, starts, nullptr, 1, true}, rows.data(), dim, pooled.data());
    CHECK(pooled[dim - 1] == 2 && pooled[dim] == 0 && pooled[3 * dim - 1] == 3);
    const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(dim) + 2;
    const std::vector<float> gradients(2 * dim + 4 + dim, 1);
    std::vector<float> sums(3 * dim);
    phalanx::add_bag_gradients({places, starts, weights.data(), 1, false}, gradients.data(), stride, dim, sums.data());
    CHECK(sums[dim - 1] == 2 && sums[dim] == 0 && sums[3 * dim - 1] == 1 + 4 + 5);
  }
}

void test_shuffle() {
  for (const std::uint64_t n : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1000}}) {
    const phalanx::Permutation permutation(n, 3);
    std::vector<std::int64_t> out(n);
    permutation.fill(out, 0, 1);
    std::vector<bool> seen(n);
    for (const std::int64_t at : out) seen[static_cast<std::size_t>(at)] = true;
    for (const bool was : seen) CHECK(was);
  }
  CHECK(phalanx::Permutation(phalanx::Permutation::kMaxSize, 1).at(5) < phalanx::Permutation::kMaxSize);
}

void test_reduce_and_images() {
  using phalanx::Reduce;
  using phalanx::Type;
  for (const Type type : {Type::kFloat32, Type::kFloat64, Type::kBfloat16, Type::kFloat16, Type::kUint8, Type::kInt8,
                          Type::kInt16, Type::kInt32, Type::kInt64, Type::kBool}) {
    for (const std::size_t count : {0, 1, 7, 33}) {
      const std::size_t bytes = count * phalanx::width_of(type);
      std::vector<std::vector<std::byte>> parts(5, std::vector<std::byte>(bytes, std::byte{1}));
      std::vector<const std::byte*> starts;
      for (const auto& part : parts) starts.push_back(part.data());
      std::vector<std::byte> out(bytes);
      for (const Reduce how : {Reduce::kSum, Reduce::kMean, Reduce::kProduct, Reduce::kMin, Reduce::kMax})
        phalanx::reduce(type, how, out.data(), starts, count);
    }
  }
  const std::vector<std::uint8_t> pixels(7 * 3, 255);
  const float scale[] = {1, 2, 3}, shift[] = {0, 1, 2};
  std::vector<float> planes(7 * 3);
  phalanx::scaled_planes(pixels.data(), 7, 3, scale, shift, planes.data());
  CHECK(planes[20] == 255 * 3 + 2);
}

// Of every type, at borders of vectors and pieces: with threads the bits are those without.
void test_square_sums() {
  using phalanx::Numbers;
  using phalanx::Type;
  std::mt19937_64 chance(7);
  for (const Type type : {Type::kFloat32, Type::kFloat64, Type::kBfloat16, Type::kFloat16}) {
    std::vector<std::vector<std::byte>> arrays;
    std::vector<Numbers> numbers;
    for (const std::size_t count : {0, 1, 7, 9, 600'001}) {
      std::vector<std::byte>& array = arrays.emplace_back(count * phalanx::width_of(type), std::byte{0x21});
      for (std::size_t i = 0; i < array.size(); i += phalanx::width_of(type)) array[i] = static_cast<std::byte>(chance());
      numbers.push_back({type, array.data(), count});
    }
    std::vector<double> largest(5), alone(5);
    phalanx::largest_magnitudes(numbers, 4, largest);
    phalanx::largest_magnitudes(numbers, 1, alone);
    CHECK(largest == alone && largest[0] == 0 && largest[4] > 0);
    std::vector<phalanx::Shifts> shifts;
    for (const double value : largest) {
      const double step = 1.5 * std::exp2(std::max(std::ilogb(value * value) + 1, -1000) + 21);
      shifts.push_back({step, step * 0x1p-32});
    }
    std::vector<double> first(5), second(5), first_alone(5), second_alone(5);
    phalanx::square_sums(numbers, shifts, 4, first, second);
    phalanx::square_sums(numbers, shifts, 1, first_alone, second_alone);
    CHECK(first == first_alone && second == second_alone && first[4] > 0);
  }
}

}  // namespace

void test_text_and_arrays() {
  test_slots();
  test_unique();
  test_unique_of_many();
  test_unique_of_none();
  test_bags();
  test_shuffle();
  test_reduce_and_images();
  test_square_sums();
}
