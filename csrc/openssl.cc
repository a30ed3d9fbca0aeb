#include "openssl.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace phalanx {
namespace {

void* opened(const char* name) {
  // Python's `ssl` has often loaded it already, and this is the same library then.
  void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  return library;
}

template <class Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("it has no ") + name);
}

OpenSsl load() {
  OpenSsl calls;
  // Neither is ever closed: OpenSSL keeps things for each thread, and frees them when the process ends.
  void* const ssl = opened("libssl.so.3");
  void* const crypto = opened("libcrypto.so.3");
#define PHALANX_FIND(library, name) find(library, calls.name, #name)
  PHALANX_FIND(ssl, TLS_client_method);
  PHALANX_FIND(ssl, TLS_server_method);
  PHALANX_FIND(ssl, SSL_CTX_new);
  PHALANX_FIND(ssl, SSL_CTX_free);
  PHALANX_FIND(ssl, SSL_CTX_ctrl);
  PHALANX_FIND(ssl, SSL_CTX_set_num_tickets);
  PHALANX_FIND(ssl, SSL_CTX_use_certificate_ASN1);
  PHALANX_FIND(ssl, SSL_CTX_use_PrivateKey_ASN1);
  PHALANX_FIND(ssl, SSL_new);
  PHALANX_FIND(ssl, SSL_free);
  PHALANX_FIND(ssl, SSL_set_bio);
  PHALANX_FIND(ssl, SSL_set_connect_state);
  PHALANX_FIND(ssl, SSL_set_accept_state);
  PHALANX_FIND(ssl, SSL_do_handshake);
  PHALANX_FIND(ssl, SSL_get_error);
  PHALANX_FIND(ssl, SSL_read_ex);
  PHALANX_FIND(ssl, SSL_write_ex);
  PHALANX_FIND(ssl, SSL_key_update);
  PHALANX_FIND(ssl, SSL_get1_peer_certificate);
  PHALANX_FIND(crypto, BIO_meth_new);
  PHALANX_FIND(crypto, BIO_meth_free);
  PHALANX_FIND(crypto, BIO_meth_set_read);
  PHALANX_FIND(crypto, BIO_meth_set_write);
  PHALANX_FIND(crypto, BIO_meth_set_ctrl);
  PHALANX_FIND(crypto, BIO_new);
  PHALANX_FIND(crypto, BIO_set_init);
  PHALANX_FIND(crypto, BIO_set_data);
  PHALANX_FIND(crypto, BIO_get_data);
  PHALANX_FIND(crypto, BIO_set_flags);
  PHALANX_FIND(crypto, BIO_clear_flags);
  PHALANX_FIND(crypto, i2d_X509);
  PHALANX_FIND(crypto, X509_free);
  PHALANX_FIND(crypto, ERR_clear_error);
  PHALANX_FIND(crypto, ERR_peek_last_error);
  PHALANX_FIND(crypto, ERR_reason_error_string);
#undef PHALANX_FIND
  return calls;
}

}  // namespace

const OpenSsl& openssl() {
  static const OpenSsl calls = load();
  return calls;
}

}  // namespace phalanx
