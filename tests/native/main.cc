// The native core without Python, to be built with sanitizers; see .ci/sanitize.

#include "check.h"

int main() {
  if constexpr (!kFindsRaces) {
    test_table_parts();
    test_row_codec();
    test_row_file();
  }
  test_row_reads();
  test_tables();
  test_moments();
  test_tiers();
  test_broken_tiers();
  test_server();
  test_collectives();
  test_text_and_arrays();
  test_wire();
  test_client();
  test_tls();
  std::puts("the native core: all checks passed");
}
