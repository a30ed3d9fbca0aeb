// The wire's client end: frames go out as a server reads them, and replies come in whole, in pieces, or not as they should.

#include "../../csrc/wire_client.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>

#include "../../csrc/crc32.h"
#include "../../csrc/client_link.h"
#include "check.h"

namespace {

using namespace phalanx;
using namespace std::chrono_literals;

constexpr std::size_t kDim = 4;

struct Ends {
  std::array<int, 2> fds;
  Ends() { CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) == 0); }
  ~Ends() {
    for (const int fd : fds) ::close(fd);
  }
  int ours() const { return fds[0]; }
  int theirs() const { return fds[1]; }
};

std::vector<std::byte> read_exactly(int fd, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t done = 0; done < count;) {
    const ssize_t part = ::recv(fd, bytes.data() + done, count - done, 0);
    CHECK(part > 0);
    done += static_cast<std::size_t>(part);
  }
  return bytes;
}

struct Keys {
  std::vector<std::int64_t> ids = std::vector<std::int64_t>(50);
  std::vector<float> values = std::vector<float>(50 * kDim);
  Keys() {
    std::iota(ids.begin(), ids.end(), -7);
    std::iota(values.begin(), values.end(), 0.0f);
  }
};

// Each key and its values reach the server that owns it, and rows come back to where they were asked.
void test_parts_are_the_whole() {
  const Keys keys;
  const KeyPartition partition(keys.ids, 5, 3);
  PartitionedRequest request;
  PartitionedRequest::Push update{&partition};
  update.dim = kDim;
  update.values = keys.values.data();
  request.add_push(update);
  request.add_pull(partition, kDim);
  std::vector<float> merged(keys.values.size());
  std::size_t total = 0;
  for (int server = 0; server < 3; ++server) {
    std::vector<std::byte> payload(request.payload_bytes(server, true));
    request.write(server, true, payload.data());
    total += partition.count(server);
    const std::size_t values_at = aligned(partition.count(server) * sizeof(std::int64_t));
    const std::byte* rows = payload.data() + values_at;  // a server that answers with what was pushed
    CHECK(request.rows_bytes(server) == partition.count(server) * kDim * sizeof(float));
    float* into = merged.data();
    request.merge(server, rows, {&into, 1});
  }
  CHECK(total == keys.ids.size() && merged == keys.values);
}

void test_a_frame_is_what_a_server_reads() {
  const Keys keys;
  const KeyPartition partition(keys.ids, 5, 1);
  PartitionedRequest request;
  request.add_pull(partition, kDim);
  std::vector<std::byte> memory(4096);
  for (const bool is_shared : {false, true}) {
    const Ends ends;
    const ServerFrame frame{0, ends.ours(), 11, 12, is_shared ? 3u : 0u, memory, -1};
    CHECK(send_frame(request, {FrameKind::kPull, 6, 1, true}, frame).rest.empty());
    const auto head = read_exactly(ends.theirs(), kHeaderBytes);
    const FrameHeader header = decode_header(head);
    const auto object = read_exactly(ends.theirs(), header.object_bytes);
    require_checksum(head, object);
    CHECK(header.client == 11 && header.seq == 12 && header.flags == (is_shared ? kShared : 0));
    std::vector<std::byte> payload(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(header.payload_bytes));
    if (!is_shared) payload = read_exactly(ends.theirs(), header.payload_bytes);
    DataFrame read(header, object);
    const DataRequest& asked = read.read(payload);
    CHECK(asked.step == 6 && asked.keep && asked.pulls.size() == 1 && read.segment() == frame.segment);
    CHECK(std::equal(keys.ids.begin(), keys.ids.end(), asked.pulls[0].keys.begin(), asked.pulls[0].keys.end()));
    if (is_shared) continue;
    std::uint32_t checksum;
    std::memcpy(&checksum, read_exactly(ends.theirs(), sizeof checksum).data(), sizeof checksum);
    CHECK(checksum == crc32(payload));
  }
}

