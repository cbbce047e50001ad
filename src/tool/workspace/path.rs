//! What a path of a model may be, and what it is told when a path is refused.

use std::io;
use std::path::{Component, Path, PathBuf};

use cap_std::fs::{FileType, FileTypeExt as _};
use rustix::io::Errno;

use crate::domain::text::shown;

/// Longest path, in bytes: the kernel's limit.
const MAX_PATH_BYTES: usize = 4_095;
/// Most Unicode scalar values shown of a path.
const MAX_SHOWN: usize = 200;

/// Why a path of a model was refused or did not work. The text is for the model.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// No path.
    #[error(
        "the path is empty; give one relative to the workspace, such as `src/main.rs`, or `.` for the workspace itself"
    )]
    Empty,
    /// A NUL character.
    #[error("the path `{path}` holds a NUL character, which no file name can; give it without")]
    Nul {
        /// The path as given.
        path: String,
    },
    /// Longer than a path can be.
    #[error("the path `{path}` is too long; at most {MAX_PATH_BYTES} bytes in all and 255 in one name are allowed")]
    TooLong {
        /// The path as given.
        path: String,
    },
    /// An absolute path.
    #[error("the path `{path}` is absolute; give one relative to the workspace, such as `src/main.rs`")]
    Absolute {
        /// The path as given.
        path: String,
    },
    /// It leads out by `..` or by a symbolic link.
    #[error(
        "the path `{path}` leads out of the workspace, by `..` or by a symbolic link; only files inside of it can be used"
    )]
    Outside {
        /// The path as given.
        path: String,
    },
    /// Symbolic links in a circle.
    #[error("the path `{path}` goes through too many symbolic links; give the path of the file they point to")]
    LinkLoop {
        /// The path as given.
        path: String,
    },
    /// Nothing there.
    #[error("`{path}` does not exist; list_dir shows what a directory holds, search_files finds files")]
    NotFound {
        /// The path as given.
        path: String,
    },
    /// The directory to write into does not exist.
    #[error(
        "the directory `{parent}` of `{path}` does not exist; files can only be written into directories that exist"
    )]
    NoParent {
        /// The path as given.
        path: String,
        /// The directory.
        parent: String,
    },
    /// A file stands where a directory is needed.
    #[error("`{path}` is not a directory, or goes through a file as if it were one")]
    NotDirectory {
        /// The path as given.
        path: String,
    },
    /// A directory stands where a file is needed.
    #[error("`{path}` is a directory; name a file in it, or use list_dir to see what it holds")]
    Directory {
        /// The path as given.
        path: String,
    },
    /// Neither a file nor a directory.
    #[error("`{path}` is a {kind}; only regular files can be used")]
    Special {
        /// The path as given.
        path: String,
        /// What it is.
        kind: Kind,
    },
    /// A symbolic link where a file would be replaced.
    #[error("`{path}` is a symbolic link; name the file it points to, so that the link itself stays what it is")]
    Link {
        /// The path as given.
        path: String,
    },
    /// The operating system refuses it.
    #[error("`{path}` may not be used by this server: permission denied")]
    Denied {
        /// The path as given.
        path: String,
    },
    /// The workspace takes no changes.
    #[error("the workspace is read-only: `{path}` was not changed; files can be read, listed and searched")]
    ReadOnly {
        /// The path as given.
        path: String,
    },
    /// Over the size quota.
    #[error(
        "`{path}` would have or has {size} bytes; at most {max} bytes are allowed in one file; nothing was changed"
    )]
    TooLarge {
        /// The path as given.
        path: String,
        /// Its size.
        size: u64,
        /// The quota.
        max: u64,
    },
    /// Over the number quota.
    #[error(
        "`{path}` was not created: the workspace holds its {max} files and directories already; change existing ones"
    )]
    TooMany {
        /// The path as given.
        path: String,
        /// The quota.
        max: u64,
    },
    /// Somebody else changed it meanwhile.
    #[error("`{path}` was changed by somebody else meanwhile and was left as it is; read it again")]
    Changed {
        /// The path as given.
        path: String,
    },
    /// The call was stopped before it changed anything.
    #[error("stopped before `{path}` was changed")]
    Stopped {
        /// The path as given.
        path: String,
    },
    /// Anything else the operating system says.
    #[error("`{path}` failed: {source}")]
    Io {
        /// The path as given.
        path: String,
        /// What it says.
        source: io::Error,
    },
}

