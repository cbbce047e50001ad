//! Integration tests, laid out like the source.

#[cfg(test)]
mod provider;
#[cfg(test)]
mod store;
#[cfg(test)]
mod support;
#[cfg(test)]
mod tool;
