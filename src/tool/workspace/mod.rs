//! The files a run may touch: a held directory handle, what may be done below it, and its quotas.

mod path;
mod replace;

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, Metadata, OpenOptions, OpenOptionsExt as _};
use rustix::fs::OFlags;

pub(super) use path::shown_path;
pub use path::{AccessError, Kind};
pub(super) use replace::Replaced;

use crate::config::WorkspaceConfig;
use path::RelPath;

/// Most entries read of one directory.
const MAX_ENTRIES: usize = 100_000;

/// A directory and what may be done in it.
///
/// The directory is opened once and held: every path of a model is resolved below that handle, by the kernel
/// where it can, so neither `..`, a symbolic link nor a rename during the call leads out of it. Calls that edit
/// through one `Workspace` exclude each other; open a configured directory once and share it.
#[derive(Debug)]
pub struct Workspace {
    root: PathBuf,
    dir: Dir,
    writable: bool,
    max_file_bytes: u64,
    max_files: u64,
    changes: Mutex<()>,
}

/// A workspace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// The directory is missing, is not a directory, or may not be read.
    #[error("cannot open the workspace directory `{}`: {source}; it must exist and be readable", path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A scratch directory must be new, and something has its name.
    #[error("the scratch directory `{}` exists already; it must be new", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// A scratch directory cannot be made.
    #[error("cannot create the scratch directory `{}`: {source}", path.display())]
    Create {
        /// The directory.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

impl Workspace {
    /// Opens a configured directory, which must exist. A relative path counts from the current directory.
    pub fn open(config: &WorkspaceConfig) -> Result<Self, WorkspaceError> {
        let failed = |source| WorkspaceError::Open { path: config.path.clone(), source };
        let root = std::path::absolute(&config.path).map_err(failed)?;
        let dir = Dir::open_ambient_dir(&root, ambient_authority()).map_err(failed)?;
        let (writable, max_file_bytes, max_files) = (config.writable, config.max_file_bytes, config.max_files);
        Ok(Self { root, dir, writable, max_file_bytes, max_files, changes: Mutex::new(()) })
    }

    /// Makes a fresh, empty, writable directory of mode 0700 with the default quotas. Missing parents are made
    /// with it; the directory itself must not exist. Removing it is up to the caller.
    pub fn scratch(path: &Path) -> Result<Self, WorkspaceError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AlreadyExists => WorkspaceError::Exists { path: path.to_owned() },
            _ => WorkspaceError::Create { path: path.to_owned(), source },
        };
        let root = std::path::absolute(path).map_err(failed)?;
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(0o700);
        if let Some(parent) = root.parent() {
            builder.recursive(true).create(parent).map_err(failed)?;
        }
        builder.recursive(false).create(&root).map_err(failed)?;
        Self::scratch_again(&root)
    }

    /// Opens one that was made before.
    pub fn scratch_again(path: &Path) -> Result<Self, WorkspaceError> {
        let config = WorkspaceConfig { writable: true, ..WorkspaceConfig::at(path.to_owned()) };
        Self::open(&config)
    }

    /// The directory's absolute path: the working directory of commands. Never joined with a path of a model.
    pub fn root_path(&self) -> &Path {
        &self.root
    }

    /// Whether tools may change files here.
    pub const fn is_writable(&self) -> bool {
        self.writable
    }

    /// Opens a regular file for reading. Never blocks on what only looks like one.
    pub(super) fn file(&self, path: &str) -> Result<(File, Metadata), AccessError> {
        let path = RelPath::parse(path)?;
        self.regular(path.given, path.path)
    }

    fn regular(&self, given: &str, path: &Path) -> Result<(File, Metadata), AccessError> {
        let failed = |source| AccessError::io(given, source);
        let check = |metadata: &Metadata| match Kind::from(metadata.file_type()) {
            Kind::File => Ok(()),
            Kind::Directory => Err(AccessError::Directory { path: given.to_owned() }),
            kind @ (Kind::Link | Kind::Fifo | Kind::Socket | Kind::Device | Kind::Other) => {
                Err(AccessError::Special { path: given.to_owned(), kind })
            }
        };
        // Opening a device can do something, so the kind is looked at first; what counts is what was opened.
        check(&self.dir.metadata(path).map_err(failed)?)?;
        let file = self.dir.open_with(path, &read_options()).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        check(&metadata)?;
        Ok((file, metadata))
    }

    /// Up to `limit` entries of a directory in the order of their names, those after `after` only.
    pub(super) fn list(&self, path: &str, after: &str, limit: usize) -> Result<Listing, AccessError> {
        let path = RelPath::parse(path)?;
        let dir = self.dir.open_dir(path.path).map_err(|source| AccessError::io(path.given, source))?;
        let (mut names, endless) = entries(&dir).map_err(|source| AccessError::io(path.given, source))?;
        names.retain(|(name, _)| name.as_bytes() > after.as_bytes());
        let left_out = names.len().saturating_sub(limit);
        let describe = |(name, kind): (OsString, Kind)| {
            // What vanishes meanwhile has no size and no target.
            let size = match kind {
                Kind::File => dir.symlink_metadata(&name).ok().map(|metadata| metadata.len()),
                Kind::Directory | Kind::Link | Kind::Fifo | Kind::Socket | Kind::Device | Kind::Other => None,
            };
            let target = match kind {
                Kind::Link => dir.read_link_contents(&name).ok(),
                Kind::File | Kind::Directory | Kind::Fifo | Kind::Socket | Kind::Device | Kind::Other => None,
            };
            Entry { name, kind, size, target }
        };
        let entries = names.into_iter().take(limit).map(describe).collect();
        Ok(Listing { entries, left_out, endless })
    }

    /// Everything below a directory, or the file itself, by path; symbolic links are named and not followed.
    pub(super) fn walk(&self, path: &str) -> Result<Walk<'_>, AccessError> {
        let path = RelPath::parse(path)?;
        let failed = |source| AccessError::io(path.given, source);
        let kind = Kind::from(self.dir.metadata(path.path).map_err(failed)?.file_type());
        let mut walk = Walk { workspace: self, pending: Vec::new(), unreadable: 0 };
        match kind {
            Kind::Directory => walk.enter(path.path).map_err(failed)?,
            Kind::File => walk.pending.push(Found { path: path.path.to_owned(), kind }),
            Kind::Link | Kind::Fifo | Kind::Socket | Kind::Device | Kind::Other => {
                return Err(AccessError::Special { path: path.shown(), kind });
            }
        }
        Ok(walk)
    }

    /// Opens what a walk found.
    pub(super) fn found(&self, found: &Found) -> Result<(File, Metadata), AccessError> {
        self.regular(&found.path.to_string_lossy(), &found.path)
    }
}

