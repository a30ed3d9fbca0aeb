// The update rules, on one row: `w` values, `s` optimizer state, `g` gradient. Twin of ps/table/update_rules.py.
//
// They follow torch.optim on the rows that a push names; FTRL follows H. B. McMahan et al., "Ad Click Prediction: a
// View from the Trenches", 2013, algorithm 1. Every operation is a float32 one in the order that the twin has too;
// factors are made in double first. Build without contraction into fused multiply-adds, to keep that order.

#pragma once

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <variant>

#include "table_spec.h"

namespace phalanx {

// Plain pointers that do not overlap, so that the loops below become vector ones.
using Values = float* __restrict;
using Gradient = const float* __restrict;

struct Sgd {
  static constexpr const char* kKind = "sgd";
  Sgd(const RuleSpec& spec, double rate) : lr(static_cast<float>(rate)), decay(static_cast<float>(spec["weight_decay"])) {}
  void operator()(Values w, Values, Gradient g, std::size_t dim) const {
    for (std::size_t j = 0; j < dim; ++j) w[j] -= lr * (decay != 0 ? g[j] + decay * w[j] : g[j]);
  }
  float lr, decay;
};

struct Momentum {
  static constexpr const char* kKind = "momentum";
  Momentum(const RuleSpec& spec, double rate)
      : lr(static_cast<float>(rate)), decay(static_cast<float>(spec["weight_decay"])),
        momentum(static_cast<float>(spec["momentum"])), share(static_cast<float>(1 - spec["dampening"])),
        dampens(spec["dampening"] != 0), nesterov(spec["nesterov"] != 0) {}
  void operator()(Values w, Values s, Gradient g, std::size_t dim) const {
    const bool is_first = dampens && s[dim] == 0;  // the first gradient of a row is taken undampened
    if (dampens) s[dim] += 1;
    for (std::size_t j = 0; j < dim; ++j) {
      const float gradient = decay != 0 ? g[j] + decay * w[j] : g[j];
      const float velocity = is_first ? gradient : momentum * s[j] + share * gradient;
      s[j] = velocity;
      w[j] -= lr * (nesterov ? gradient + momentum * velocity : velocity);
    }
  }
  float lr, decay, momentum, share;
  bool dampens, nesterov;
};

struct Adagrad {
  static constexpr const char* kKind = "adagrad";
  Adagrad(const RuleSpec& spec, double rate)
      : lr(rate), lr_decay(spec["lr_decay"]), decay(static_cast<float>(spec["weight_decay"])),
        eps(static_cast<float>(spec["eps"])) {}
  void operator()(Values w, Values s, Gradient g, std::size_t dim) const {
    auto rate = static_cast<float>(lr);
    if (lr_decay != 0) {
      rate = static_cast<float>(lr / (1 + static_cast<double>(s[dim]) * lr_decay));
      s[dim] += 1;
    }
    for (std::size_t j = 0; j < dim; ++j) {
      const float gradient = decay != 0 ? g[j] + decay * w[j] : g[j];
      s[j] += gradient * gradient;
      w[j] -= rate * (gradient / (std::sqrt(s[j]) + eps));
    }
  }
  double lr, lr_decay;
  float decay, eps;
};

struct RowWiseAdagrad {
  static constexpr const char* kKind = "row_wise_adagrad";
  RowWiseAdagrad(const RuleSpec& spec, double rate) : lr(static_cast<float>(rate)), eps(static_cast<float>(spec["eps"])) {}
  void operator()(Values w, Values s, Gradient g, std::size_t dim) const {
    double sum = 0;
    for (std::size_t j = 0; j < dim; ++j) sum += static_cast<double>(g[j]) * static_cast<double>(g[j]);
    s[0] += static_cast<float>(sum / static_cast<double>(dim));
    const float rate = lr / (std::sqrt(s[0]) + eps);
    for (std::size_t j = 0; j < dim; ++j) w[j] -= rate * g[j];
  }
  float lr, eps;
};

struct Adam {
  static constexpr const char* kKind = "adam";
  Adam(const RuleSpec& spec, double rate)
      : lr(rate), first(spec["betas.0"]), second(spec["betas.1"]), first_share(static_cast<float>(1 - first)),
        second_kept(static_cast<float>(second)), second_share(static_cast<float>(1 - second)),
        eps(static_cast<float>(spec["eps"])), decay(spec["decoupled"] != 0 ? 0 : static_cast<float>(spec["weight_decay"])),
        kept(spec["decoupled"] != 0 ? static_cast<float>(1 - rate * spec["weight_decay"]) : 1) {}
  void operator()(Values w, Values s, Gradient g, std::size_t dim) const {
    Values mean = s;
    Values square = s + dim;
    const double steps = static_cast<double>(s[2 * dim] += 1);
    const auto rate = static_cast<float>(lr / (1 - std::pow(first, steps)));
    const auto correction = static_cast<float>(std::sqrt(1 - std::pow(second, steps)));
    for (std::size_t j = 0; j < dim; ++j) {
      const float value = w[j] * kept;
      const float gradient = decay != 0 ? g[j] + decay * value : g[j];
      mean[j] += first_share * (gradient - mean[j]);
      square[j] = second_kept * square[j] + second_share * (gradient * gradient);
      w[j] = value - rate * (mean[j] / (std::sqrt(square[j]) / correction + eps));
    }
  }
  double lr, first, second;
  float first_share, second_kept, second_share, eps, decay, kept;
};

struct Rmsprop {
  static constexpr const char* kKind = "rmsprop";
  Rmsprop(const RuleSpec& spec, double rate)
      : lr(static_cast<float>(rate)), decay(static_cast<float>(spec["weight_decay"])),
        kept(static_cast<float>(spec["alpha"])), share(static_cast<float>(1 - spec["alpha"])),
        eps(static_cast<float>(spec["eps"])) {}
  void operator()(Values w, Values s, Gradient g, std::size_t dim) const {
    for (std::size_t j = 0; j < dim; ++j) {
      const float gradient = decay != 0 ? g[j] + decay * w[j] : g[j];
      s[j] = kept * s[j] + share * (gradient * gradient);
      w[j] -= lr * (gradient / (std::sqrt(s[j]) + eps));
    }
  }
  float lr, decay, kept, share, eps;
};

struct Ftrl {
  static constexpr const char* kKind = "ftrl";
  Ftrl(const RuleSpec& spec, double rate)
      : alpha(static_cast<float>(rate)), beta(static_cast<float>(spec["beta"])), l1(static_cast<float>(spec["l1"])),
        l2(static_cast<float>(spec["l2"])) {}
  void operator()(Values w, Values s, Gradient g, std::size_t dim) const {
    Values z = s;
    Values n = s + dim;
    for (std::size_t j = 0; j < dim; ++j) {
      const float grown = n[j] + g[j] * g[j];
      z[j] += g[j] - (std::sqrt(grown) - std::sqrt(n[j])) / alpha * w[j];
      n[j] = grown;
      const float strength = (beta + std::sqrt(grown)) / alpha + l2;
      // With beta, l2 and n all 0 the strength is 0, and so is z: such an element has no gradient yet and is 0.
      const float pulled = (std::copysign(l1, z[j]) - z[j]) / (strength > 0 ? strength : 1);
      w[j] = std::fabs(z[j]) <= l1 ? 0 : pulled;
    }
  }
  float alpha, beta, l1, l2;
};

using UpdateRule = std::variant<Sgd, Momentum, Adagrad, RowWiseAdagrad, Adam, Rmsprop, Ftrl>;

// The rule that the settings name, at this learning rate. Throws std::invalid_argument where no struct has its kind, and
// std::out_of_range where the settings lack a number that it reads.
template <std::size_t kIndex = 0>
UpdateRule make_rule(const RuleSpec& spec, double rate) {
  if constexpr (kIndex < std::variant_size_v<UpdateRule>) {
    using Rule = std::variant_alternative_t<kIndex, UpdateRule>;
    if (spec.kind == Rule::kKind) return Rule(spec, rate);
    return make_rule<kIndex + 1>(spec, rate);
  } else {
    throw std::invalid_argument("the native table has no update rule '" + spec.kind + "'");
  }
}

}  // namespace phalanx
