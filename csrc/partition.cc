#include "partition.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "numbers.h"
#include "unique.h"
#include "wire_data.h"

namespace phalanx {
namespace {

std::uint64_t pull_of(const PartitionedRequest::Push& push, int server, bool with_keys) {
  return with_keys || push.pulls == nullptr ? 0 : push.pulls[server];
}

template <class Head>
void append(std::string& out, const Head& head) {
  out.append(reinterpret_cast<const char*>(&head), sizeof head);
}

// Copies a row; a call for each of those of usual sizes would cost as much as the copy.
inline void copy_row(std::byte* to, const void* from, std::size_t bytes) {
  switch (bytes) {
    case 4: std::memcpy(to, from, 4); return;
    case 8: std::memcpy(to, from, 8); return;
    case 16: std::memcpy(to, from, 16); return;
    case 32: std::memcpy(to, from, 32); return;
    case 64: std::memcpy(to, from, 64); return;
    case 128: std::memcpy(to, from, 128); return;
    default: std::memcpy(to, from, bytes);
  }
}

// Copies a server's part of an array of `width` values per key.
template <class T>
void gather(const KeyPartition& partition, int server, const T* values, std::size_t width, std::byte* to) {
  if (partition.is_whole()) {
    std::memcpy(to, values, partition.count(server) * width * sizeof(T));
    return;
  }
  for (const std::int64_t position : partition.positions(server)) {
    copy_row(to, values + static_cast<std::size_t>(position) * width, width * sizeof(T));
    to += width * sizeof(T);
  }
}

std::uint16_t* halves(std::byte* at) { return reinterpret_cast<std::uint16_t*>(at); }

// As `gather`, with the values rounded to bfloat16.
void gather_narrow(const KeyPartition& partition, int server, const float* values, std::size_t width, std::byte* to) {
  if (partition.is_whole()) return narrow({values, partition.count(server) * width}, halves(to));
  for (const std::int64_t position : partition.positions(server)) {
    narrow({values + static_cast<std::size_t>(position) * width, width}, halves(to));
    to += width * sizeof(std::uint16_t);
  }
}

// Copies values of a reply that lie one after the other.
void copy_rows(const std::byte* from, bool is_narrow, std::size_t values, float* to) {
  if (is_narrow) {
    widen({reinterpret_cast<const std::uint16_t*>(from), values}, to);
  } else if (values != 0) {
    copy_row(reinterpret_cast<std::byte*>(to), from, values * sizeof(float));
  }
}

}  // namespace

KeyPartition::KeyPartition(std::span<const std::int64_t> keys, std::uint64_t salt, int servers)
    : keys_(keys), salt_(salt), offsets_(static_cast<std::size_t>(servers) + 1) {
  if (servers == 1) {
    offsets_[1] = static_cast<std::int64_t>(keys.size());
    return;
  }
  order_.resize(keys.size());
  split_by_owner(keys, salt, servers, order_, offsets_);
}

std::size_t KeyPartition::count(int server) const {
  const auto at = static_cast<std::size_t>(server);
  return static_cast<std::size_t>(offsets_[at + 1] - offsets_[at]);
}

std::span<const std::int64_t> KeyPartition::positions(int server) const {
  if (order_.empty()) return {};
  return std::span(order_).subspan(static_cast<std::size_t>(offsets_[static_cast<std::size_t>(server)]), count(server));
}

bool PartitionedRequest::has_pulls(int server) const {
  return std::any_of(pulls_.begin(), pulls_.end(), [&](const Pull& pull) { return pull.partition->count(server) > 0; });
}

std::pair<std::size_t, std::size_t> PartitionedRequest::counts(int server) const {
  return {pushes_.size(), has_pulls(server) ? pulls_.size() : 0};
}

std::vector<int> PartitionedRequest::read_servers() const {
  std::vector<int> servers;
  const int count = pulls_.empty() ? 0 : static_cast<int>(pulls_.front().partition->servers());
  for (int server = 0; server < count; ++server) {
    if (has_pulls(server)) servers.push_back(server);
  }
  return servers;
}

std::string PartitionedRequest::heads(int server, bool with_keys) const {
  std::string out;
  for (const Push& push : pushes_) {
    PushHead head;
    head.table = push.partition->salt();
    head.pull = pull_of(push, server, with_keys);
    head.lr = push.lr;
    head.rows = static_cast<std::uint32_t>(push.partition->count(server));
    head.dim = static_cast<std::uint32_t>(push.dim);
    head.kind = static_cast<std::uint8_t>(push.kind);
    head.columns = static_cast<std::uint8_t>((push.has_lr ? kHasLr : 0) | (push.counts ? kHasCounts : 0) |
                                             (push.shows ? kHasShows : 0) | (push.clicks ? kHasClicks : 0) |
                                             (push.is_narrow ? kBfloat16Values : 0));
    append(out, head);
  }
  if (!has_pulls(server)) return out;
  for (const Pull& pull : pulls_) {
    PullHead head;
    head.table = pull.partition->salt();
    head.keys = static_cast<std::uint32_t>(pull.partition->count(server));
    head.flags = pull.is_narrow ? kBfloat16Rows : 0;
    append(out, head);
  }
  return out;
}

// Calls place(partition, values, width, is_narrow) for each array of a server's payload, in order.
template <class Place>
void PartitionedRequest::each_array(int server, bool with_keys, Place place) const {
  for (const Push& push : pushes_) {
    const KeyPartition& partition = *push.partition;
    if (pull_of(push, server, with_keys) == 0) place(partition, partition.keys().data(), 1, false);
    place(partition, push.values, push.dim, push.is_narrow);
    if (push.counts) place(partition, push.counts, 1, false);
    if (push.shows) place(partition, push.shows, 1, false);
    if (push.clicks) place(partition, push.clicks, 1, false);
  }
  if (!has_pulls(server)) return;
  for (const Pull& pull : pulls_) place(*pull.partition, pull.partition->keys().data(), 1, false);
}

std::uint64_t PartitionedRequest::payload_bytes(int server, bool with_keys) const {
  std::uint64_t end = 0;
  each_array(server, with_keys, [&]<class T>(const KeyPartition& partition, const T*, std::size_t width, bool is_narrow) {
    end = aligned(end) + partition.count(server) * width * (is_narrow ? sizeof(std::uint16_t) : sizeof(T));
  });
  return end;
}

void PartitionedRequest::write(int server, bool with_keys, std::byte* payload) const {
  std::uint64_t end = 0;
  each_array(server, with_keys, [&]<class T>(const KeyPartition& partition, const T* values, std::size_t width,
                                            bool is_narrow) {
    const std::size_t item = is_narrow ? sizeof(std::uint16_t) : sizeof(T);
    const std::uint64_t start = aligned(end), bytes = partition.count(server) * width * item;
    std::memset(payload + end, 0, start - end);
    end = start + bytes;
    if (bytes == 0) return;
    if constexpr (std::is_same_v<T, float>) {
      if (is_narrow) return gather_narrow(partition, server, values, width, payload + start);
    }
    gather(partition, server, values, width, payload + start);
  });
}

std::vector<std::uint64_t> PartitionedRequest::row_places(int server) const {
  std::vector<std::uint64_t> places;
  std::uint64_t end = 0;
  for (const Pull& pull : pulls_) {
    places.push_back(aligned(end));
    end = places.back() + pull.partition->count(server) * pull.row_bytes();
  }
  return places;
}

std::uint64_t PartitionedRequest::rows_bytes(int server) const {
  if (!has_pulls(server)) return 0;
  const Pull& last = pulls_.back();
  return row_places(server).back() + last.partition->count(server) * last.row_bytes();
}

void PartitionedRequest::merge(int server, const std::byte* rows, std::span<float* const> into) const {
  const std::vector<std::uint64_t> places = row_places(server);
  for (std::size_t i = 0; i < pulls_.size(); ++i) {
    const Pull& pull = pulls_[i];
    const std::byte* from = rows + places[i];
    if (pull.partition->is_whole()) {
      copy_rows(from, pull.is_narrow, pull.partition->count(server) * pull.dim, into[i]);
      continue;
    }
    for (const std::int64_t position : pull.partition->positions(server)) {
      copy_rows(from, pull.is_narrow, pull.dim, into[i] + static_cast<std::size_t>(position) * pull.dim);
      from += pull.row_bytes();
    }
  }
}

}  // namespace phalanx
