// Python's view of the native core.

#include "bind.h"

NB_MODULE(_core, module) {
  module.doc() = "Native core of Phalanx.";
  bind_bags(module);
  bind_images(module);
  bind_partition(module);
  bind_client(module);  // whose frames are parts of its requests
  bind_shm(module);
  bind_shuffle(module);
  bind_slots(module);
  bind_square_sums(module);
  bind_table(module);
  bind_unique(module);
  bind_tls(module);
  bind_wire(module);  // whose sessions read streams of bind_tls
  bind_server(module);  // whose engine is a handler of bind_wire
}
