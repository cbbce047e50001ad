//! What integration tests share: fakes that check their caller.

pub(crate) mod upstream;