void test_a_full_or_broken_socket_is_said() {
  const Keys keys;
  const KeyPartition partition(keys.ids, 5, 1);
  PartitionedRequest request;
  request.add_pull(partition, kDim);
  const Ends ends;
  std::vector<std::byte> memory(4096);
  const ServerFrame frame{0, ends.ours(), 11, 12, 0, memory, -1};
  SentFrame sent;
  while (sent.rest.empty()) sent = send_frame(request, {}, frame);
  CHECK(sent.error == 0);
  ::shutdown(ends.theirs(), SHUT_RDWR);
  CHECK(send_frame(request, {}, frame).error == EPIPE);
}

std::string reply_frame(std::uint64_t seq, DataStatus status, const std::string& rows, std::uint8_t flags = 0,
                        std::uint64_t at = 0, std::uint64_t shared_bytes = 0) {
  FrameHeader header{FrameKind::kRows, flags, 1, seq, 0, flags & kShared ? shared_bytes : rows.size()};
  std::string frame = encode_frame(header, reply_object({status, 9, 0}, at));
  if ((flags & kShared) != 0 || rows.empty()) return frame;
  const std::uint32_t checksum = crc32(std::as_bytes(std::span(rows)));
  return frame + rows + std::string(reinterpret_cast<const char*>(&checksum), sizeof checksum);
}

// Links of one client, each with a buffer of its own.
struct Links {
  std::vector<Ends> ends;
  std::vector<std::vector<std::byte>> buffers;
  std::vector<DueReply> due;

  explicit Links(std::size_t count, std::size_t buffer = 256) : ends(count), buffers(count), due(count) {
    for (std::size_t i = 0; i < count; ++i) {
      buffers[i].resize(buffer);
      due[i].fd = ends[i].ours();
      due[i].ahead = {buffers[i], 0, 0};
      due[i].seq = 7;
      due[i].rows_bytes = 16;
    }
  }

