// The clients of a server: the last request of each that changed something, and the keys of its open pulls.
//
// Not thread-safe: its engine's lock guards it.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server_push.h"

namespace phalanx {

// What a request was answered: a JSON object, and of a push the gradients that no row took.
struct EarlierReply {
  std::string json = "{}";
  std::optional<std::uint64_t> dropped;
};

// One worker's process.
struct Client {
  // Pulls whose keys are remembered; an older one's push must bring its keys.
  static constexpr std::size_t kPulls = 16;

  int worker = 0;
  std::uint64_t last = 0;  // number of the last request that changed something
  EarlierReply reply;      // its answer
  bool is_busy = false;    // a push of it is being done
  bool owes_keys = false;  // it was asked to send a push again, so that the pushes behind that one come too early
  std::map<std::uint64_t, std::map<std::uint64_t, KeysPtr>> pulled_keys;  // by pull and table

  void remember(std::uint64_t pull, std::map<std::uint64_t, KeysPtr> keys);
  KeysPtr keys_of(const TablePush& sent) const;  // null if that pull is forgotten
  bool remembers(const std::vector<TablePush>& pushes) const;
  void forget(const std::vector<TablePush>& pushes);
};

class Clients {
 public:
  Clients();

  // Throws Refusal for a process that declared no tables.
  Client& operator[](std::uint64_t client);
  Client* find(std::uint64_t client);
  // Makes a worker's client, and returns whether it takes the place of an earlier process of that worker.
  bool admit(std::uint64_t client, int worker);
  std::optional<std::uint64_t> newest(int worker) const;
  std::uint64_t next_pull() { return ++pulls_; }

  std::map<std::uint64_t, Client> all;

 private:
  std::uint64_t pulls_;
};

}  // namespace phalanx
