#include "wire_tls.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace phalanx {
namespace {

// From openssl/ssl.h and openssl/bio.h.
constexpr int kSetMinimumVersion = 123, kVersion13 = 0x0304;
constexpr int kEllipticKey = 408;
constexpr int kErrorWantRead = 2, kErrorZeroReturn = 6;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kBioRead = 0x01, kBioWrite = 0x02, kBioRetry = 0x08;
constexpr int kBioSource = 0x0400, kBioFlush = 11;

constexpr std::size_t kRecordBytes = std::size_t{1} << 14;  // the largest that TLS has
constexpr std::size_t kReceiveBytes = std::size_t{1} << 17;
constexpr std::size_t kSendBytes = std::size_t{1} << 18;  // encrypted before any of it is sent
constexpr std::size_t kMostUnsent = 2 * kSendBytes;
constexpr int kMostReads = 64;

[[noreturn]] void throw_reason(const OpenSsl& openssl) {
  const char* reason = openssl.ERR_reason_error_string(openssl.ERR_peek_last_error());
  openssl.ERR_clear_error();
  throw std::runtime_error(reason == nullptr ? "OpenSSL gives no reason" : reason);
}

}  // namespace

TlsContext::TlsContext(bool is_server, std::uint64_t records_of_key)
    : is_server_(is_server),
      records_of_key_(records_of_key),
      context_(openssl_.SSL_CTX_new(is_server ? openssl_.TLS_server_method() : openssl_.TLS_client_method()),
               openssl_.SSL_CTX_free),
      memory_(openssl_.BIO_meth_new(kBioSource, "phalanx records"), openssl_.BIO_meth_free) {
  if (context_ == nullptr || memory_ == nullptr) throw_reason(openssl_);
  openssl_.BIO_meth_set_read(memory_.get(), &TlsStream::take_record);
  openssl_.BIO_meth_set_write(memory_.get(), &TlsStream::put_record);
  openssl_.BIO_meth_set_ctrl(memory_.get(), &TlsStream::control);
  // No tickets: a later connection proves the certificate again.
  if (openssl_.SSL_CTX_ctrl(context_.get(), kSetMinimumVersion, kVersion13, nullptr) != 1 ||
      openssl_.SSL_CTX_set_num_tickets(context_.get(), 0) != 1) {
    throw_reason(openssl_);
  }
}

std::shared_ptr<TlsContext> TlsContext::client(std::uint64_t records_of_key) {
  return std::shared_ptr<TlsContext>(new TlsContext(false, records_of_key));
}

std::shared_ptr<TlsContext> TlsContext::server(std::span<const std::byte> certificate, std::span<const std::byte> key,
                                               std::uint64_t records_of_key) {
  const std::shared_ptr<TlsContext> server(new TlsContext(true, records_of_key));
  const auto* const certificate_der = reinterpret_cast<const unsigned char*>(certificate.data());
  const auto* const key_der = reinterpret_cast<const unsigned char*>(key.data());
  const OpenSsl& calls = server->openssl_;
  calls.ERR_clear_error();
  if (calls.SSL_CTX_use_certificate_ASN1(server->context_.get(), static_cast<int>(certificate.size()), certificate_der) != 1 ||
      calls.SSL_CTX_use_PrivateKey_ASN1(kEllipticKey, server->context_.get(), key_der, static_cast<long>(key.size())) != 1) {
    throw_reason(calls);
  }
  return server;
}

