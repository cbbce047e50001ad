//! The contract on Postgres, and what only a server that is shared can get wrong. Needs a server; see `database`.

mod database;
mod failure;
mod lease;
mod outage;
mod proxy;
mod stored;

use super::contract::contract_suite;
use super::model::model_test;
use database::PostgresDatabase;

contract_suite!(PostgresDatabase);
model_test!(8, PostgresDatabase);
