// What the tests of the native core share: checks that name their line, and threads that start together.

#pragma once

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
      std::abort();                                                                 \
    }                                                                               \
  } while (false)

// Built to find races. What one thread does alone has none, and would take ten times as long: other sanitizers run it.
#ifdef __SANITIZE_THREAD__
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
#endif

// Runs work(0) to work(count - 1), each in a thread of its own, at once.
inline void in_threads(int count, const std::function<void(int)>& work) {
  std::barrier start(count);
  std::vector<std::thread> threads;
  for (int number = 0; number < count; ++number) {
    threads.emplace_back([&, number] {
      start.arrive_and_wait();
      work(number);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Whether work() throws such an error.
template <class Error, class Work>
bool throws(Work work) {
  try {
    work();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void test_table_parts();
void test_row_codec();
void test_row_file();
void test_row_reads();
void test_moments();
void test_server();
void test_tables();
void test_tiers();
void test_broken_tiers();
void test_collectives();
void test_text_and_arrays();
void test_wire();
void test_client();
void test_tls();
