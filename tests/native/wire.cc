// The wire's server end: hostile frames are errors and never memory errors; sound ones are answered over a socket pair.

#include "../../csrc/wire_session.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "../../csrc/crc32.h"
#include "../../csrc/crc32.h"
#include "../../csrc/numbers.h"
#include "check.h"

namespace {

using namespace phalanx;

constexpr std::size_t kDim = 3;

// Reads every array of a request, so that a sanitizer sees one that reaches out of its payload.
class SummingHandler : public DataHandler {
 public:
  DataReply answer(const DataRequest& request, Caller& caller) override {
    double sum = 0;
    for (const TablePush& push : request.pushes) {
      for (const std::int64_t key : push.keys) sum += static_cast<double>(key & 1);
      for (const float value : push.values) sum += value > 0 ? 1 : 0;
      for (std::uint32_t i = 0; i < push.rows; ++i) {
        sum += push.counts ? push.counts[i] : 0;
        sum += push.shows && push.shows[i] > 0 ? 1 : 0;
        sum += push.clicks && push.clicks[i] > 0 ? 1 : 0;
      }
    }
    for (const TablePull& pull : request.pulls) {
      float* rows = caller.rows(pull.keys.size(), kDim);
      for (std::size_t i = 0; i < pull.keys.size() * kDim; ++i) rows[i] = static_cast<float>(pull.keys[i / kDim]);
    }
    total += static_cast<std::uint64_t>(sum);
    ++requests;
    if (request.step == 99) throw Refusal("ConfigError", "step \"99\" is refused");
    if (request.step == 98) throw std::runtime_error("broken");
    if (request.step == 97) caller.report_wait("worker 1", true);
    return {DataStatus::kDone, 5, 0};
  }

  std::atomic<std::uint64_t> total = 0, requests = 0;
};

std::string bytes_of(const auto& part) { return {reinterpret_cast<const char*>(&part), sizeof part}; }

std::string frame_of(FrameKind kind, const std::string& object, const std::string& payload, std::uint8_t flags = 0) {
  const FrameHeader header{kind, flags, 1, 7, 0, payload.size()};
  std::string frame = encode_frame(header, object) + payload;
  if (!payload.empty() && flags == 0) frame += bytes_of(crc32(std::as_bytes(std::span(payload))));
  return frame;
}

std::string keys_payload(std::size_t count) {
  std::vector<std::int64_t> keys(count);
  std::iota(keys.begin(), keys.end(), 0);
  return {reinterpret_cast<const char*>(keys.data()), count * sizeof(std::int64_t)};
}

std::string pull_of(std::uint32_t keys, std::uint64_t step = 0) {
  const RequestHead head{.step = step, .pulls = 1};
  const PullHead pull{.table = 9, .keys = keys};
  return frame_of(FrameKind::kPull, bytes_of(head) + bytes_of(pull), keys_payload(keys));
}

std::string push_of(std::uint32_t rows, std::uint32_t dim) {
  const RequestHead head{.pushes = 1};
  const PushHead push{.table = 9, .rows = rows, .dim = dim, .columns = kHasLr | kHasCounts | kHasShows | kHasClicks};
  std::size_t end = 0;
  for (const std::size_t bytes : {std::size_t{8} * rows, std::size_t{4} * rows * dim, std::size_t{4} * rows,
                                  std::size_t{4} * rows, std::size_t{4} * rows}) {
    end = aligned(end) + bytes;
  }
  return frame_of(FrameKind::kPush, bytes_of(head) + bytes_of(push), std::string(end, '\1'));
}

struct Ends {
  std::array<int, 2> fds;
  Ends() { CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) == 0); }
  ~Ends() {
    for (const int fd : fds) ::close(fd);
  }
};

void write_all(int fd, const std::string& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t count = ::send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (count < 0) return;  // the server has given the client up
    done += static_cast<std::size_t>(count);
  }
}

std::string read_all(int fd) {
  std::string all;
  std::array<char, 4096> part;
  for (ssize_t count; (count = ::recv(fd, part.data(), part.size(), 0)) > 0;) {
    all.append(part.data(), static_cast<std::size_t>(count));
  }
  return all;
}

enum class End { kControl, kStopped, kBroken, kEnded };

