// TLS over a socket pair: both directions at once, keys that change, and ends that break off, lie or speak something else.

#include "../../csrc/wire_tls.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>

#include "../../csrc/wire_socket.h"
#include "check.h"

namespace {

using namespace phalanx;

// A certificate that signs itself, and its key, of no use elsewhere.
constexpr const char* kCertificate =
    "3082016e30820115a00302010202147e1869c013470e520c8af79cc0d87c8a68c562a6300a06082a8648ce3d040302300c310a30"
    "0806035504030c01743020170d3236313132383130353832325a180f32313236313130343130353832325a300c310a3008060355"
    "04030c01743059301306072a8648ce3d020106082a8648ce3d03010703420004187b38a64276e18879406117361b462a689ba23d"
    "dfce8ef0837a0314eb959518c4d2674b3c1e549874f012602bc909fe3c6642682715cd4abedeab0021a4298ba3533051301d0603"
    "551d0e04160414ad815292abc9619f18d7e1d7b287b13e970f75b8301f0603551d23041830168014ad815292abc9619f18d7e1d7"
    "b287b13e970f75b8300f0603551d130101ff040530030101ff300a06082a8648ce3d04030203470030440220188b352d476c969d"
    "5628902c89ba7fd9dbdeacf869c09211b8df6e9e20d58b1c022033157bb0d57fd558fe62ddb87e2326b3a312be38f18ed716484a"
    "72c845ef0fef";
constexpr const char* kKey =
    "30770201010420703099153abf06a4e16bd6d9715d33eb8d5b5782d5776a14f7a296200141121aa00a06082a8648ce3d030107a1"
    "4403420004187b38a64276e18879406117361b462a689ba23ddfce8ef0837a0314eb959518c4d2674b3c1e549874f012602bc909"
    "fe3c6642682715cd4abedeab0021a4298b";

std::vector<std::byte> der_of(const std::string& hex) {
  std::vector<std::byte> der;
  for (std::size_t at = 0; at < hex.size(); at += 2) {
    der.push_back(static_cast<std::byte>(std::stoi(hex.substr(at, 2), nullptr, 16)));
  }
  return der;
}

std::vector<std::byte> numbers(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 chance(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(chance());
  return bytes;
}

void wait(int fd, short events) {
  pollfd waiting{fd, events, 0};
  CHECK(::poll(&waiting, 1, 20'000) == 1);
}

void shake_hands(TlsStream& stream) {
  while (const short events = stream.shake_hands()) wait(stream.fd(), events);
}

// Two connected sockets, each with an end of TLS once hands were shaken.
class Ends {
 public:
  explicit Ends(std::uint64_t records_of_key = TlsContext::kRecordsOfKey) {
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()) == 0);
    client.emplace(TlsContext::client(records_of_key), fds[0]);
    server.emplace(TlsContext::server(der_of(kCertificate), der_of(kKey), records_of_key), fds[1]);
  }
  ~Ends() {
    for (const int fd : fds) ::close(fd);
  }

  Ends& shaken() {
    in_threads(2, [&](int number) { shake_hands(number == 0 ? *client : *server); });
    return *this;
  }

  std::array<int, 2> fds;
  std::optional<TlsStream> client, server;
};

void send_all(SocketStream& stream, std::span<const std::byte> bytes, std::size_t part_bytes) {
  Descriptors none;
  FrameSocket socket(stream, {}, none);
  std::vector<std::span<const std::byte>> parts;
  for (; !bytes.empty(); bytes = bytes.subspan(parts.back().size())) {
    parts.push_back(bytes.first(std::min(part_bytes, bytes.size())));
  }
  socket.write(parts);
}

std::vector<std::byte> receive_all(SocketStream& stream, std::size_t count) {
  std::vector<std::byte> ahead(1 << 10), bytes(count);
  Descriptors none;
  FrameSocket socket(stream, {ahead, 0, 0}, none);
  socket.fill(bytes);
  return bytes;
}

std::string end_of(SocketStream& stream) {
  std::array<std::byte, 100'000> memory;
  try {
    while (true) {
      if (stream.receive_some(memory) == 0) wait(stream.fd(), POLLIN);
    }
  } catch (const ConnectionEnded& ended) {
    return ended.what();
  }
}

void test_both_directions_at_once(std::uint64_t records_of_key) {
  Ends ends(records_of_key);
  ends.shaken();
  const std::vector<std::byte> up = numbers(3'000'001, 1), down = numbers(2'000'003, 2);
  in_threads(4, [&](int number) {
    TlsStream& end = number % 2 ? *ends.server : *ends.client;
    if (number < 2) {
      send_all(end, number ? down : up, number ? 900 : 70'000);
    } else {
      const std::vector<std::byte>& sent = number % 2 ? up : down;
      CHECK(receive_all(end, sent.size()) == sent);
    }
  });
}

void test_keys_change() {
  const auto record_bytes = [](std::uint64_t records_of_key) {
    Ends ends(records_of_key);
    send_all(*ends.shaken().server, numbers(100'000, 5), 100'000);
    std::vector<char> records(1 << 18);
    return ::recv(ends.fds[0], records.data(), records.size(), 0);
  };
  CHECK(record_bytes(1) > record_bytes(TlsContext::kRecordsOfKey));  // the record that says so goes before each other
}

void test_the_client_sees_the_certificate() {
  Ends ends;
  const std::vector<std::uint8_t> seen = ends.shaken().client->peer_certificate();
  const std::vector<std::byte> shown = der_of(kCertificate);
  CHECK(std::ranges::equal(std::as_bytes(std::span(seen)), shown));
}

// Returns how the client's reading ends when `pass` changes the server's records on their way.
template <class Pass>
std::string received_through(Pass pass) {
  Ends ends;
  ends.shaken();
  const std::vector<std::byte> sent = numbers(40'000, 3);
  send_all(*ends.server, sent, sent.size());
  std::vector<char> records(1 << 17);
  const ssize_t count = ::recv(ends.fds[0], records.data(), records.size(), 0);
  CHECK(count > 40'000);
  records.resize(static_cast<std::size_t>(count));
  pass(records);
  CHECK(::send(ends.fds[1], records.data(), records.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(records.size()));
  ::shutdown(ends.fds[1], SHUT_WR);
  return end_of(*ends.client);
}

void test_broken_records() {
  CHECK(received_through([](std::vector<char>& records) { records.resize(30'000); }) == "it closed the connection");
  CHECK(received_through([](std::vector<char>&) {}) == "it closed the connection");
  CHECK(received_through([](std::vector<char>& records) { records[20'000] ^= 1; }) == "decryption failed or bad record mac");
  CHECK(received_through([](std::vector<char>& records) { records[0] = 'P'; }) == "bad record type");
  const auto twice = [](std::vector<char>& records) { records.insert(records.end(), records.begin(), records.end()); };
  CHECK(received_through(twice) == "decryption failed or bad record mac");
}

void test_what_is_no_tls() {
  for (const bool is_server : {false, true}) {
    Ends ends;
    const std::string plain = "220 mail at your service, which is longer than the head of a record\r\n";
    CHECK(::send(ends.fds[is_server ? 0 : 1], plain.data(), plain.size(), 0) > 0);
    std::string reason;
    try {
      shake_hands(is_server ? *ends.server : *ends.client);
    } catch (const TlsError& error) {
      reason = error.what();
    }
    CHECK(reason == "wrong version number");
  }
  Ends ends;
  ::shutdown(ends.fds[1], SHUT_WR);
  bool has_ended = false;
  try {
    shake_hands(*ends.client);
  } catch (const ConnectionEnded&) {
    has_ended = true;
  }
  CHECK(has_ended);
}

void test_a_full_socket_goes_on_where_it_was() {
  Ends ends;
  ends.shaken();
  const std::vector<std::byte> bytes = numbers(5'000'000, 4);
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  std::size_t sent = 0, received = 0;
  while (const std::size_t count = ends.client->send_some({&part, 1})) sent += count;
  CHECK(ends.client->send_some({&part, 1}) == 0);  // nothing is encrypted twice
  in_threads(2, [&](int number) {
    if (number == 0) {
      std::size_t count = 0;
      while ((count = ends.client->send_some({&part, 1})) == 0) wait(ends.fds[0], POLLOUT);
      sent += count;
      ::shutdown(ends.fds[0], SHUT_WR);
    } else {
      std::vector<std::byte> memory(1 << 16);
      try {
        while (true) {
          const std::size_t count = ends.server->receive_some(memory);
          if (count == 0) wait(ends.fds[1], POLLIN);
          received += count;
        }
      } catch (const ConnectionEnded&) {
        return;
      }
    }
  });
  CHECK(received == sent);
}

void test_a_wrong_certificate_is_refused() {
  for (const bool is_key : {false, true}) {
    std::vector<std::byte> certificate = der_of(kCertificate), key = der_of(kKey);
    (is_key ? key : certificate).resize(20);
    bool is_refused = false;
    try {
      TlsContext::server(certificate, key);
    } catch (const std::runtime_error&) {
      is_refused = true;
    }
    CHECK(is_refused);
  }
}

}  // namespace

void test_tls() {
  try {
    openssl();
  } catch (const std::runtime_error& error) {
    std::printf("TLS is not checked: %s\n", error.what());
    return;
  }
  test_both_directions_at_once(TlsContext::kRecordsOfKey);
  test_both_directions_at_once(2);
  test_keys_change();
  test_the_client_sees_the_certificate();
  test_broken_records();
  test_what_is_no_tls();
  test_a_full_socket_goes_on_where_it_was();
  test_a_wrong_certificate_is_refused();
}