/// Entries of a directory.
#[derive(Debug)]
pub(super) struct Listing {
    /// Sorted by the bytes of their names.
    pub(super) entries: Vec<Entry>,
    /// How many of those read come after them.
    pub(super) left_out: usize,
    /// Whether the directory has more than the 100 000 entries that are read.
    pub(super) endless: bool,
}

/// An entry of a directory.
#[derive(Debug)]
pub(super) struct Entry {
    /// Its name; may be anything but `/` and NUL.
    pub(super) name: OsString,
    /// What it is.
    pub(super) kind: Kind,
    /// Bytes of a regular file, where they can be told.
    pub(super) size: Option<u64>,
    /// Where a symbolic link points, in its own words.
    pub(super) target: Option<PathBuf>,
}

/// Something below a directory.
#[derive(Debug)]
pub(super) struct Found {
    /// Its path from the workspace.
    pub(super) path: PathBuf,
    /// What it is.
    pub(super) kind: Kind,
}

/// Goes through a tree, each directory before what it holds. Memory is bounded by the entries of the directories
/// on the way.
pub(super) struct Walk<'a> {
    workspace: &'a Workspace,
    pending: Vec<Found>,
    /// Directories that could not be read, or not wholly.
    pub(super) unreadable: usize,
}

impl Walk<'_> {
    fn enter(&mut self, path: &Path) -> io::Result<()> {
        let (entries, more) = entries(&self.workspace.dir.open_dir(path)?)?;
        self.unreadable += usize::from(more);
        let base = path.strip_prefix(".").unwrap_or(path);
        self.pending.extend(entries.into_iter().rev().map(|(name, kind)| Found { path: base.join(name), kind }));
        Ok(())
    }

    /// Leaves out what the directory that came last holds.
    pub(super) fn leave_out(&mut self, directory: &Path) {
        while self.pending.last().is_some_and(|next| next.path.starts_with(directory)) {
            self.pending.pop();
        }
    }
}

impl Iterator for Walk<'_> {
    type Item = Found;

    fn next(&mut self) -> Option<Found> {
        let found = self.pending.pop()?;
        if found.kind == Kind::Directory && self.enter(&found.path).is_err() {
            self.unreadable += 1;
        }
        Some(found)
    }
}

/// The entries of a held directory by name, and whether there are more than are read.
fn entries(dir: &Dir) -> io::Result<(Vec<(OsString, Kind)>, bool)> {
    let mut entries = Vec::new();
    for entry in dir.entries()? {
        let entry = entry?;
        if entries.len() == MAX_ENTRIES {
            return Ok((entries, true));
        }
        // An entry that vanishes meanwhile has no kind any more.
        let kind = entry.file_type().map_or(Kind::Other, Kind::from);
        entries.push((entry.file_name(), kind));
    }
    entries.sort();
    Ok((entries, false))
}

/// Opens for reading without waiting for the other end of a pipe and without taking over a terminal.
fn read_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(replace::flags(OFlags::NONBLOCK | OFlags::NOCTTY));
    options
}

#[cfg(test)]
#[path = "../workspace_tests.rs"]
mod tests;