TlsStream::TlsStream(std::shared_ptr<const TlsContext> context, int fd)
    : SocketStream(fd),
      context_(std::move(context)),
      socket_(fd),
      tls_(openssl_.SSL_new(context_->context_.get()), openssl_.SSL_free),
      received_(std::make_unique_for_overwrite<std::byte[]>(kReceiveBytes)),
      joined_(std::make_unique_for_overwrite<std::byte[]>(kRecordBytes)) {
  bio_st* const bio = tls_ == nullptr ? nullptr : openssl_.BIO_new(context_->memory_.get());
  if (bio == nullptr) throw_reason(openssl_);
  openssl_.BIO_set_data(bio, this);
  openssl_.BIO_set_init(bio, 1);
  openssl_.SSL_set_bio(tls_.get(), bio, bio);
  (context_->is_server_ ? openssl_.SSL_set_accept_state : openssl_.SSL_set_connect_state)(tls_.get());
}

int TlsStream::take_record(bio_st* bio, char* memory, int size) {
  auto& stream = *static_cast<TlsStream*>(openssl().BIO_get_data(bio));
  openssl().BIO_clear_flags(bio, kBioRead | kBioWrite | kBioRetry);
  const std::size_t count = std::min<std::size_t>(stream.received_end_ - stream.received_start_, size);
  if (count == 0) {
    openssl().BIO_set_flags(bio, kBioRead | kBioRetry);
    return -1;
  }
  std::memcpy(memory, stream.received_.get() + stream.received_start_, count);
  stream.received_start_ += count;
  return static_cast<int>(count);
}

int TlsStream::put_record(bio_st* bio, const char* bytes, int size) {
  auto& stream = *static_cast<TlsStream*>(openssl().BIO_get_data(bio));
  openssl().BIO_clear_flags(bio, kBioRead | kBioWrite | kBioRetry);
  try {
    const auto* const first = reinterpret_cast<const std::byte*>(bytes);
    stream.unsent_.insert(stream.unsent_.end(), first, first + size);
  } catch (const std::exception&) {
    return -1;  // no memory; an exception must not pass through C
  }
  return size;
}

long TlsStream::control(bio_st*, int command, long, void*) { return command == kBioFlush ? 1 : 0; }

short TlsStream::shake_hands() {
  const std::lock_guard locked(mutex_);
  while (true) {
    openssl_.ERR_clear_error();
    const int returned = openssl_.SSL_do_handshake(tls_.get());
    if (returned == 1) return flush() ? 0 : POLLOUT;
    if (openssl_.SSL_get_error(tls_.get(), returned) != kErrorWantRead) {
      const std::string why = failure(returned);
      send_alert();
      throw TlsError(why);
    }
    if (!flush()) return POLLOUT;
    if (!read_records()) return POLLIN;
  }
}

std::vector<std::uint8_t> TlsStream::peer_certificate() const {
  const OpenSslObject<x509_st> certificate(openssl_.SSL_get1_peer_certificate(tls_.get()), openssl_.X509_free);
  if (certificate == nullptr) throw TlsError("no certificate");
  std::vector<std::uint8_t> der(static_cast<std::size_t>(openssl_.i2d_X509(certificate.get(), nullptr)));
  unsigned char* out = der.data();
  openssl_.i2d_X509(certificate.get(), &out);
  return der;
}

std::size_t TlsStream::receive_some(std::span<std::byte> memory) {
  std::size_t total = 0;
  int reads = 0;
  while (total < memory.size()) {
    // Another thread may send between two records.
    const std::lock_guard locked(mutex_);
    const std::size_t count = failure_.empty() ? decrypt(memory.subspan(total)) : 0;
    send_answers();
    if (count > 0) {
      total += count;
      continue;
    }
    if (total > 0) break;
    if (!failure_.empty()) throw ConnectionEnded(failure_);
    // Whoever waits looks at its deadline now and then, also where records without data come all the time.
    if (reads++ == kMostReads || !read_records()) break;
  }
  return total;
}

// Returns the bytes of one record; 0 if none is whole, or with `failure_` if none ever will be.
std::size_t TlsStream::decrypt(std::span<std::byte> memory) {
  std::size_t count = 0;
  openssl_.ERR_clear_error();
  const int returned = openssl_.SSL_read_ex(tls_.get(), memory.data(), memory.size(), &count);
  if (returned == 1) return count;
  if (openssl_.SSL_get_error(tls_.get(), returned) != kErrorWantRead) {
    failure_ = failure(returned);
    send_alert();
  }
  return 0;
}