// Feeds a session and returns how it ended, and what it wrote.
End feed(SummingHandler& handler, const std::string& bytes, std::string& replies, std::uint64_t limit = 1 << 24) {
  Ends ends;
  CHECK(::fcntl(ends.fds[1], F_SETFL, O_NONBLOCK) == 0);
  MemoryBudget budget(1 << 19);
  ServerContext context(&handler, "server 0", limit, budget);
  AttachedSegments segments;
  std::thread client([&] {
    write_all(ends.fds[0], bytes);
    ::shutdown(ends.fds[0], SHUT_WR);
    replies = read_all(ends.fds[0]);
  });
  End end = End::kEnded;
  {
    std::vector<std::byte> ahead(1 << 10);
    Descriptors descriptors;
    PlainStream stream(ends.fds[1], descriptors);
    FrameSocket socket(stream, {ahead, 0, 0}, descriptors);
    DataSession session(context, segments, 1, "worker 1");
    try {
      end = session.serve(socket) ? End::kControl : End::kStopped;
    } catch (const FrameError&) {
      end = End::kBroken;
    } catch (const ConnectionEnded&) {
      end = End::kEnded;
    }
  }
  ::shutdown(ends.fds[1], SHUT_RDWR);
  client.join();
  CHECK(budget.used() == 0);
  return end;
}

void test_answers() {
  SummingHandler handler;
  std::string replies;
  CHECK(feed(handler, pull_of(100) + push_of(50, 4) + pull_of(0), replies) == End::kEnded);
  CHECK(handler.requests == 3 && handler.total > 0);
  const std::size_t rows = 100 * kDim * sizeof(float);
  CHECK(replies.size() == 3 * (kHeaderBytes + sizeof(ReplyHead)) + rows + kChecksumBytes);
  float last;
  std::memcpy(&last, replies.data() + kHeaderBytes + sizeof(ReplyHead) + rows - sizeof last, sizeof last);
  CHECK(last == 99);
  CHECK(feed(handler, frame_of(FrameKind::kRequest, "{}", ""), replies) == End::kControl);
  CHECK(replies.empty());
}

