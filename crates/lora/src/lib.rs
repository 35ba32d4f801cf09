//! Low-rank adaptation of a frozen model (Hu et al., arXiv:2106.09685), in PEFT's files, trained and graded on GSM8K.

pub mod gsm8k;
