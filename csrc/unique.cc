#include "unique.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <stdexcept>

#include "table_hash.h"

namespace phalanx {
namespace {

constexpr std::size_t kBlock = 64;  // ids whose slots are fetched at once

// Open addressing, at most half full: a slot holds the number of an id among the distinct ones from 1, 0 if it is free.
// keys[0] is the id that is looked for, so that it is found in a free slot too: whether an id is new is hard to foresee, so
// no branch depends on it.
struct Seen {
  std::uint32_t* slots;
  std::size_t mask;
  std::int64_t* keys;
  std::uint32_t* counts;
};

// Counts some ids, kBlock at most, and writes the place of each among the distinct ones. Returns how many of these there
// are now, where there were `size`.
std::uint32_t count_block(const Seen seen, std::span<const std::int64_t> ids, std::uint32_t size,
                          std::int64_t* places) {
  std::uint32_t homes[kBlock];
  for (std::size_t i = 0; i < ids.size(); ++i) {
    homes[i] = static_cast<std::uint32_t>(hash_of(ids[i], 0) & seen.mask);
    __builtin_prefetch(&seen.slots[homes[i]], 1);
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t id = seen.keys[0] = ids[i];
    std::size_t at = homes[i];
    while (seen.keys[seen.slots[at]] != id) at = (at + 1) & seen.mask;
    std::uint32_t number = seen.slots[at];
    const std::uint32_t is_new = number == 0 ? 1 : 0;
    size += is_new;
    number |= size & (0U - is_new);
    seen.slots[at] = number;
    seen.keys[number] = id;
    ++seen.counts[number];
    places[i] = number - 1;
  }
  return size;
}

}  // namespace

Distinct unique(std::span<const std::span<const std::int64_t>> arrays, std::span<std::int64_t> places) {
  if (places.size() >= std::size_t{1} << 31) throw std::length_error("more than 2**31 ids in one step");
  std::vector<std::uint32_t> slots(std::bit_ceil(std::max<std::size_t>(2 * places.size(), 16)));
  std::vector<std::uint32_t> counts(places.size() + 1);
  const auto keys = std::make_unique_for_overwrite<std::int64_t[]>(places.size() + 1);
  const Seen seen{slots.data(), slots.size() - 1, keys.get(), counts.data()};
  std::uint32_t size = 0;
  std::int64_t* out = places.data();
  for (const std::span<const std::int64_t>& ids : arrays) {
    for (std::size_t begin = 0; begin < ids.size(); begin += kBlock) {
      const auto block = ids.subspan(begin, std::min(kBlock, ids.size() - begin));
      size = count_block(seen, block, size, out);
      out += block.size();
    }
  }
  const std::int64_t* const first_key = keys.get() + 1;
  return {{first_key, first_key + size}, {counts.begin() + 1, counts.begin() + 1 + size}};
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
