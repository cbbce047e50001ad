//! Integration tests, laid out like the source.

#[cfg(test)]
mod architecture;
#[cfg(test)]
mod cli;
#[cfg(test)]
mod config;
#[cfg(test)]
mod containers;
#[cfg(test)]
mod hot_path;
#[cfg(test)]
mod http;
#[cfg(test)]
mod provider;
#[cfg(test)]
mod run;
#[cfg(test)]
mod store;
#[cfg(test)]
mod support;
#[cfg(test)]
mod telemetry;
#[cfg(test)]
mod tool;
