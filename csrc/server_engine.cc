#include "server_engine.h"

#include <algorithm>
#include <set>

#include "server_push_turns.h"
#include "server_record.h"

namespace phalanx {
namespace {

WaitReport report_to(Caller& caller) {
  return [&caller](const std::string& waits_for, bool is_connected) { caller.report_wait(waits_for, is_connected); };
}

// Far above every step that comes to be, with room to count on.
constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 62;

std::int64_t step_of(const DataRequest& request) { return static_cast<std::int64_t>(std::min(request.step, kMostSteps)); }

std::uint64_t keys_in(const DataRequest& request) {
  std::uint64_t keys = 0;
  for (const TablePush& push : request.pushes) keys += push.rows;
  if (!request.is_push) {
    for (const TablePull& pull : request.pulls) keys += pull.keys.size();
  }
  return keys;
}

Refusal stopping() { return {"ClosedError", "This server is stopping. Start the job again to continue."}; }

}  // namespace

ServerEngine::ServerEngine(std::shared_ptr<Gate> gate, std::function<void(const Refusal&)> failed)
    : gate_(std::move(gate)), failed_(std::move(failed)) {}

DataReply ServerEngine::answer(const DataRequest& request, Caller& caller) {
  const RequestScope scope(counts_, request.is_push ? counts_.pushes : counts_.pulls, keys_in(request));
  return request.is_push ? push(request, caller) : pull(request, caller);
}

// --- reading ---------------------------------------------------------------------------------------------------------

DataReply ServerEngine::pull(const DataRequest& request, Caller& caller) {
  const Place place = place_of(request.client);
  const std::int64_t next_step = place.clocks->next_step(place.worker);
  if (step_of(request) > next_step) {
    // Its own push is not here: refused, or its keys were asked for again. Waiting would block that push.
    return {DataStatus::kNeedPush, static_cast<std::uint64_t>(next_step), 0};
  }
  {
    const WaitScope waits(counts_);
    place.clocks->wait(step_of(request), report_to(caller));
  }
  read(tables_of(request.pulls), request.pulls, caller);
  if (!request.keep) return {};
  std::map<std::uint64_t, KeysPtr> keys;
  for (const TablePull& pull : request.pulls)
    keys[pull.table] = std::make_shared<const std::vector<std::int64_t>>(pull.keys.begin(), pull.keys.end());
  // A push could not say which of two pulls of one table it means.
  if (keys.size() < request.pulls.size()) return {};
  return {DataStatus::kDone, remember(request, std::move(keys)), 0};
}

// A row that cannot be read ends the server: a new one has it from snapshot and log.
void ServerEngine::read(const std::vector<TablePtr>& tables, const std::vector<TablePull>& pulls, Caller& caller) {
  try {
    for (std::size_t i = 0; i < pulls.size(); ++i) {
      const EmbeddingTable& table = *tables[i]->table;
      table.pull(pulls[i].keys, caller.rows(pulls[i].keys.size(), table.spec().dim));
    }
  } catch (const DamagedRow& error) {
    throw fail(error);
  }
}

std::uint64_t ServerEngine::remember(const DataRequest& request, std::map<std::uint64_t, KeysPtr> keys) {
  const std::lock_guard locked(lock_);
  const std::uint64_t number = clients_.next_pull();
  clients_[request.client].remember(number, std::move(keys));
  return number;
}

// --- changing --------------------------------------------------------------------------------------------------------

DataReply ServerEngine::push(const DataRequest& request, Caller& caller) {
  const std::vector<TablePtr> then = tables_of(request.pulls);
  const DataReply reply = take(request, report_to(caller));
  make_durable();
  if (then.empty() || reply.status == DataStatus::kNeedKeys) return reply;
  {
    const WaitScope waits(counts_);
    place_of(request.client).clocks->wait(step_of(request) + 1, report_to(caller));
  }
  read(then, request.pulls, caller);
  return reply;
}

// The claim of a client's newest push, which no other push of that client may be beside.
class ServerEngine::Claim {
 public:
  Claim(ServerEngine& engine, const DataRequest& request)
      : answer(engine.claim(request)), engine_(engine), client_(request.client) {}
  Claim(const Claim&) = delete;
  ~Claim() {
    if (answer) return;
    const std::lock_guard locked(engine_.lock_);
    engine_.clients_[client_].is_busy = false;
    engine_.idle_.notify_all();
  }

  const std::optional<DataReply> answer;  // to a push that is not to be applied

