// The record of a push in the log, in the format of ps/snapshot/records.py and ps/server/log.py.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "server_log.h"
#include "server_push.h"

namespace phalanx {

// The bytes of one record; its arrays are those of the updates, which must last as long as it.
class PushRecord {
 public:
  PushRecord(std::uint64_t client, std::uint64_t seq, std::uint64_t step, double weight,
             std::span<const Update> updates);
  PushRecord(const PushRecord&) = delete;

  std::span<const Bytes> parts() const { return parts_; }

 private:
  static constexpr std::size_t kHeaderBytes = 28;

  void describe(const Update& update, std::string& changes, std::string& arrays);

  std::array<std::byte, kHeaderBytes> header_;
  std::string text_;
  std::vector<Bytes> parts_;
};

}  // namespace phalanx
