// A pull or push of any number of tables, cut into one frame per server (wire_data.h), and its rows merged: what a client
// does for every step. Twin of ps/stores/partition_numpy.py.
//
// Ownership: arrays and partitions are the caller's, who keeps them, unchanged, until the request is answered.
// Thread-safety: one thread at a time; const methods any thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server_request.h"

namespace phalanx {

// Which of a table's ids go to which server.
class KeyPartition {
 public:
  // REQUIRES: 1 <= servers <= 1024.
  KeyPartition(std::span<const std::int64_t> keys, std::uint64_t salt, int servers);

  std::span<const std::int64_t> keys() const { return keys_; }
  std::uint64_t salt() const { return salt_; }
  std::size_t servers() const { return offsets_.size() - 1; }
  std::size_t count(int server) const;
  // Positions of a server's ids; empty where one server has them all, in their order.
  std::span<const std::int64_t> positions(int server) const;
  bool is_whole() const { return servers() == 1; }

 private:
  std::span<const std::int64_t> keys_;
  std::uint64_t salt_;
  std::vector<std::int64_t> order_, offsets_;
};

class PartitionedRequest {
 public:
  struct Push {
    const KeyPartition* partition;
    const std::uint64_t* pulls = nullptr;  // by server, the number of the pull that brought the keys; 0 for none
    UpdateKind kind = UpdateKind::kGradient;
    bool has_lr = false;
    double lr = 0;
    std::size_t dim = 0;
    const float* values = nullptr;
    bool is_narrow = false;                 // whether they go out as bfloat16
    const std::uint32_t* counts = nullptr;  // these three: one value per key, or null
    const float* shows = nullptr;
    const float* clicks = nullptr;
  };

  void add_push(const Push& push) { pushes_.push_back(push); }
  // `is_narrow`: whether the rows are to come as bfloat16.
  void add_pull(const KeyPartition& partition, std::size_t dim, bool is_narrow = false) {
    pulls_.push_back({&partition, dim, is_narrow});
  }

  // Tables that a server's frame pushes and pulls: no pulls where it has none of their keys.
  std::pair<std::size_t, std::size_t> counts(int server) const;

  // Servers that own some of the keys that are read, in ascending order.
  std::vector<int> read_servers() const;

  // PushHead and PullHead of each table. `with_keys`: keys come along even where an earlier pull brought them.
  std::string heads(int server, bool with_keys) const;
  std::uint64_t payload_bytes(int server, bool with_keys) const;
  void write(int server, bool with_keys, std::byte* payload) const;  // REQUIRES: payload_bytes there

  std::uint64_t rows_bytes(int server) const;
  // Where the rows of each pull begin in a reply.
  std::vector<std::uint64_t> row_places(int server) const;
  // Puts a server's rows to their places in (keys, dim) arrays, one per pull. REQUIRES: rows_bytes there.
  void merge(int server, const std::byte* rows, std::span<float* const> into) const;

  std::size_t pulls() const { return pulls_.size(); }
  const KeyPartition& partition_of(std::size_t pull) const { return *pulls_[pull].partition; }
  std::size_t dim_of(std::size_t pull) const { return pulls_[pull].dim; }
  bool is_narrow(std::size_t pull) const { return pulls_[pull].is_narrow; }

 private:
  struct Pull {
    const KeyPartition* partition;
    std::size_t dim;
    bool is_narrow;

    std::size_t value_bytes() const { return is_narrow ? sizeof(std::uint16_t) : sizeof(float); }
    std::size_t row_bytes() const { return dim * value_bytes(); }
  };

  template <class Place>
  void each_array(int server, bool with_keys, Place place) const;
  bool has_pulls(int server) const;

  std::vector<Push> pushes_;
  std::vector<Pull> pulls_;
};

}  // namespace phalanx
