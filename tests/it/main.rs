//! Integration tests, laid out like the source.
