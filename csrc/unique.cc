#include "unique.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "table_hash.h"

namespace phalanx {
namespace {

constexpr std::size_t kAhead = 16;
constexpr std::uint32_t kNone = 0xFFFFFFFF;

// Open addressing over the places of distinct ids, at most half full.
class Places {
 public:
  explicit Places(std::size_t most)
      : slots_(std::bit_ceil(std::max<std::size_t>(2 * most, 16)), kNone), mask_(slots_.size() - 1) {}

  void prefetch(std::int64_t id) const { __builtin_prefetch(&slots_[home(id)], 1); }

  std::uint32_t place_of(std::int64_t id, Distinct& found) {
    std::size_t at = home(id);
    while (slots_[at] != kNone && found.keys[slots_[at]] != id) at = (at + 1) & mask_;
    if (slots_[at] == kNone) {
      slots_[at] = static_cast<std::uint32_t>(found.keys.size());
      found.keys.push_back(id);
      found.counts.push_back(0);
    }
    return slots_[at];
  }

 private:
  std::size_t home(std::int64_t id) const { return hash_of(id, 0) & mask_; }

  std::vector<std::uint32_t> slots_;
  std::size_t mask_;
};

}  // namespace

Distinct unique(std::span<const std::span<const std::int64_t>> arrays, std::span<std::int64_t> places) {
  if (places.size() >= std::size_t{1} << 31) throw std::length_error("more than 2**31 ids in one step");
  Distinct found;
  Places seen(places.size());
  std::int64_t* out = places.data();
  for (const std::span<const std::int64_t>& ids : arrays) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (i + kAhead < ids.size()) seen.prefetch(ids[i + kAhead]);
      const std::uint32_t place = seen.place_of(ids[i], found);
      ++found.counts[place];
      *out++ = place;
    }
  }
  return found;
}

void add_weighted(std::span<const std::int64_t> places, const float* rows, std::size_t dim, float weight,
                  float* sums) {
  for (const std::int64_t place : places) {
    float* const sum = sums + static_cast<std::size_t>(place) * dim;
    for (std::size_t j = 0; j < dim; ++j) sum[j] += weight * rows[j];
    rows += dim;
  }
}

void split_by_owner(std::span<const std::int64_t> keys, std::uint64_t salt, int servers,
                    std::span<std::int64_t> order, std::span<std::int64_t> offsets) {
  const auto owner = [&](std::int64_t key) {
    return static_cast<std::size_t>(shard_of(hash_of(key, salt)) * servers / kShards);
  };
  std::fill(offsets.begin(), offsets.end(), 0);
  for (const std::int64_t key : keys) ++offsets[owner(key) + 1];
  for (std::size_t server = 1; server < offsets.size(); ++server) offsets[server] += offsets[server - 1];
  std::vector<std::int64_t> next(offsets.begin(), offsets.end());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    order[static_cast<std::size_t>(next[owner(keys[i])]++)] = static_cast<std::int64_t>(i);
  }
}

}  // namespace phalanx
