// Classes of operators, from what the dispatcher knows: composite, a view, elementwise.
#pragma once
#include "contraction.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <vector>

enum class OperatorClass {
  CONTRACTION, // has a FLOP formula, which covers the operators that it calls
  SILENT, // neither computes nor accesses memory: views, empty tensors, queries
  FACTORY, // fills a new tensor
  PLAIN, // computes without contracting: elementwise, reductions, copies, indexing
  COMPOSITE, // its kernel only calls other operators, which are counted themselves
  UNKNOWN,
};

struct Operator {
  std::string name;
  const c10::FunctionSchema* schema;
  FlopFormula formula;
  bool composite_cpu; // whether the composite kernel is the one that runs
  bool composite_cuda;
  bool made_of_operators; // has some composite kernel, so that it may be counted by the operators that it calls
  bool writes_only; // does not read what it overwrites
  bool gathers; // reads as many bytes of its first operand as it returns
  OperatorClass otherwise; // the class where it is not composite

  OperatorClass operator_class(c10::ArrayRef<c10::IValue> inputs) const;
  // Bytes of the memory that the inputs span, including those that are written.
  uint64_t input_bytes(c10::ArrayRef<c10::IValue> inputs) const;
  // Bytes of results that are new memory.
  uint64_t output_bytes(c10::ArrayRef<c10::IValue> outputs) const;
};

// NULL for what is not an operator, such as the name of a range. The result is never freed.
const Operator* find_operator(const char* name, const char* overload);