impl AccessError {
    /// What an error of the file system means for the path as given.
    pub(super) fn io(given: &str, source: io::Error) -> Self {
        let path = shown_path(given);
        match (source.raw_os_error().map(Errno::from_raw_os_error), source.kind()) {
            // cap-std's own error, not the kernel's: the path would have left the directory.
            (None, io::ErrorKind::PermissionDenied) => Self::Outside { path },
            (Some(Errno::XDEV), _) => Self::Outside { path },
            (Some(Errno::LOOP), _) => Self::LinkLoop { path },
            (Some(Errno::NAMETOOLONG), _) => Self::TooLong { path },
            (Some(Errno::ISDIR), _) => Self::Directory { path },
            (Some(Errno::NOTDIR), _) => Self::NotDirectory { path },
            (Some(Errno::NXIO | Errno::NODEV), _) => Self::Special { path, kind: Kind::Other },
            (_, io::ErrorKind::NotFound) => Self::NotFound { path },
            (_, io::ErrorKind::PermissionDenied) => Self::Denied { path },
            _ => Self::Io { path, source },
        }
    }
}

/// A path that passed the rules that need no file system. Where it leads is for the held handle to decide.
#[derive(Debug)]
pub(super) struct RelPath<'a> {
    /// As given.
    pub(super) given: &'a str,
    /// The same, to be used with the workspace's handle only.
    pub(super) path: &'a Path,
}

impl<'a> RelPath<'a> {
    pub(super) fn parse(given: &'a str) -> Result<Self, AccessError> {
        let shown = || shown_path(given);
        let path = Path::new(given);
        if given.is_empty() {
            return Err(AccessError::Empty);
        }
        if given.contains('\0') {
            return Err(AccessError::Nul { path: shown() });
        }
        if path.is_absolute() {
            return Err(AccessError::Absolute { path: shown() });
        }
        if given.len() > MAX_PATH_BYTES || given.split('/').any(|name| name.len() > 255) {
            return Err(AccessError::TooLong { path: shown() });
        }
        let mut depth: usize = 0;
        for component in path.components() {
            match component {
                Component::Normal(_) => depth += 1,
                Component::CurDir => {}
                Component::ParentDir => match depth.checked_sub(1) {
                    Some(less) => depth = less,
                    None => return Err(AccessError::Outside { path: shown() }),
                },
                Component::RootDir | Component::Prefix(_) => return Err(AccessError::Absolute { path: shown() }),
            }
        }
        Ok(Self { given, path })
    }

    /// The directory and the name of a file.
    pub(super) fn split(&self) -> Result<(PathBuf, &'a Path), AccessError> {
        // `Path` forgets a slash or a dot at the end, which say that a directory is meant.
        let directory = self.given.ends_with('/') || self.given.ends_with("/.");
        let Some(name) = self.path.file_name().filter(|_| !directory) else {
            return Err(AccessError::Directory { path: self.shown() });
        };
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        Ok((parent.unwrap_or(Path::new(".")).to_owned(), Path::new(name)))
    }

    /// As shown in messages.
    pub(super) fn shown(&self) -> String {
        shown_path(self.given)
    }
}

/// A path as it stands in messages: on one line, and cut where it is long.
pub(in super::super) fn shown_path(path: &str) -> String {
    shown(path, MAX_SHOWN)
}

/// What a directory entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A block or character device.
    Device,
    /// Something else.
    Other,
}

impl From<FileType> for Kind {
    fn from(kind: FileType) -> Self {
        if kind.is_file() {
            Self::File
        } else if kind.is_dir() {
            Self::Directory
        } else if kind.is_symlink() {
            Self::Link
        } else if kind.is_fifo() {
            Self::Fifo
        } else if kind.is_socket() {
            Self::Socket
        } else if kind.is_block_device() || kind.is_char_device() {
            Self::Device
        } else {
            Self::Other
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Link => "symbolic link",
            Self::Fifo => "named pipe",
            Self::Socket => "socket",
            Self::Device => "device",
            Self::Other => "special file",
        })
    }
}
