// What the dispatcher itself says about an operator: whether it is made of others, a view, or elementwise.
#pragma once
#include "contraction.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <vector>

enum class OperatorClass {
  CONTRACTION, // has a FLOP formula; what it calls belongs to it
  SILENT, // neither computes nor touches memory: views, empty tensors, questions
  FACTORY, // fills a new tensor
  PLAIN, // computes without contracting: elementwise, reductions, copies, indexing
  COMPOSITE, // its kernel only calls other operators, which are seen themselves
  UNKNOWN,
};

struct Operator {
  std::string name;
  const c10::FunctionSchema* schema;
  FlopFormula formula;
  bool composite_cpu; // whether the composite kernel is the one that runs
  bool composite_cuda;
  bool made_of_operators; // has some composite kernel, so that what it calls may stand for it
  bool writes_only; // does not read what it overwrites
  bool gathers; // reads as much of its first operand as it gives out
  OperatorClass otherwise; // where it is not composite

  OperatorClass operator_class(c10::ArrayRef<c10::IValue> inputs) const;
  // Bytes of the memory that the inputs span, those that are written included.
  uint64_t input_bytes(c10::ArrayRef<c10::IValue> inputs) const;
  // Bytes of results that are new memory.
  uint64_t output_bytes(c10::ArrayRef<c10::IValue> outputs) const;
};

// NULL for what is not an operator, such as the name of a range. The result lives for ever.
const Operator* find_operator(const char* name, const char* overload);
