// TLS 1.3 over a connected socket, by the system's OpenSSL 3. Nobody signs the server's certificate: who uses a stream
// must bind it to a proof of the other end, as ps/wire/secret.py does, before anything else goes over it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "openssl.h"
#include "wire_stream.h"

namespace phalanx {

// The other end does not speak TLS 1.3; the text is OpenSSL's reason.
struct TlsError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class T>
using OpenSslObject = std::unique_ptr<T, void (*)(T*)>;

// What the streams of one end have in common. Thread-safety: any thread, once it is made.
class TlsContext {
 public:
  // Records that are encrypted under one key. AES-GCM may encrypt 24 million (RFC 8446, 5.5).
  static constexpr std::uint64_t kRecordsOfKey = std::uint64_t{1} << 22;

  // All throw std::runtime_error if OpenSSL cannot be loaded or refuses what it is given.
  static std::shared_ptr<TlsContext> client(std::uint64_t records_of_key = kRecordsOfKey);
  // The certificate of the server and its elliptic key, in DER.
  static std::shared_ptr<TlsContext> server(std::span<const std::byte> certificate, std::span<const std::byte> key,
                                            std::uint64_t records_of_key = kRecordsOfKey);

 private:
  friend class TlsStream;
  TlsContext(bool is_server, std::uint64_t records_of_key);

  const OpenSsl& openssl_ = openssl();
  const bool is_server_;
  const std::uint64_t records_of_key_;
  OpenSslObject<ssl_ctx_st> context_;
  OpenSslObject<bio_method_st> memory_;  // how OpenSSL reads and writes the records that a stream has
};

// Thread-safety: any thread; each call that encrypts or decrypts holds the stream for some records.
class TlsStream : public SocketStream {
 public:
  // REQUIRES: the socket is open as long as anything is called.
  TlsStream(std::shared_ptr<const TlsContext> context, int fd);

  // Continues with the agreement on keys. Returns the events of poll to wait for before the next call; 0: it is done.
  // Throws TlsError, or ConnectionEnded.
  short shake_hands();

  // The certificate of the server, in DER. REQUIRES: this is the client's end, and hands were shaken.
  std::vector<std::uint8_t> peer_certificate() const;

  bool is_authenticated() const override { return true; }
  std::size_t receive_some(std::span<std::byte> memory) override;
  std::size_t send_some(std::span<const iovec> parts) override;

 private:
  friend class TlsContext;
  static int take_record(bio_st* bio, char* memory, int size);
  static int put_record(bio_st* bio, const char* bytes, int size);
  static long control(bio_st* bio, int command, long number, void* pointer);

  std::size_t decrypt(std::span<std::byte> memory);
  bool read_records();
  std::size_t encrypt(std::span<const iovec> parts);
  void write_records(std::span<const std::byte> bytes);
  bool flush();
  void send_answers();
  void send_alert();
  // Why the last call failed. Throws ConnectionEnded if the other end has closed.
  std::string failure(int returned) const;

  const std::shared_ptr<const TlsContext> context_;
  const OpenSsl& openssl_ = openssl();
  PlainStream socket_;
  std::mutex mutex_;
  OpenSslObject<ssl_st> tls_;
  std::string failure_;  // why nothing can be read any more, once all before it was

  std::unique_ptr<std::byte[]> received_;  // records that came
  std::size_t received_start_ = 0, received_end_ = 0;
  std::vector<std::byte> unsent_;  // records to send, from `sent_` on
  std::size_t sent_ = 0;
  std::size_t encrypted_ = 0;  // bytes of `send_some` that are in `unsent_`
  std::uint64_t records_ = 0;  // that were encrypted under the present key
  std::unique_ptr<std::byte[]> joined_;  // small parts that become one record
};

}  // namespace phalanx
