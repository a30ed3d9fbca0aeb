// Pulls and pushes of all clients of a server: check, order, log, apply, answer.
//
// A push is let in by the gate, checked and hashed beside other pushes; then, under one short lock, it is written to the
// log and gets its place in the order of each table; then its own thread applies it, beside other pushes but in that
// order for every row. So the log says exactly what is in the tables. Each push has a number of its client and the
// number of its worker's step: whichever comes again is answered and not applied.
//
// Thread-safety: all methods may be called from any thread, none of which holds Python's lock. Control (declare, leave,
// shrink, snapshots) happens in Python, alone: inside `gate().enter_alone` or before the server listens.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server_budget.h"
#include "server_clients.h"
#include "server_clocks.h"
#include "server_counts.h"
#include "server_gate.h"
#include "server_log.h"
#include "server_push.h"
#include "server_request.h"

namespace phalanx {

class ServerEngine : public DataHandler {
 public:
  // `failed` is told the error after which the server cannot continue.
  ServerEngine(std::shared_ptr<Gate> gate, std::function<void(const Refusal&)> failed);

  DataReply answer(const DataRequest& request, Caller& caller) override;

  // --- control, alone ---

  Gate& gate() { return *gate_; }
  void put_table(std::uint64_t salt, ServerTable table);  // in place of the one of this salt
  void set_clocks(std::shared_ptr<Clocks> clocks);
  void set_log(std::shared_ptr<ServerLog> log);
  void set_budget(std::uint64_t bytes);  // what all tables may take together; no limit before
  const ServerCounts& counts() const { return counts_; }
  // Applies a push from the log, whatever the budget: it was answered.
  void replay(const DataRequest& request);
  // Applies the steps that every live worker has pushed, if there are any.
  std::uint64_t complete_steps();
  // Writes the pushes of a step that is not complete to the log again; they are in no table yet. Each is its worker's,
  // whose process may be another by now, and has no number: that request was answered.
  void append_pending();

  // Lets a lost worker's push of a step that is not complete count no more until `settle` says whether it does, so that
  // this step cannot become complete meanwhile. Returns the worker's pushes, that one included.
  std::int64_t withhold(int worker);
  // Counts a push that is withheld if it is among the worker's first `pushes`, and drops it if not.
  void settle(int worker, std::int64_t pushes);
  std::vector<int> withheld() const;
  void restore_withheld(int worker);  // before the log behind a base is applied, which has its push

  bool admit(std::uint64_t client, int worker);
  void restore_client(std::uint64_t client, int worker, std::uint64_t last, EarlierReply reply);
  std::map<std::uint64_t, Client> clients() const;  // without their keys
  std::optional<int> worker_of(std::uint64_t client) const;
  // The answer to a request that was done before; null for a new one. An older one than the last gives `{"again": true}`.
  std::optional<std::string> earlier_reply(std::uint64_t client, std::uint64_t seq);
  void record_reply(std::uint64_t client, std::uint64_t seq, std::string json);
  void forget_pulls();

  void stop();  // refuses new pushes

 private:
  struct Place {
    int worker;
    std::shared_ptr<Clocks> clocks;
  };
  class Claim;

  DataReply pull(const DataRequest& request, Caller& caller);
  DataReply push(const DataRequest& request, Caller& caller);
  DataReply take(const DataRequest& request, const WaitReport& report);
  void read(const std::vector<TablePtr>& tables, const std::vector<TablePull>& pulls, Caller& caller);
  std::uint64_t accept(const DataRequest& request, Place place, std::span<const Update> updates);
  std::uint64_t apply_now(std::span<const Update> updates, const std::function<void()>& log);
  std::uint64_t apply_step(const Place& place, StoredPush push, const std::function<void()>& log);
  std::uint64_t complete(Clocks& clocks);
  std::shared_ptr<Clocks> clocks() const;

  Place place_of(std::uint64_t client) const;
  TablePtr table_of(std::uint64_t salt) const;  // REQUIRES: lock_ is held
  std::vector<TablePtr> tables_of(const std::vector<TablePull>& pulls) const;
  std::vector<Update> updates_of(const DataRequest& request) const;
  void check_room(std::span<const Update> updates) const;
  void finish(const DataRequest& request, EarlierReply reply);
  std::optional<DataReply> claim(const DataRequest& request);
  std::uint64_t remember(const DataRequest& request, std::map<std::uint64_t, KeysPtr> keys);
  void make_durable();
  Refusal fail(const Refusal& error);
  Refusal fail(const std::exception& error);

  const std::shared_ptr<Gate> gate_;
  const std::function<void(const Refusal&)> failed_;
  std::atomic<bool> is_stopping_ = false;
  ServerCounts counts_;

  mutable std::mutex order_;  // of the log and the tables; locked before lock_
  std::map<int, StoredPush> pending_;  // of mode sync, by worker: what waits for the rest of its step
  std::set<int> withheld_;             // workers whose push in pending_ does not count, or not yet

  mutable std::mutex lock_;  // of what follows
  mutable Clients clients_;
  std::condition_variable idle_;  // a client's push is done
  std::map<std::uint64_t, TablePtr> tables_;
  std::shared_ptr<Clocks> clocks_;
  std::shared_ptr<ServerLog> log_;
  std::shared_ptr<RowBudget> budget_;
};

}  // namespace phalanx
