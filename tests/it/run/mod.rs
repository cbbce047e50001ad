//! Runs through the whole service, with a model and tools that do what the test says.

mod abuse;
mod cases;
mod crash;
mod end;
mod lifecycle;
mod load;
mod restart;
mod wire;
