//! The files a run may touch: a held directory handle, what may be done below it, and its quotas.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use cap_std::ambient_authority;
use cap_std::fs::Dir;

use crate::config::WorkspaceConfig;

/// Largest file a tool may write in a scratch workspace, in bytes.
const SCRATCH_MAX_FILE_BYTES: u64 = 10 * 1024 * 1024;
/// Most files and directories a scratch workspace may hold.
const SCRATCH_MAX_FILES: u64 = 10_000;

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
        Ok(Self { root, dir, writable, max_file_bytes, max_files })
    }

    /// Makes a fresh, empty, writable directory of mode 0700 with the default quotas: files up to 10 MiB,
    /// 10 000 files and directories. Missing parents are made with it; the directory itself must not exist.
    /// Removing it is up to the caller.
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
        let config = WorkspaceConfig {
            path: root,
            writable: true,
            max_file_bytes: SCRATCH_MAX_FILE_BYTES,
            max_files: SCRATCH_MAX_FILES,
        };
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
}
