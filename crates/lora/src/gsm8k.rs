//! GSM8K (Cobbe et al., arXiv:2110.14168): word problems, prompts, and the graders of their answers.
