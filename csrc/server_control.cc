// What Python's control does with the engine: tables, clocks, clients.

#include "server_engine.h"

namespace phalanx {

void ServerEngine::put_table(std::uint64_t salt, ServerTable table) {
  TablePtr previous = std::make_shared<const ServerTable>(std::move(table));
  const std::lock_guard locked(lock_);
  tables_[salt].swap(previous);
}

void ServerEngine::set_clocks(std::shared_ptr<Clocks> clocks) {
  const std::lock_guard locked(lock_);
  clocks_.swap(clocks);
}

void ServerEngine::set_log(std::shared_ptr<ServerLog> log) {
  const std::lock_guard locked(lock_);
  log_.swap(log);
}

void ServerEngine::set_budget(std::uint64_t bytes) {
  const std::lock_guard locked(lock_);
  budget_ = std::make_shared<RowBudget>(bytes);
}

std::int64_t ServerEngine::withhold(int worker) {
  const std::shared_ptr<Clocks> counts = clocks();
  const std::lock_guard ordered(order_);
  const std::int64_t pushes = counts->next_step(worker);
  const auto waiting = pending_.find(worker);
  // Whoever has left is waited for no more: the step that has its push may become complete at any time.
  if (waiting == pending_.end() || !counts->counts().live.at(static_cast<std::size_t>(worker))) return pushes;
  const auto after = static_cast<std::int64_t>(waiting->second.step) + 1;
  withheld_.insert(worker);
  if (pushes == after) counts->take_back(worker);
  return after;
}

void ServerEngine::settle(int worker, std::int64_t pushes) {
  const std::shared_ptr<Clocks> counts = clocks();
  const std::lock_guard ordered(order_);
  if (withheld_.erase(worker) == 0) return;
  const auto waiting = pending_.find(worker);
  if (waiting == pending_.end()) return;
  const auto step = static_cast<std::int64_t>(waiting->second.step);
  if (counts->next_step(worker) != step) return;  // it counts already
  if (step < pushes) {
    counts->push(worker);
  } else {
    pending_.erase(waiting);
  }
}

std::vector<int> ServerEngine::withheld() const {
  const std::lock_guard ordered(order_);
  return {withheld_.begin(), withheld_.end()};
}

void ServerEngine::restore_withheld(int worker) {
  const std::lock_guard ordered(order_);
  withheld_.insert(worker);
}

bool ServerEngine::admit(std::uint64_t client, int worker) {
  const std::lock_guard locked(lock_);
  return clients_.admit(client, worker);
}

void ServerEngine::restore_client(std::uint64_t client, int worker, std::uint64_t last, EarlierReply reply) {
  const std::lock_guard locked(lock_);
  Client& restored = clients_.all[client];
  restored.worker = worker;
  restored.last = last;
  restored.reply = std::move(reply);
}

std::map<std::uint64_t, Client> ServerEngine::clients() const {
  const std::lock_guard locked(lock_);
  std::map<std::uint64_t, Client> all = clients_.all;
  for (auto& [number, client] : all) client.pulled_keys.clear();
  return all;
}

std::optional<int> ServerEngine::worker_of(std::uint64_t client) const {
  const std::lock_guard locked(lock_);
  const Client* const found = clients_.find(client);
  return found == nullptr ? std::nullopt : std::optional(found->worker);
}

std::optional<std::string> ServerEngine::earlier_reply(std::uint64_t client, std::uint64_t seq) {
  const std::lock_guard locked(lock_);
  const Client& asking = clients_[client];
  if (seq > asking.last) return std::nullopt;
  return seq == asking.last ? asking.reply.json : "{\"again\":true}";
}

void ServerEngine::record_reply(std::uint64_t client, std::uint64_t seq, std::string json) {
  const std::lock_guard locked(lock_);
  Client& asking = clients_[client];
  if (seq <= asking.last) return;
  asking.last = seq;
  asking.reply = {std::move(json), std::nullopt};
}

void ServerEngine::forget_pulls() {
  const std::lock_guard locked(lock_);
  for (auto& [number, client] : clients_.all) client.pulled_keys.clear();
}

void ServerEngine::stop() { is_stopping_ = true; }

}  // namespace phalanx
