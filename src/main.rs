//! The `hames` program.

fn main() {}
