// The server's engine: checksums, the gate, clocks, and pushes of many clients at once.

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>

#include "../../csrc/crc32.h"
#include "../../csrc/server_engine.h"
#include "check.h"

namespace {

using namespace phalanx;

void sum_bytes() {
  const auto bit_by_bit = [](std::span<const std::byte> data) {
    std::uint32_t state = ~0u;
    for (const std::byte byte : data) {
      state ^= static_cast<std::uint32_t>(byte);
      for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ (state & 1 ? 0xEDB88320 : 0);
    }
    return ~state;
  };
  std::vector<std::byte> bytes(700);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i + 7 * i);
  for (std::size_t first = 0; first < 3; ++first) {
    for (std::size_t size = 0; size + first <= bytes.size(); size += size < 200 ? 1 : 37) {
      const std::vector<std::byte> part(bytes.begin() + static_cast<std::ptrdiff_t>(first),
                                        bytes.begin() + static_cast<std::ptrdiff_t>(first + size));
      CHECK(crc32(part) == bit_by_bit(part));
      CHECK(crc32(std::span(part).subspan(size / 3), crc32(std::span(part).first(size / 3))) == bit_by_bit(part));
    }
  }
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::shared_ptr<Gate> make_gate(double report_s = 5) {
  return std::make_shared<Gate>(seconds, [](const std::string&) {}, report_s);
}

// Pushes are beside each other, never beside another change, and a freeze lets those below its steps through.
void pass_gate() {
  const std::shared_ptr<Gate> gate = make_gate();
  std::atomic<int> pushes = 0, alone = 0;
  in_threads(4, [&](int number) {
    for (int i = 0; i < 300; ++i) {
      if (number < 3) {
        const PushPermit permit(*gate, number, i);
        ++pushes;
        CHECK(alone == 0);
        --pushes;
      } else if (i % 3 == 0) {
        gate->enter_alone(-1, 0);
        CHECK(++alone == 1 && pushes == 0);
        --alone;
        gate->leave_alone();
      }
    }
  });
  gate->freeze("a", 60, {3, 0});
  { const PushPermit permit(*gate, 0, 2); }
  std::atomic<bool> is_through = false;
  std::thread held([&] {
    const PushPermit permit(*gate, 1, 0);
    is_through = true;
  });
  gate->enter_frozen("a");
  gate->leave_alone();
  CHECK(!is_through);
  gate->resume("a");
  held.join();
  try {
    gate->enter_frozen("a");
    CHECK(false);
  } catch (const Refusal& refusal) {
    CHECK(refusal.error == "BackendError");
  }
}

// A freeze whose steps a push is below lets it through though another change waits for the freeze's end.
void pass_gate_while_one_waits() {
  const std::shared_ptr<Gate> gate = make_gate();
  gate->enter(0, 0);
  std::thread alone([&] {
    gate->enter_alone(-1, 0);
    gate->leave_alone();
  });
  std::thread push([&] { const PushPermit permit(*gate, 1, 0); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::thread freeze([&] { gate->freeze("a", 60, {1, 1}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  push.join();
  gate->leave();
  freeze.join();
  gate->resume("a");
  alone.join();
}

TableSpec spec_of(std::size_t dim) {
  TableSpec spec;
  spec.salt = dim;
  spec.dim = dim;
  spec.initial_state.assign(dim, 0.1f);
  spec.rule = {"adagrad", {{"lr", 0.1}, {"weight_decay", 0}, {"eps", 1e-8}, {"lr_decay", 0}}};
  return spec;
}

class TestCaller : public Caller {
 public:
  float* rows(std::size_t count, std::size_t dim) override {
    return tables.emplace_back(std::vector<float>(count * dim + 1)).data();
  }
  void report_wait(const std::string& waits_for, bool) override {
    waited_for = waits_for;
    ++reports;
  }
  std::string waited_for;
  std::atomic<int> reports = 0;
  std::vector<std::vector<float>> tables;
};

constexpr std::uint64_t kSalts[] = {4, 8};
constexpr int kWorkers = 4;

struct Server {
  explicit Server(ServerMode mode, double report_s = 5)
      : gate(make_gate(report_s)), clocks(std::make_shared<Clocks>(
            ClockCounts{mode, 1, 0, std::vector<std::int64_t>(kWorkers), std::vector<bool>(kWorkers, true)}, 5.0)) {
    for (const std::uint64_t salt : kSalts) {
      tables.push_back(std::make_shared<EmbeddingTable>(spec_of(salt)));
      engine.put_table(salt, {"t", "\"t\"", "", tables.back()});
    }
    engine.set_clocks(clocks);
    for (int worker = 0; worker < kWorkers; ++worker) engine.admit(static_cast<std::uint64_t>(worker), worker);
  }

  std::atomic<int> failures = 0;
  std::shared_ptr<Gate> gate;
  std::shared_ptr<Clocks> clocks;
  ServerEngine engine{gate, [this](const Refusal&) { ++failures; }};
  std::vector<std::shared_ptr<EmbeddingTable>> tables;
};

// Pushes of a worker: to both tables, with the keys of a pull in every second step, reading with the answer.
void train(Server& server, int worker, int steps) {
  std::uint64_t seq = 0;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::int64_t> keys(200);
    std::iota(keys.begin(), keys.end(), worker * 50);
    std::vector<std::vector<float>> values;
    DataRequest push, pull;
    pull.client = push.client = static_cast<std::uint64_t>(worker);
    pull.step = push.step = static_cast<std::uint64_t>(step);
    for (const std::uint64_t salt : kSalts) pull.pulls.push_back({salt, keys});
    pull.seq = ++seq;
    pull.keep = true;
    TestCaller caller;
    const DataReply pulled = server.engine.answer(pull, caller);
    CHECK(pulled.status == DataStatus::kDone && pulled.number != 0 && caller.tables.size() == 2);
    push.is_push = true;
    push.seq = ++seq;
    push.weight = worker + 1;
    push.pulls = pull.pulls;
    for (const std::uint64_t salt : kSalts) {
      values.emplace_back(keys.size() * salt, 0.01f * static_cast<float>(worker + step + 1));
      TablePush sent;
      sent.table = salt;
      sent.kind = UpdateKind::kGradient;
      sent.values = values.back();
      sent.rows = static_cast<std::uint32_t>(keys.size());
      if (step % 2 == 0) sent.pull = pulled.number;
      if (step % 2 == 1) sent.keys = keys;
      push.pushes.push_back(sent);
    }
    CHECK(server.engine.answer(push, caller).status == DataStatus::kDone);
    // What comes again is answered and not applied.
    const DataReply again = server.engine.answer(push, caller);
    CHECK(again.status == DataStatus::kDone || again.status == DataStatus::kAgain);
  }
}

std::vector<float> content(const Server& server) {
  std::vector<float> all;
  std::vector<std::int64_t> keys(400);
  std::iota(keys.begin(), keys.end(), 0);
  for (const std::shared_ptr<EmbeddingTable>& table : server.tables) {
    std::vector<float> rows(keys.size() * table->spec().dim);
    table->pull(keys, rows.data());
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

// All clients at once, with a log and with control in between.
void train_together(ServerMode mode) {
  char directory[] = "/tmp/phalanx-log-XXXXXX";
  CHECK(::mkdtemp(directory) != nullptr);
  const std::string path = std::string(directory) + "/log-00000001";
  constexpr int kSteps = 15;
  {
    Server server(mode);
    const auto log = std::make_shared<ServerLog>(directory, true);
    log->open(path);
    server.engine.set_log(log);
    in_threads(kWorkers + 1, [&](int worker) {
      if (worker < kWorkers) return train(server, worker, kSteps);
      for (int i = 0; i < 20; ++i) {
        server.engine.gate().enter_alone(-1, 0);
        server.engine.append_pending();
        server.engine.complete_steps();
        CHECK(server.engine.clients().size() == kWorkers);
        std::vector<std::uint64_t> moments, ticks;
        for (const auto& table : server.tables) {
          moments.push_back(table->begin_moment(0));
          ticks.push_back(table->tick());
        }
        server.engine.gate().leave_alone();
        for (std::size_t t = 0; t < server.tables.size(); ++t) {
          EmbeddingTable& table = *server.tables[t];
          for (int shard = i; shard < 1024; shard += 20)
            for (const std::uint64_t tick : table.read_moment(moments[t], shard).ticks) CHECK(tick <= ticks[t]);
          table.end_moment(moments[t]);
        }
      }
    });
    CHECK(server.failures == 0 && server.clocks->complete() == kSteps);
    const std::uint64_t changes = mode == ServerMode::kSync ? kSteps : kSteps * kWorkers;
    for (const auto& table : server.tables) CHECK(table->tick() == changes);
    CHECK(log->position() > 0);
    log->close();
    // In mode sync the order in which pushes come does not count.
    if (mode == ServerMode::kSync) {
      Server other(mode);
      in_threads(kWorkers, [&](int worker) { train(other, worker, kSteps); });
      CHECK(content(other) == content(server));
    }
  }
  ::unlink(path.c_str());
  ::rmdir(directory);
}

// Who is kept back by a freeze is told so again and again; one who gives up leaves the gate as it was.
void report_freeze() {
  Server server(ServerMode::kAsync, 0.01);
  server.gate->freeze("a", 60, {}, "the launcher");
  TestCaller caller;
  std::thread push([&] {
    DataRequest request;
    request.is_push = true;
    request.seq = 1;
    request.weight = 1;
    CHECK(server.engine.answer(request, caller).status == DataStatus::kDone);
  });
  while (caller.reports < 3) std::this_thread::yield();
  CHECK(server.gate->holds_back(0, 0) && server.clocks->next_step(0) == 0);
  try {
    server.gate->enter_alone(-1, 0, [](const std::string&, bool) { throw Refusal("ClosedError", "gone"); });
    CHECK(false);
  } catch (const Refusal& refusal) {
    CHECK(refusal.error == "ClosedError");
  }
  server.gate->resume("a");
  push.join();
  CHECK(caller.waited_for == "the launcher");
  CHECK(!server.gate->holds_back(0, 0) && server.clocks->next_step(0) == 1);
  server.gate->enter_alone(-1, 0);
  server.gate->leave_alone();
}

// A wait is over when a worker is lost, and says so.
void lose_worker() {
  Server server(ServerMode::kSync);
  std::thread waiting([&] {
    try {
      server.clocks->wait(1, [](const std::string&, bool) {});
      CHECK(false);
    } catch (const Refusal& refusal) {
      CHECK(refusal.error == "PeerLostError");
    }
  });
  server.clocks->connect(1);
  server.clocks->disconnect(1, 0);
  CHECK(server.clocks->expire(10, 1) == std::vector<int>{1});
  waiting.join();
}

long switches() {
  rusage used;
  getrusage(RUSAGE_THREAD, &used);
  return used.ru_nvcsw;
}

// Who waits sleeps until its count comes: pushes before that do not wake it.
void sleep_through_pushes() {
  constexpr int kPushes = 60;
  Server server(ServerMode::kBounded);
  std::atomic<bool> is_waiting = false;
  std::thread waiting([&] {
    is_waiting = true;
    const long before = switches();
    server.clocks->wait(kPushes + 1, [](const std::string&, bool) {});
    CHECK(switches() - before < kPushes / 3);
  });
  while (!is_waiting) std::this_thread::yield();
  for (int i = 0; i < kPushes; ++i) {
    for (int worker = 0; worker < kWorkers; ++worker) server.clocks->push(worker);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  waiting.join();
}

}  // namespace

void test_server() {
  sum_bytes();
  pass_gate();
  pass_gate_while_one_waits();
  for (const ServerMode mode : {ServerMode::kAsync, ServerMode::kSync, ServerMode::kBounded}) train_together(mode);
  report_freeze();
  lose_worker();
  sleep_through_pushes();
}
