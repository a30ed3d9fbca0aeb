// The calls of the system's OpenSSL 3 that TLS needs. The library is loaded when the first of them is asked for: wheels
// bring no copy of it, and its security updates are the system's.

#pragma once

#include <cstddef>

struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct bio_st;
struct bio_method_st;
struct x509_st;

namespace phalanx {

// The C functions, by their names; OpenSSL keeps their ABI in all of version 3.
struct OpenSsl {
  // libssl
  const ssl_method_st* (*TLS_client_method)();
  const ssl_method_st* (*TLS_server_method)();
  ssl_ctx_st* (*SSL_CTX_new)(const ssl_method_st*);
  void (*SSL_CTX_free)(ssl_ctx_st*);
  long (*SSL_CTX_ctrl)(ssl_ctx_st*, int command, long number, void* pointer);
  int (*SSL_CTX_set_num_tickets)(ssl_ctx_st*, std::size_t count);
  int (*SSL_CTX_use_certificate_ASN1)(ssl_ctx_st*, int size, const unsigned char* der);
  int (*SSL_CTX_use_PrivateKey_ASN1)(int type, ssl_ctx_st*, const unsigned char* der, long size);
  ssl_st* (*SSL_new)(ssl_ctx_st*);
  void (*SSL_free)(ssl_st*);
  void (*SSL_set_bio)(ssl_st*, bio_st* read, bio_st* write);
  void (*SSL_set_connect_state)(ssl_st*);
  void (*SSL_set_accept_state)(ssl_st*);
  int (*SSL_do_handshake)(ssl_st*);
  int (*SSL_get_error)(const ssl_st*, int returned);
  int (*SSL_read_ex)(ssl_st*, void* memory, std::size_t size, std::size_t* count);
  int (*SSL_write_ex)(ssl_st*, const void* bytes, std::size_t size, std::size_t* count);
  int (*SSL_key_update)(ssl_st*, int type);
  x509_st* (*SSL_get1_peer_certificate)(const ssl_st*);
  // libcrypto
  bio_method_st* (*BIO_meth_new)(int type, const char* name);
  void (*BIO_meth_free)(bio_method_st*);
  int (*BIO_meth_set_read)(bio_method_st*, int (*read)(bio_st*, char* memory, int size));
  int (*BIO_meth_set_write)(bio_method_st*, int (*write)(bio_st*, const char* bytes, int size));
  int (*BIO_meth_set_ctrl)(bio_method_st*, long (*ctrl)(bio_st*, int command, long number, void* pointer));
  bio_st* (*BIO_new)(const bio_method_st*);
  void (*BIO_set_init)(bio_st*, int init);
  void (*BIO_set_data)(bio_st*, void* data);
  void* (*BIO_get_data)(bio_st*);
  void (*BIO_set_flags)(bio_st*, int flags);
  void (*BIO_clear_flags)(bio_st*, int flags);
  int (*i2d_X509)(const x509_st*, unsigned char** out);
  void (*X509_free)(x509_st*);
  void (*ERR_clear_error)();
  unsigned long (*ERR_peek_last_error)();
  const char* (*ERR_reason_error_string)(unsigned long error);
};

// Throws std::runtime_error with the reason if it cannot be loaded. Thread-safety: any thread.
const OpenSsl& openssl();

}  // namespace phalanx