void test_refusals() {
  SummingHandler handler;
  std::string replies;
  CHECK(feed(handler, pull_of(4, 99) + pull_of(4, 98) + pull_of(4, 97) + pull_of(4), replies) == End::kEnded);
  CHECK(replies.find("{\"error\":\"ConfigError\",\"message\":\"step \\\"99\\\" is refused\"}") != std::string::npos);
  CHECK(replies.find("server 0 failed at 'pull' with broken. Its log has more.") != std::string::npos);
  CHECK(replies.find("{\"for\":\"worker 1\",\"here\":true}") != std::string::npos);
  CHECK(feed(handler, push_of(2000, 20) + pull_of(4), replies, 100'000) == End::kEnded);
  CHECK(replies.find("'push' of worker 1 brings 200,000 bytes; server 0 takes 100,000 at once.") != std::string::npos);
  CHECK(feed(handler, push_of(30'000, 5) + pull_of(4), replies) == End::kEnded);
  CHECK(replies.find("server 0 holds all it may (524,288 bytes)") != std::string::npos);
  CHECK(handler.requests == 6);
}

void test_hostile_frames() {
  std::mt19937_64 chance(3);
  SummingHandler handler;
  std::string replies;
  for (int round = 0; round < 300; ++round) {
    std::string bytes = round % 2 ? pull_of(30) : push_of(20, 4);
    const std::size_t object = kHeaderBytes, length = bytes.size();
    if (round % 3 == 0) {
      bytes.resize(chance() % length);
    } else {
      for (std::uint64_t k = 0; k <= chance() % 3; ++k) {
        bytes[object + chance() % (length - object)] ^= static_cast<char>(1 << chance() % 8);
      }
    }
    CHECK(feed(handler, bytes, replies) != End::kControl);
    // The same lies under a sound checksum.
    std::string lie = bytes.size() > object + 100 ? bytes.substr(object, 88) : std::string(chance() % 200, '\xff');
    lie[lie.empty() ? 0 : chance() % lie.size()] ^= static_cast<char>(chance());
    const FrameKind kind = round % 2 ? FrameKind::kPull : FrameKind::kPush;
    CHECK(feed(handler, frame_of(kind, lie, keys_payload(chance() % 40)), replies) != End::kStopped);
  }
}

void test_segments() {
  AttachedSegments segments;
  const int fd = ::memfd_create("segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(::ftruncate(fd, 1 << 16) == 0);
  const auto attach = [&](std::uint64_t number, std::uint64_t size) {
    try {
      return segments.attach(number, size, ::dup(fd))->bytes().size();
    } catch (const FrameError&) {
      return std::size_t{0};
    }
  };
  CHECK(attach(1, 1 << 16) == 0);  // could shrink
  CHECK(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK(attach(1, 1 << 17) == 0 && attach(1, 0) == 0 && attach(1, std::uint64_t{1} << 63) == 0);
  CHECK(attach(1, 1 << 16) == 1 << 16);
  CHECK(attach(1, 1 << 16) == 0);  // there already
  CHECK(segments.find(1)->bytes().size() == 1 << 16);
  ::close(fd);
}

void test_budget() {
  MemoryBudget budget(100);
  BudgetShare first(budget);
  CHECK(first.take(90, {}));
  CHECK(!first.take(20, std::chrono::hours(1)));  // never fits beside its own
  std::atomic<bool> has_come = false;
  in_threads(2, [&](int number) {
    BudgetShare share(budget);
    if (number == 0) {
      has_come = share.take(50, std::chrono::hours(1));
    } else {
      CHECK(!share.take(50, std::chrono::milliseconds(20)) && !has_come);
      budget.give(90);
    }
  });
  CHECK(has_come && budget.used() == 0);
  CHECK(budget.take(90));
}

void test_rows_without_room() {
  std::array<std::byte, 256> room;
  ReplyRows rows(room);
  rows.add(4, 4)[15] = 1;
  CHECK(rows.is_shared() && rows.payload_bytes() == 64);
  rows.add(0, 4);
  rows.add(100, 4)[399] = 2;
  CHECK(!rows.is_shared() && rows.payload_bytes() == 64 + 1600);
  std::size_t total = 0;
  for (const auto piece : rows.pieces()) total += piece.size();
  CHECK(total == rows.payload_bytes());
}

std::vector<std::uint16_t> narrowed(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits(values.size());
  narrow(values, bits.data());
  return bits;
}

void test_bfloat16_rounds_to_the_nearest_even() {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> values{1.0f, 1.00390625f, 1.01171875f, -1.005f, 3.4e38f, -inf, 1e-40f, -0.0f};
  CHECK((narrowed(values) == std::vector<std::uint16_t>{0x3F80, 0x3F80, 0x3F82, 0xBF81, 0x7F80, 0xFF80, 1, 0x8000}));
  CHECK(narrowed({std::nanf("")})[0] == 0x7FC0);
}

void test_a_push_of_bfloat16_is_read_as_float32() {
  const std::vector<float> values{1, -2, 0.5f, 3};
  const PushHead push{.table = 9, .rows = 2, .dim = 2, .columns = kBfloat16Values};
  const PullHead pull{.table = 9, .keys = 2, .flags = kBfloat16Rows};
  std::string payload = keys_payload(2) + std::string(48, '\0');
  for (const std::uint16_t half : narrowed(values)) payload += bytes_of(half);
  payload += std::string(56, '\0') + keys_payload(2);
  const std::string object = bytes_of(RequestHead{.pushes = 1, .pulls = 1}) + bytes_of(push) + bytes_of(pull);
  DataFrame frame({FrameKind::kPush, 0, 1, 7, 0, payload.size()}, std::as_bytes(std::span(object)));
  std::vector<std::uint64_t> aligned_payload((payload.size() + 7) / 8);
  std::memcpy(aligned_payload.data(), payload.data(), payload.size());
  const DataRequest& request = frame.read(std::as_bytes(std::span(aligned_payload)).first(payload.size()));
  CHECK(std::equal(values.begin(), values.end(), request.pushes[0].values.begin(), request.pushes[0].values.end()));
  CHECK(frame.widened_bytes() == 16 && frame.narrow_rows() == std::vector<bool>{true});
}

void test_rows_of_both_types_share_a_reply() {
  std::array<std::byte, 256> room;
  ReplyRows rows(room, {true, false});
  float* const narrow_rows = rows.add(3, 2);
  std::fill_n(narrow_rows, 6, 1.0f);
  rows.add(1, 2)[1] = 5;
  rows.finish();
  CHECK(rows.is_shared() && rows.payload_bytes() == 64 + 8);
  std::uint16_t half;
  std::memcpy(&half, room.data() + 10, sizeof half);
  float last;
  std::memcpy(&last, room.data() + 68, sizeof last);
  CHECK(half == 0x3F80 && last == 5);
}

}  // namespace

void test_wire() {
  CHECK(crc32(std::as_bytes(std::span("123456789", 9))) == 0xCBF43926);
  test_answers();
  test_refusals();
  test_hostile_frames();
  test_segments();
  test_budget();
  test_rows_without_room();
  test_bfloat16_rounds_to_the_nearest_even();
  test_a_push_of_bfloat16_is_read_as_float32();
  test_rows_of_both_types_share_a_reply();
}
