//! The store: one contract for every database, and what is particular to each.

mod contract;
mod model;
mod postgres;
pub(crate) mod sample;
mod sqlite;
