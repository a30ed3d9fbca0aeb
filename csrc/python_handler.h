// A data handler that is a Python function: it holds the GIL while it answers.

#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "server_request.h"

namespace phalanx {

class __attribute__((visibility("hidden"))) PythonHandler : public DataHandler {
 public:
  // answer(is_push, client, seq, step, weight, keep, pushes, pulls, rows, report_wait) -> (status, number, dropped);
  // see ps/server/data_requests.py.
  explicit PythonHandler(nanobind::callable answer) : answer_(std::move(answer)) {}

  DataReply answer(const DataRequest& request, Caller& caller) override;

 private:
  nanobind::callable answer_;
};

}  // namespace phalanx
