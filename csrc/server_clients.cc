#include "server_clients.h"

#include <algorithm>
#include <random>
#include <utility>

namespace phalanx {

void Client::remember(std::uint64_t pull, std::map<std::uint64_t, KeysPtr> keys) {
  pulled_keys.emplace(pull, std::move(keys));
  if (pulled_keys.size() > kPulls) pulled_keys.erase(pulled_keys.begin());  // numbers grow, so it is the oldest
}

KeysPtr Client::keys_of(const TablePush& sent) const {
  const auto pull = pulled_keys.find(sent.pull);
  if (pull == pulled_keys.end()) return nullptr;
  const auto keys = pull->second.find(sent.table);
  return keys == pull->second.end() ? nullptr : keys->second;
}

bool Client::remembers(const std::vector<TablePush>& pushes) const {
  return std::all_of(pushes.begin(), pushes.end(),
                     [&](const TablePush& sent) { return sent.pull == 0 || keys_of(sent) != nullptr; });
}

void Client::forget(const std::vector<TablePush>& pushes) {
  for (const TablePush& sent : pushes) {
    if (const auto pull = pulled_keys.find(sent.pull); pull != pulled_keys.end()) pull->second.erase(sent.table);
  }
}

// Never the number of a pull before a restart, whose keys are gone.
Clients::Clients() : pulls_((std::uint64_t{std::random_device{}()} & 0xFFFFFFFF) << 20 | 1) {}

Client& Clients::operator[](std::uint64_t client) {
  if (Client* const found = find(client)) return *found;
  throw Refusal("ConfigError",
                "A request came from a process that declared no tables here, or whose worker was started again since. A "
                "worker declares its tables first; end the older process.");
}

Client* Clients::find(std::uint64_t client) {
  const auto found = all.find(client);
  return found == all.end() ? nullptr : &found->second;
}

bool Clients::admit(std::uint64_t client, int worker) {
  if (find(client) != nullptr) return false;
  const bool replaces = std::erase_if(all, [&](const auto& entry) { return entry.second.worker == worker; }) > 0;
  all[client].worker = worker;
  return replaces;
}

std::optional<std::uint64_t> Clients::newest(int worker) const {
  for (const auto& [number, client] : all)
    if (client.worker == worker) return number;
  return std::nullopt;
}

}  // namespace phalanx
