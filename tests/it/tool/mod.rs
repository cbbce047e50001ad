//! Tests of the tools.

mod command;
mod command_tree;
mod support;
