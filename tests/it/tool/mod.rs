//! Tests of the tools.

mod command;
mod command_tree;
pub(crate) mod support;
pub(crate) mod tree;
