//! The files a run may touch.

/// A directory and what may be done in it.
#[derive(Debug)]
pub struct Workspace;
