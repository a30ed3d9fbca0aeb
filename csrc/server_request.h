// What a session hands to the server's engine, and what comes back: pulls and pushes of all tables of a step.
//
// A table is named by its salt (ps/table/placement.py, table_salt), which is the same on every server.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace phalanx {

struct TablePull {
  std::uint64_t table;
  std::span<const std::int64_t> keys;
};

enum class UpdateKind : std::uint8_t { kGradient, kDelta, kAssign };

struct TablePush {
  std::uint64_t table;
  UpdateKind kind;
  std::uint64_t pull = 0;  // number of the earlier pull whose keys these are; 0: the keys come along
  std::span<const std::int64_t> keys;
  std::span<const float> values;  // (keys, dim)
  bool has_lr = false;
  double lr = 0;
  const std::uint32_t* counts = nullptr;  // these three: one value per key, or null
  const float* shows = nullptr;
  const float* clicks = nullptr;
  std::uint32_t rows = 0;  // of `values` and the columns; the number of keys
};

struct DataRequest {
  bool is_push = false;
  std::uint64_t client = 0;
  std::uint64_t seq = 0;
  std::uint64_t step = 0;
  double weight = 1;               // of a push
  bool keep = false;               // of a pull: remember its keys for a push
  std::vector<TablePush> pushes;   // of a push
  std::vector<TablePull> pulls;    // of a pull, or what is read once the push is in place
};

enum class DataStatus : std::uint8_t { kDone, kAgain, kNeedPush, kNeedKeys };

struct DataReply {
  DataStatus status = DataStatus::kDone;
  std::uint64_t number = 0;   // kDone of a kept pull: the pull's number, never 0; kNeedPush: the step that is due
  std::uint64_t dropped = 0;  // gradients of a push that no row took
};

// An error that the client raises: name of a class of phalanx.errors, and its message.
struct Refusal : std::runtime_error {
  Refusal(std::string error, const std::string& message) : std::runtime_error(message), error(std::move(error)) {}
  std::string error;
};

// Tells who waits for whom, in words, and whether all of them are connected; may throw to give up.
using WaitReport = std::function<void(const std::string&, bool)>;

// The one that asks, as the engine sees it.
class Caller {
 public:
  virtual ~Caller() = default;
  // Memory for the next table's rows of the reply, in the order of `pulls`.
  virtual float* rows(std::size_t count, std::size_t dim) = 0;
  // Tells the client for whom its answer waits; throws if the client is gone.
  virtual void report_wait(const std::string& waits_for, bool is_connected) = 0;
};

class DataHandler {
 public:
  virtual ~DataHandler() = default;
  // Any number of threads, none of which holds the GIL. Throws Refusal.
  virtual DataReply answer(const DataRequest& request, Caller& caller) = 0;
};

}  // namespace phalanx
