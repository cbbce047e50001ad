//! Changes of files: whole files put in place atomically, under the workspace's quotas.

use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::sync::PoisonError;

use cap_std::fs::{Dir, File, Metadata, MetadataExt as _, OpenOptions, OpenOptionsExt as _};
use rustix::fs::{Mode, OFlags};
use tokio_util::sync::CancellationToken;

use super::path::{AccessError, Kind, RelPath};
use super::{Workspace, read_options};
use crate::time::random_bytes;

/// Mode of a new file. A replaced one keeps its read, write and execute bits; setuid, setgid and sticky are never set.
const NEW_FILE_MODE: u32 = 0o644;

/// A change that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Replaced {
    /// Bytes before; `None` when the file is new.
    pub(in super::super) before: Option<u64>,
}

/// Which file stands at a name, and in which state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
    mode: u32,
}

impl From<&Metadata> for Stamp {
    fn from(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            mode: metadata.mode(),
        }
    }
}

impl Workspace {
    /// Puts a file in place: a new one beside it, flushed to the disk, then renamed over it. The directory must
    /// exist. A reader sees the old content or the new, never a mixture; a hard link to the old file keeps the old.
    pub(in super::super) fn write(
        &self,
        path: &str,
        content: &[u8],
        cancel: &CancellationToken,
    ) -> Result<Replaced, AccessError> {
        let path = RelPath::parse(path)?;
        self.writable(&path)?;
        let _alone = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let (dir, name) = self.parent(&path)?;
        let old = stamp(&dir, name, &path)?;
        if old.is_none() {
            self.room(&path)?;
        }
        self.replace(&dir, name, &path, content, old, cancel)?;
        Ok(Replaced { before: old.map(|stamp| stamp.size) })
    }

    /// Changes an existing file by `change`, which gets its content. Calls exclude each other; a change by
    /// somebody else between reading and writing is noticed, and the file is left to them.
    pub(in super::super) fn edit<T, E: From<AccessError>>(
        &self,
        path: &str,
        cancel: &CancellationToken,
        change: impl FnOnce(Vec<u8>) -> Result<(Vec<u8>, T), E>,
    ) -> Result<T, E> {
        let path = RelPath::parse(path)?;
        self.writable(&path)?;
        let _alone = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let (dir, name) = self.parent(&path)?;
        if stamp(&dir, name, &path)?.is_none() {
            return Err(AccessError::NotFound { path: path.shown() }.into());
        }
        let (content, old) = self.content(&dir, name, &path)?;
        let (content, told) = change(content)?;
        self.replace(&dir, name, &path, &content, Some(old), cancel)?;
        Ok(told)
    }

    fn writable(&self, path: &RelPath<'_>) -> Result<(), AccessError> {
        if self.writable { Ok(()) } else { Err(AccessError::ReadOnly { path: path.shown() }) }
    }

    /// The held directory of a file, and the file's name in it.
    fn parent<'a>(&self, path: &RelPath<'a>) -> Result<(Dir, &'a Path), AccessError> {
        let (parent, name) = path.split()?;
        let dir = self.dir.open_dir(&parent).map_err(|source| match AccessError::io(path.given, source) {
            AccessError::NotFound { path } => {
                AccessError::NoParent { path, parent: crate::domain::text::shown(&parent.to_string_lossy(), 200) }
            }
            other => other,
        })?;
        Ok((dir, name))
    }

    /// Whether one more file may be made.
    fn room(&self, path: &RelPath<'_>) -> Result<(), AccessError> {
        let max = usize::try_from(self.max_files).unwrap_or(usize::MAX);
        let full = self.walk(".")?.take(max).count() >= max;
        if full { Err(AccessError::TooMany { path: path.shown(), max: self.max_files }) } else { Ok(()) }
    }

    fn content(&self, dir: &Dir, name: &Path, path: &RelPath<'_>) -> Result<(Vec<u8>, Stamp), AccessError> {
        let failed = |source| AccessError::io(path.given, source);
        let mut options = read_options();
        options.custom_flags(flags(OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW));
        let file = dir.open_with(name, &options).map_err(failed)?;
        let stamp = Stamp::from(&file.metadata().map_err(failed)?);
        let mut content = Vec::new();
        let limit = self.max_file_bytes.saturating_add(1);
        let size = (&file).take(limit).read_to_end(&mut content).map_err(failed)?;
        self.small(path, size.max(usize::try_from(stamp.size).unwrap_or(usize::MAX)))?;
        Ok((content, stamp))
    }

    fn small(&self, path: &RelPath<'_>, size: usize) -> Result<(), AccessError> {
        let (size, max) = (u64::try_from(size).unwrap_or(u64::MAX), self.max_file_bytes);
        if size > max { Err(AccessError::TooLarge { path: path.shown(), size, max }) } else { Ok(()) }
    }

    fn replace(
        &self,
        dir: &Dir,
        name: &Path,
        path: &RelPath<'_>,
        content: &[u8],
        old: Option<Stamp>,
        cancel: &CancellationToken,
    ) -> Result<(), AccessError> {
        self.small(path, content.len())?;
        let failed = |source| AccessError::io(path.given, source);
        let random = random_bytes::<8>().map_err(|error| failed(io::Error::other(error)))?;
        let temporary = format!(".hames-{:016x}.tmp", u64::from_le_bytes(random));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = dir.open_with(&temporary, &options).map_err(failed)?;
        let mode = old.map_or(NEW_FILE_MODE, |stamp| stamp.mode & 0o777);
        let placed = fill(&file, content, mode).map_err(failed).and_then(|()| {
            if cancel.is_cancelled() {
                return Err(AccessError::Stopped { path: path.shown() });
            }
            if stamp(dir, name, path)? != old {
                return Err(AccessError::Changed { path: path.shown() });
            }
            dir.rename(&temporary, dir, name).map_err(failed)
        });
        if placed.is_err()
            && let Err(error) = dir.remove_file(&temporary)
        {
            tracing::warn!(temporary, error = &error as &dyn std::error::Error, "a temporary file was left behind");
        }
        placed?;
        // The directory handle names a path only; flushing needs one that is open for reading.
        dir.open(".").and_then(|dir| dir.sync_all()).map_err(failed)
    }
}

fn fill(mut file: &File, content: &[u8], mode: u32) -> io::Result<()> {
    file.write_all(content)?;
    rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?;
    file.sync_all()
}

/// What stands at a name of a held directory: a regular file, or nothing. Anything else is refused.
fn stamp(dir: &Dir, name: &Path, path: &RelPath<'_>) -> Result<Option<Stamp>, AccessError> {
    let metadata = match dir.symlink_metadata(name) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(AccessError::io(path.given, error)),
    };
    match Kind::from(metadata.file_type()) {
        Kind::File => Ok(Some(Stamp::from(&metadata))),
        Kind::Directory => Err(AccessError::Directory { path: path.shown() }),
        Kind::Link => Err(AccessError::Link { path: path.shown() }),
        kind @ (Kind::Fifo | Kind::Socket | Kind::Device | Kind::Other) => {
            Err(AccessError::Special { path: path.shown(), kind })
        }
    }
}

/// Flags in the form that `custom_flags` takes.
pub(super) fn flags(flags: OFlags) -> i32 {
    i32::try_from(flags.bits()).unwrap_or_default()
}