  void write(std::size_t link, const std::string& bytes) const {
    CHECK(::send(ends[link].theirs(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
};

void test_replies_of_all_arrive() {
  Links links(3);
  links.write(0, reply_frame(7, DataStatus::kDone, std::string(16, 'x')) + "what comes next");
  links.write(1, reply_frame(7, DataStatus::kDone, "", kShared, 1008, 16));
  std::thread late([&] {
    const std::string bytes = reply_frame(7, DataStatus::kNeedKeys, "");
    links.write(2, bytes.substr(0, 50));
    links.write(2, bytes.substr(50));
  });
  while (links.due[2].state == DueReply::State::kDue) CHECK(receive_replies(links.due, 10s, 1ms));
  late.join();
  for (const DueReply& reply : links.due) CHECK(reply.state == DueReply::State::kArrived && reply.head.number == 9);
  CHECK(std::memcmp(links.buffers[0].data() + links.due[0].rows_at, "xxxxxxxxxxxxxxxx", 16) == 0);
  CHECK(links.due[0].ahead.end - links.due[0].ahead.start == std::strlen("what comes next"));
  CHECK(links.due[1].is_shared && links.due[1].rows_at == 1008);
  CHECK(links.due[2].head.status == DataStatus::kNeedKeys);
}

void test_frames_for_python_stay_unread() {
  const std::string sound = reply_frame(7, DataStatus::kDone, std::string(16, 'x'));
  std::string broken = sound;
  broken[kHeaderBytes + sizeof(ReplyHead)] ^= 1;
  const FrameHeader waiting{FrameKind::kWaiting, 0, 1, 7, 0, 0};
  for (const std::string& bytes : {encode_frame(waiting, waiting_object("worker 1", true)), broken,
                                   reply_frame(8, DataStatus::kDone, std::string(16, 'x')),
                                   reply_frame(7, DataStatus::kDone, std::string(32, 'x')),
                                   reply_frame(0, DataStatus::kDone, std::string(16, 'x')),
                                   std::string(64, 'x')}) {
    Links links(2);
    links.write(1, bytes);
    CHECK(receive_replies(links.due, 10s, 1ms));
    CHECK(links.due[0].state == DueReply::State::kDue && links.due[1].state == DueReply::State::kForPython);
    const ReadAhead& ahead = links.due[1].ahead;
    CHECK(ahead.end - ahead.start == bytes.size());
    CHECK(std::memcmp(ahead.buffer.data() + ahead.start, bytes.data(), bytes.size()) == 0);
  }
}

void test_an_end_in_the_middle_of_a_frame_is_for_python() {
  Links links(2);
  links.write(0, reply_frame(7, DataStatus::kDone, std::string(16, 'x')));
  links.write(1, reply_frame(7, DataStatus::kDone, std::string(16, 'x')).substr(0, 60));
  ::shutdown(links.ends[1].theirs(), SHUT_RDWR);
  while (links.due[1].state == DueReply::State::kDue) CHECK(receive_replies(links.due, 10s, 1ms));
  CHECK(links.due[0].state == DueReply::State::kArrived);
  CHECK(links.due[1].state == DueReply::State::kForPython && links.due[1].error == 0);
}

void test_patience_ends() {
  Links links(2);
  CHECK(receive_replies(links.due, 1ms, 1ms));
  CHECK(links.due[0].state == DueReply::State::kDue && links.due[1].state == DueReply::State::kDue);
  links.write(1, reply_frame(7, DataStatus::kDone, std::string(16, 'x')));
  CHECK(receive_replies(links.due, 1h, 1ms));  // what came does not wait for the other
  CHECK(links.due[0].state == DueReply::State::kDue && links.due[1].state == DueReply::State::kArrived);
}

void test_a_reply_at_the_end_of_the_buffer_moves_to_its_start() {
  Links links(1, 128);
  DueReply& due = links.due[0];
  const std::string bytes = reply_frame(7, DataStatus::kDone, std::string(16, 'x'));
  std::memcpy(links.buffers[0].data() + 100, bytes.data(), 28);
  due.ahead.start = 100;
  due.ahead.end = 128;
  links.write(0, bytes.substr(28));
  CHECK(receive_replies(links.due, 10s, 1ms));
  CHECK(due.state == DueReply::State::kArrived && due.ahead.start == due.ahead.end);
}

// A pull of two servers, whose replies native code takes.
struct Pulled {
  Keys keys;
  KeyPartition partition{keys.ids, 5, 2};
  PartitionedRequest request;
  std::array<Ends, 2> ends;
  std::array<std::vector<std::byte>, 2> buffers{std::vector<std::byte>(4096), std::vector<std::byte>(4096)};
  std::array<ClientLink, 2> links;

  explicit Pulled(std::size_t dim) {
    request.add_pull(partition, dim);
    for (std::size_t i = 0; i < 2; ++i) {
      links[i].fd = ends[i].ours();
      links[i].client = 11;
      links[i].seq = 6;
      links[i].most_bytes = 1 << 20;
    }
  }

  std::shared_ptr<SentRequest> unsent() const {
    return std::make_shared<SentRequest>(request, std::array<int, 2>{0, 1});
  }

  std::shared_ptr<SentRequest> begun() {
    const auto sent = unsent();
    for (std::size_t i = 0; i < 2; ++i) links[i].begin(sent, i, nullptr);
    return sent;
  }

  // Reads the next reply of a server.
  DueReply reply(std::size_t server, const std::string& bytes) {
    CHECK(::send(ends[server].theirs(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    std::array<DueReply, 1> due{links[server].next_reply({buffers[server], 0, 0})};
    CHECK(receive_replies(due, 10s, 1ms));
    return due[0];
  }
};

void test_parts_are_numbered_and_answered() {
  Pulled pulled(1);
  const auto sent = pulled.begun();
  CHECK(!sent->is_done_by_all());
  for (std::size_t i = 0; i < 2; ++i) {
    const SentPart& part = sent->parts[i];
    CHECK(part.seq == 7 && part.state == SentPart::State::kUnderWay);
    CHECK(send_frame(pulled.request, {}, pulled.links[i].frame_of(part)).rest.empty());
    const std::string rows(part.rows_bytes, static_cast<char>('a' + part.server));
    CHECK(pulled.links[i].take(pulled.reply(i, reply_frame(7, DataStatus::kDone, rows))));
    CHECK(std::memcmp(part.rows.data(), rows.data(), rows.size()) == 0 && part.reply.number == 9);
    CHECK(pulled.links[i].due.empty() && pulled.links[i].due_bytes == 0 && pulled.links[i].has_answered);
  }
  CHECK(sent->is_done_by_all());
}

void test_shared_memory_is_lent_and_used_again() {
  Pulled pulled(200);
  std::array<std::vector<std::byte>, 2> memory;
  const std::uint64_t bytes = pulled.unsent()->parts[0].memory_bytes();
  CHECK(pulled.unsent()->parts[0].needs_shared() && !pulled.links[0].free_memory(bytes));
  for (std::size_t i = 0; i < 2; ++i) {
    memory[i].resize(pulled.unsent()->parts[i].memory_bytes());
    pulled.links[i].memory.push_back(std::make_shared<RequestMemory>(RequestMemory{memory[i], 3, -1, nullptr}));
  }
  auto sent = pulled.begun();
  CHECK(!pulled.links[0].free_memory(bytes));  // what is lent is in use
  const SentPart& part = sent->part_of(1);
  const std::uint64_t at = memory[1].size() - part.rows_bytes;
  const auto beyond = reply_frame(7, DataStatus::kDone, "", kShared, at + 1, part.rows_bytes);
  CHECK(!pulled.links[1].take(pulled.reply(1, beyond)) && part.state == SentPart::State::kUnderWay);
  const auto sound = reply_frame(7, DataStatus::kDone, "", kShared, at, part.rows_bytes);
  CHECK(pulled.links[1].take(pulled.reply(1, sound)));
  CHECK(part.rows.data() == memory[1].data() + at && part.rows.size() == part.rows_bytes);
  std::shared_ptr<RequestMemory> kept = part.memory;
  const std::uint64_t of_second = part.memory_bytes();
  sent.reset();
  CHECK(!pulled.links[0].free_memory(bytes) && !pulled.links[1].free_memory(of_second));  // under way; rows are kept
  pulled.links[0].hand_over();
  CHECK(!pulled.links[1].free_memory(of_second));
  kept.reset();
  CHECK(pulled.links[1].free_memory(of_second) != nullptr);
}

void test_what_is_handed_over_is_pythons() {
  Pulled pulled(1);
  const auto sent = pulled.begun();
  const std::string rows(sent->part_of(0).rows_bytes, 'x');
  const DueReply reply = pulled.reply(0, reply_frame(7, DataStatus::kDone, rows));
  pulled.links[0].hand_over();
  CHECK(!pulled.links[0].take(reply) && pulled.links[0].due.empty() && pulled.links[0].due_bytes == 0);
  CHECK(sent->part_of(0).state == SentPart::State::kTakenOver && !pulled.links[0].has_answered);
  // A reply that was read and not taken can be read again.
  std::array<DueReply, 1> again{pulled.links[1].next_reply(reply.ahead)};
  again[0].ahead.start -= reply.length;
  again[0].rows_bytes = reply.rows_bytes;
  CHECK(receive_replies(again, 10s, 1ms) && again[0].state == DueReply::State::kArrived);
}

void test_a_link_has_room_for_so_many_bytes() {
  Pulled pulled(1);
  const std::uint64_t bytes = pulled.unsent()->parts[0].payload_bytes;
  pulled.links[0].most_bytes = bytes + 1;
  CHECK(pulled.links[0].has_room(1 << 20));
  const auto sent = pulled.begun();
  CHECK(pulled.links[0].has_room(1) && !pulled.links[0].has_room(2));
}

}  // namespace

void test_client() {
  test_parts_are_numbered_and_answered();
  test_shared_memory_is_lent_and_used_again();
  test_what_is_handed_over_is_pythons();
  test_a_link_has_room_for_so_many_bytes();
  test_parts_are_the_whole();
  test_a_frame_is_what_a_server_reads();
  test_a_full_or_broken_socket_is_said();
  test_replies_of_all_arrive();
  test_frames_for_python_stay_unread();
  test_an_end_in_the_middle_of_a_frame_is_for_python();
  test_patience_ends();
  test_a_reply_at_the_end_of_the_buffer_moves_to_its_start();
}
