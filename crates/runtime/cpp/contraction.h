// Floating-point operations of the operators that contract an index: matrix products, convolutions, attention.
#pragma once
#include <ATen/core/ivalue.h>
#include <cstdint>
#include <optional>
#include <string>

struct Flops {
  uint64_t dense = 0; // every query with every key
  uint64_t causal = 0; // only the pairs that a causal mask or a window keeps
};

using FlopFormula = std::optional<Flops> (*)(c10::ArrayRef<c10::IValue> inputs);

// The formula of an operator, by its name without namespace and without trailing underscore; NULL when there is none. A
// formula returns nothing for operands that it does not support, such as sparse ones.
FlopFormula flop_formula(const std::string& name);