// Takes what the socket has, once all before was decrypted. Returns whether it had anything.
bool TlsStream::read_records() {
  received_start_ = received_end_ = 0;
  received_end_ = socket_.receive_some({received_.get(), kReceiveBytes});
  return received_end_ > 0;
}

std::size_t TlsStream::send_some(std::span<const iovec> parts) {
  const std::lock_guard locked(mutex_);
  // What is encrypted must be sent, so it counts as written when it is.
  if (encrypted_ == 0) encrypted_ = encrypt(parts);
  return flush() ? std::exchange(encrypted_, 0) : 0;
}

// Small parts are joined, so that each does not become a record of its own. All records but the last are full.
std::size_t TlsStream::encrypt(std::span<const iovec> parts) {
  std::size_t taken = 0, joined = 0;
  const auto end_record = [&] {
    if (joined > 0) write_records({joined_.get(), joined});
    joined = 0;
  };
  for (const iovec& part : parts) {
    std::span rest(static_cast<const std::byte*>(part.iov_base), part.iov_len);
    while (!rest.empty() && taken < kSendBytes) {
      const bool is_whole = joined == 0 && rest.size() >= kRecordBytes;
      const std::size_t count = is_whole ? std::min(rest.size(), kSendBytes - taken) / kRecordBytes * kRecordBytes
                                         : std::min(rest.size(), kRecordBytes - joined);
      if (is_whole) {
        write_records(rest.first(count));
      } else {
        std::memcpy(joined_.get() + joined, rest.data(), count);
        if ((joined += count) == kRecordBytes) end_record();
      }
      taken += count;
      rest = rest.subspan(count);
    }
  }
  end_record();
  return taken;
}

void TlsStream::write_records(std::span<const std::byte> bytes) {
  openssl_.ERR_clear_error();
  if (records_ >= context_->records_of_key_) {
    const int updated = openssl_.SSL_key_update(tls_.get(), kKeyUpdateNotRequested);
    if (updated != 1) throw ConnectionEnded(failure(updated));
    records_ = 0;
  }
  std::size_t count = 0;
  const int returned = openssl_.SSL_write_ex(tls_.get(), bytes.data(), bytes.size(), &count);
  if (returned != 1) throw ConnectionEnded(failure(returned));
  records_ += (bytes.size() + kRecordBytes - 1) / kRecordBytes;
}

bool TlsStream::flush() {
  while (sent_ < unsent_.size()) {
    const iovec part{unsent_.data() + sent_, unsent_.size() - sent_};
    const std::size_t count = socket_.send_some({&part, 1});
    if (count == 0) return false;
    sent_ += count;
  }
  unsent_.clear();
  sent_ = 0;
  return true;
}

// Sends what OpenSSL answers by itself: new keys that the other end asks for. One that reads no answer may not ask for ever.
void TlsStream::send_answers() {
  if (unsent_.empty()) return;
  flush();
  if (unsent_.size() - sent_ > kMostUnsent) throw ConnectionEnded("it asks for new keys and reads no answer");
}

// Tells the other end why this one gives up, if it can still be told.
void TlsStream::send_alert() {
  try {
    flush();
  } catch (const ConnectionEnded&) {
    return;  // the reason is with the caller
  }
}

std::string TlsStream::failure(int returned) const {
  const int error = openssl_.SSL_get_error(tls_.get(), returned);
  const char* const reason = openssl_.ERR_reason_error_string(openssl_.ERR_peek_last_error());
  openssl_.ERR_clear_error();
  if (error == kErrorZeroReturn) return "it closed the connection";
  return reason == nullptr ? "OpenSSL gives no reason" : reason;
}

}  // namespace phalanx
