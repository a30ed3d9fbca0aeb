// One function per part of the core that Python sees; bindings.cc calls them all.

#pragma once

#include <nanobind/nanobind.h>

void bind_bags(nanobind::module_& module);
void bind_client(nanobind::module_& module);
void bind_images(nanobind::module_& module);
void bind_server(nanobind::module_& module);
void bind_partition(nanobind::module_& module);
void bind_shm(nanobind::module_& module);
void bind_shuffle(nanobind::module_& module);
void bind_slots(nanobind::module_& module);
void bind_square_sums(nanobind::module_& module);
void bind_table(nanobind::module_& module);
void bind_tls(nanobind::module_& module);
void bind_unique(nanobind::module_& module);
void bind_wire(nanobind::module_& module);