 private:
  ServerEngine& engine_;
  std::uint64_t client_;
};

DataReply ServerEngine::take(const DataRequest& request, const WaitReport& report) {
  const Place place = place_of(request.client);
  const std::int64_t step = step_of(request);
  place.clocks->check();
  const PushPermit permit = [&] {
    const WaitScope waits(counts_);
    if (step <= place.clocks->next_step(place.worker)) place.clocks->wait_turn(step, report);
    return PushPermit(*gate_, place.worker, step, report);
  }();
  // Once more: the worker may have been started again since, and this be the request of its older process.
  const Place now = place_of(request.client);
  const Claim claim(*this, request);
  if (claim.answer) return *claim.answer;
  if (is_stopping_) throw stopping();
  check_weight(request.weight);
  const std::vector<Update> updates = updates_of(request);
  for (const Update& update : updates) check(update);
  check_room(updates);
  DataReply reply;
  reply.dropped = accept(request, now, updates);
  finish(request, {"{\"dropped\":" + std::to_string(reply.dropped) + "}", reply.dropped});
  return reply;
}

// Says how a push is answered that was done before or comes too early; claims its client for one that is to be done.
std::optional<DataReply> ServerEngine::claim(const DataRequest& request) {
  std::unique_lock locked(lock_);
  idle_.wait(locked, [&] { return !clients_[request.client].is_busy; });
  Client& client = clients_[request.client];
  const std::int64_t step = step_of(request), next_step = clocks_->next_step(client.worker);
  if (request.seq == client.last && client.reply.dropped) {
    return DataReply{DataStatus::kDone, 0, *client.reply.dropped};
  }
  if (request.seq <= client.last || step < next_step) return DataReply{DataStatus::kAgain, 0, 0};
  if (step > next_step && !client.owes_keys) {
    throw Refusal("ConfigError", "Worker " + std::to_string(client.worker) + " pushes step " + std::to_string(step) +
                                     ", but its step " + std::to_string(next_step) +
                                     " did not come. Push each step once, in order; after an error push that step "
                                     "again.");
  }
  if (step > next_step || !client.remembers(request.pushes)) {
    client.owes_keys = true;
    return DataReply{DataStatus::kNeedKeys, 0, 0};
  }
  client.is_busy = true;
  return std::nullopt;
}

void ServerEngine::check_room(std::span<const Update> updates) const {
  std::shared_ptr<RowBudget> budget;
  std::vector<TablePtr> tables;
  {
    const std::lock_guard locked(lock_);
    budget = budget_;
    for (const auto& [salt, table] : tables_) tables.push_back(table);
  }
  if (budget) budget->check(tables, updates);
}

// Logs and applies a checked push of a new step; returns how many gradients were dropped.
std::uint64_t ServerEngine::accept(const DataRequest& request, Place place, std::span<const Update> updates) {
  std::shared_ptr<ServerLog> log;
  {
    const std::lock_guard locked(lock_);
    log = log_;
  }
  std::optional<PushRecord> record;
  if (log) record.emplace(request.client, request.seq, request.step, request.weight, updates);
  const auto append = [&] {
    if (log) log->append(record->parts());
  };
  if (place.clocks->mode() == ServerMode::kSync) {
    StoredPush push{request.step, request.weight, {}};
    for (const Update& update : updates) push.updates.emplace_back(update);
    return apply_step(place, std::move(push), append);
  }
  const std::uint64_t dropped = apply_now(updates, append);
  place.clocks->push(place.worker);
  return dropped;
}

std::uint64_t ServerEngine::apply_now(std::span<const Update> updates, const std::function<void()>& log) {
  std::vector<TableChange> changes;
  for (const Update& update : updates) changes.push_back(prepare(update));
  PushTurns places(updates);
  {
    const std::lock_guard ordered(order_);
    log();
    places.order();
  }
  try {
    return places.apply(changes);
  } catch (const std::exception& error) {
    throw fail(error);
  }
}

std::uint64_t ServerEngine::apply_step(const Place& place, StoredPush push, const std::function<void()>& log) {
  const std::lock_guard ordered(order_);
  log();
  pending_.insert_or_assign(place.worker, std::move(push));
  if (!withheld_.contains(place.worker)) place.clocks->push(place.worker);  // or it was written to the log again
  return complete(*place.clocks);
}

std::uint64_t ServerEngine::complete_steps() {
  const std::shared_ptr<Clocks> now = clocks();
  const std::lock_guard ordered(order_);
  return now && now->mode() == ServerMode::kSync ? complete(*now) : 0;
}

// REQUIRES: order_ is held. Nobody pushes the next step before this one is counted as applied.
std::uint64_t ServerEngine::complete(Clocks& clocks) {
  std::uint64_t dropped = 0;
  while (clocks.complete() > clocks.version()) {
    std::vector<StoredPush> parts;
    for (auto& [worker, push] : pending_) parts.push_back(std::move(push));
    pending_.clear();
    try {
      for (const StoredUpdate& average : averaged(std::move(parts))) {
        const Update update = average.view();
        TableChange change = prepare(update);
        dropped += update.table->table->apply(change, update.table->table->order());
      }
    } catch (const std::exception& error) {
      throw fail(error);
    }
    clocks.apply(clocks.version() + 1);
  }
  return dropped;
}

void ServerEngine::replay(const DataRequest& request) {
  const Place place = place_of(request.client);
  EarlierReply reply;
  // One below was written again at the head of a segment, beside the first time.
  if (step_of(request) >= place.clocks->next_step(place.worker)) {
    check_weight(request.weight);
    const std::vector<Update> updates = updates_of(request);
    for (const Update& update : updates) check(update);
    const std::uint64_t dropped = accept(request, place, updates);
    reply = {"{\"dropped\":" + std::to_string(dropped) + "}", dropped};
  }
  finish(request, std::move(reply));
}

void ServerEngine::finish(const DataRequest& request, EarlierReply reply) {
  const std::lock_guard locked(lock_);
  Client& client = clients_[request.client];
  client.owes_keys = false;
  client.forget(request.pushes);
  if (request.seq <= client.last) return;
  client.last = request.seq;
  client.reply = std::move(reply);
}

void ServerEngine::append_pending() {
  const std::lock_guard ordered(order_);
  for (const auto& [worker, push] : pending_) {
    std::vector<Update> updates;
    for (const StoredUpdate& update : push.updates) updates.push_back(update.view());
    const std::lock_guard locked(lock_);
    const PushRecord record(clients_.newest(worker).value(), 0, push.step, push.weight, updates);
    log_->append(record.parts());
  }
}

// --- inside ----------------------------------------------------------------------------------------------------------

ServerEngine::Place ServerEngine::place_of(std::uint64_t client) const {
  const std::lock_guard locked(lock_);
  const int worker = clients_[client].worker;
  if (!clocks_) throw Refusal("ConfigError", "This server holds no tables yet. Declare them first.");
  return {worker, clocks_};
}

std::shared_ptr<Clocks> ServerEngine::clocks() const {
  const std::lock_guard locked(lock_);
  return clocks_;
}

TablePtr ServerEngine::table_of(std::uint64_t salt) const {
  const auto found = tables_.find(salt);
  if (found != tables_.end()) return found->second;
  std::set<std::string> names;
  for (const auto& [number, table] : tables_) names.insert(table->name);
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
  throw Refusal("ConfigError", "There is no table with the salt " + std::to_string(salt) + "; tables: [" + list +
                                   "]. Declare it first.");
}

std::vector<TablePtr> ServerEngine::tables_of(const std::vector<TablePull>& pulls) const {
  const std::lock_guard locked(lock_);
  std::vector<TablePtr> tables;
  for (const TablePull& pull : pulls) tables.push_back(table_of(pull.table));
  return tables;
}

std::vector<Update> ServerEngine::updates_of(const DataRequest& request) const {
  const std::lock_guard locked(lock_);
  const Client& client = clients_[request.client];
  std::vector<Update> updates;
  for (const TablePush& sent : request.pushes) {
    Update& update = updates.emplace_back(Update{table_of(sent.table), sent, nullptr});
    if (sent.pull == 0) continue;
    update.pulled_keys = client.keys_of(sent);
    if (!update.pulled_keys) throw Refusal("ConfigError", "A push from the log names a pull. Start from a snapshot.");
    update.sent.keys = *update.pulled_keys;
  }
  return updates;
}

void ServerEngine::make_durable() {
  std::shared_ptr<ServerLog> log;
  {
    const std::lock_guard locked(lock_);
    log = log_;
  }
  if (!log) return;
  try {
    log->sync(log->position());
  } catch (const Refusal& error) {
    throw fail(error);
  }
}

Refusal ServerEngine::fail(const Refusal& error) {
  is_stopping_ = true;
  failed_(error);
  return error;
}

Refusal ServerEngine::fail(const std::exception& error) {
  if (dynamic_cast<const DamagedRow*>(&error) != nullptr) return fail(Refusal("DataError", error.what()));
  return fail(Refusal("InternalError", std::string("A checked 'push' failed: ") + error.what() +
                                           ". This server stops; please report it."));
}

}  // namespace phalanx
