// The newest segment of a server's log: records are appended whole or not at all, and made durable many at a time.
//
// Thread-safety: `append` and `open` by one thread at a time, the rest by any.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace phalanx {

using Bytes = std::span<const std::byte>;

class ServerLog {
 public:
  // With `is_durable` an answer waits until the disk has its record.
  ServerLog(std::string directory, bool is_durable);
  ServerLog(const ServerLog&) = delete;
  ~ServerLog();

  // Writes one record and returns a position to give to `sync`. Throws Refusal if the disk does not take it; the file is
  // then as it was before.
  std::uint64_t append(std::span<const Bytes> parts);
  // Waits until what ends at this position is as durable as this log promises; one fsync serves every record written
  // before it began. Throws Refusal if an fsync failed: what the disk holds is then unknown, and so the server must end.
  void sync(std::uint64_t position);
  // Continues in a new file, with everything before it flushed. Throws std::system_error if the disk takes none.
  void open(const std::string& path);
  void close();

  std::uint64_t position() const;  // where the newest record ends
  std::uint64_t syncs() const;     // fsyncs so far

 private:
  void flush(std::unique_lock<std::mutex>& locked);
  std::string refused(std::size_t size, int error) const;

  const std::string directory_;
  const bool is_durable_;
  mutable std::mutex lock_;
  std::condition_variable flushed_;
  int fd_ = -1;
  std::uint64_t end_ = 0;
  std::uint64_t synced_ = 0;
  std::uint64_t syncs_ = 0;
  bool is_syncing_ = false;
  std::optional<int> failed_;  // errno of an fsync
};

}  // namespace phalanx
