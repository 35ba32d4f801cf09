//! The data sets.
