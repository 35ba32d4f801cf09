// Floating-point operations of attention.
#pragma once
#include "contraction.h"

// The formula of an attention operator; NULL for other names.
FlopFormula attention_formula(const std::string& name);
