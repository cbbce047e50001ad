//! Paths that must not lead out, writes that are whole or not at all, and bounds.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use tokio_util::sync::CancellationToken;

use super::*;

/// A workspace `ws` beside a directory `ws-evil`, which shares its prefix, and a file `secret`.
struct Tree {
    dir: tempfile::TempDir,
    workspace: Workspace,
}

impl Tree {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("ws-evil")).unwrap();
        fs::write(dir.path().join("ws-evil/f"), "secret").unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        let workspace = Workspace::scratch(&dir.path().join("ws")).unwrap();
        Self { dir, workspace }
    }

    fn with(writable: bool, max_file_bytes: u64, max_files: u64) -> Self {
        let mut tree = Self::new();
        let path = tree.at("");
        tree.workspace = Workspace::open(&WorkspaceConfig { path, writable, max_file_bytes, max_files }).unwrap();
        tree
    }

    /// A path inside the workspace.
    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("ws").join(path)
    }

    fn write(&self, path: &str, content: &str) -> Result<Replaced, String> {
        self.workspace.write(path, content.as_bytes(), &CancellationToken::new()).map_err(|error| error.to_string())
    }

    fn edit(&self, path: &str) -> Result<(), String> {
        let change = |_| Ok((b"edited".to_vec(), ()));
        self.workspace.edit(path, &CancellationToken::new(), change).map_err(|error: AccessError| error.to_string())
    }

    fn read(&self, path: &str) -> Result<String, String> {
        let (file, _) = self.workspace.file(path).map_err(|error| error.to_string())?;
        Ok(io::read_to_string(file).unwrap())
    }

    fn list(&self, path: &str) -> Result<usize, String> {
        self.workspace.list(path, "", 100).map(|listing| listing.entries.len()).map_err(|error| error.to_string())
    }

    fn walk(&self, path: &str) -> Result<Vec<String>, String> {
        let walk = self.workspace.walk(path).map_err(|error| error.to_string())?;
        Ok(walk.map(|found| found.path.to_string_lossy().into_owned()).collect())
    }

    fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[track_caller]
    fn outside_is_untouched(&self) {
        assert_eq!(fs::read_to_string(self.dir.path().join("secret")).unwrap(), "secret");
        assert_eq!(fs::read_to_string(self.dir.path().join("ws-evil/f")).unwrap(), "secret");
        assert_eq!(fs::read_dir(self.dir.path().join("ws-evil")).unwrap().count(), 1);
        assert_eq!(fs::read_dir(self.dir.path()).unwrap().count(), 3);
    }
}

#[test]
fn a_scratch_workspace_is_new_empty_and_private() {
    let tree = Tree::new();
    assert_eq!(tree.workspace.root_path(), tree.at("").components().as_path());
    assert!(tree.workspace.is_writable());
    assert_eq!(fs::metadata(tree.at("")).unwrap().mode() & 0o7777, 0o700);
    assert!(matches!(Workspace::scratch(&tree.at("")), Err(WorkspaceError::Exists { .. })));
    let deep = Workspace::scratch(&tree.dir.path().join("a/b/c")).unwrap();
    assert_eq!(fs::metadata(deep.root_path()).unwrap().mode() & 0o7777, 0o700);
    let blocked = Workspace::scratch(&tree.dir.path().join("secret/x")).unwrap_err().to_string();
    assert!(blocked.contains("secret/x"), "{blocked}");
}

#[test]
fn a_configured_workspace_must_be_a_directory() {
    let tree = Tree::new();
    for path in ["missing", "secret"] {
        let path = tree.dir.path().join(path);
        let config = WorkspaceConfig { path: path.clone(), writable: false, max_file_bytes: 1, max_files: 1 };
        let error = Workspace::open(&config).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
}

/// anomalyco/opencode#43346 and its kind: every way out by a path, by every operation.
#[test]
fn no_path_leads_out() {
    let tree = Tree::new();
    fs::create_dir(tree.at("a")).unwrap();
    symlink("/etc", tree.at("etc")).unwrap();
    symlink("..", tree.at("up")).unwrap();
    symlink("../ws-evil", tree.at("evil")).unwrap();
    symlink("../ws-evil/f", tree.at("leaf")).unwrap();
    symlink("../ws-evil/new", tree.at("dangling")).unwrap();
    symlink(tree.at("a"), tree.at("absolute")).unwrap();
    symlink("loop", tree.at("loop")).unwrap();
    let absolute = tree.dir.path().join("ws-evil/f").to_string_lossy().into_owned();
    let inside = tree.at("a").to_string_lossy().into_owned();
    let long = "a/".repeat(2_100) + "f";
    let name = "n".repeat(300);
    for path in [
        "",
        "/",
        "/etc/hostname",
        &absolute,
        &inside,
        "..",
        "../ws-evil/f",
        "../ws-evil",
        "a/../../ws-evil/f",
        "a/../etc/x",
        "./../secret",
        "etc/hostname",
        "etc/x",
        "etc",
        "up/secret",
        "up/ws-evil/f",
        "evil/f",
        "evil/new",
        "leaf",
        "dangling",
        "absolute/f",
        "loop",
        "loop/x",
        "a\0b",
        "\0",
        "a/f\0/../../../secret",
        &long,
        &name,
    ] {
        for (operation, result) in [
            ("read", tree.read(path).map(|_| ())),
            ("write", tree.write(path, "x").map(|_| ())),
            ("edit", tree.edit(path)),
            ("list", tree.list(path).map(|_| ())),
            ("walk", tree.walk(path).map(|_| ())),
        ] {
            let error = result.expect_err(&format!("{operation} {path:?}"));
            assert!(error.len() < 1_000 && !error.contains('\0'), "{operation} {path:?}: {error}");
        }
    }
    tree.outside_is_untouched();
    assert_eq!(tree.names(""), ["a", "absolute", "dangling", "etc", "evil", "leaf", "loop", "up"]);
}

#[test]
fn errors_say_what_is_wrong_and_what_is_allowed() {
    let tree = Tree::new();
    fs::create_dir(tree.at("dir")).unwrap();
    fs::write(tree.at("file"), "x").unwrap();
    symlink("/etc", tree.at("etc")).unwrap();
    symlink("file", tree.at("link")).unwrap();
    for (error, expected) in [
        (
            tree.read("/x").unwrap_err(),
            "the path `/x` is absolute; give one relative to the workspace, such as `src/main.rs`",
        ),
        (
            tree.read("etc/x").unwrap_err(),
            "the path `etc/x` leads out of the workspace, by `..` or by a symbolic link; only files inside of it can be used",
        ),
        (
            tree.read("gone\n").unwrap_err(),
            "`gone\\n` does not exist; list_dir shows what a directory holds, search_files finds files",
        ),
        (
            tree.read("dir").unwrap_err(),
            "`dir` is a directory; name a file in it, or use list_dir to see what it holds",
        ),
        (tree.read("file/x").unwrap_err(), "`file/x` is not a directory, or goes through a file as if it were one"),
        (tree.list("file").unwrap_err(), "`file` is not a directory, or goes through a file as if it were one"),
        (
            tree.write("none/x", "").unwrap_err(),
            "the directory `none` of `none/x` does not exist; files can only be written into directories that exist",
        ),
        (
            tree.write("dir", "").unwrap_err(),
            "`dir` is a directory; name a file in it, or use list_dir to see what it holds",
        ),
        (
            tree.write("new/", "").unwrap_err(),
            "`new/` is a directory; name a file in it, or use list_dir to see what it holds",
        ),
        (
            tree.write("link", "").unwrap_err(),
            "`link` is a symbolic link; name the file it points to, so that the link itself stays what it is",
        ),
    ] {
        assert_eq!(error, expected);
    }
    assert_eq!(fs::read_to_string(tree.at("file")).unwrap(), "x");
}

#[test]
fn links_that_stay_inside_work() {
    let tree = Tree::new();
    fs::create_dir_all(tree.at("a/b")).unwrap();
    symlink("../b", tree.at("a/b/back")).unwrap();
    symlink("a/b", tree.at("short")).unwrap();
    tree.write("short/f", "one").unwrap();
    assert_eq!(tree.read("a/b/f").unwrap(), "one");
    assert_eq!(tree.read("short/back/../b/f").unwrap(), "one");
    assert_eq!(tree.read("a/../a/./b//f").unwrap(), "one");
    tree.edit("short/f").unwrap();
    assert_eq!(tree.read("a/b/f").unwrap(), "edited");
    assert_eq!(tree.walk(".").unwrap(), ["a", "a/b", "a/b/back", "a/b/f", "short"]);
}

#[test]
fn only_regular_files_are_opened() {
    let tree = Tree::new();
    mknodat(CWD, tree.at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let _socket = UnixListener::bind(tree.at("socket")).unwrap();
    let mut kinds = vec![("fifo", "named pipe"), ("socket", "socket")];
    // Making a device takes a privilege that a test may not have.
    if mknodat(CWD, tree.at("device"), FileType::CharacterDevice, Mode::RUSR, rustix::fs::makedev(1, 5)).is_ok() {
        kinds.push(("device", "device"));
    }
    for (path, kind) in kinds {
        let expected = format!("`{path}` is a {kind}; only regular files can be used");
        assert_eq!(tree.read(path).unwrap_err(), expected);
        assert_eq!(tree.write(path, "x").unwrap_err(), expected);
        assert_eq!(tree.edit(path).unwrap_err(), expected);
    }
}

#[test]
fn a_hard_link_to_a_file_outside_does_not_carry_changes_out() {
    let tree = Tree::new();
    fs::hard_link(tree.dir.path().join("secret"), tree.at("one")).unwrap();
    fs::hard_link(tree.dir.path().join("secret"), tree.at("two")).unwrap();
    tree.write("one", "changed").unwrap();
    tree.edit("two").unwrap();
    tree.outside_is_untouched();
    assert_eq!((tree.read("one").unwrap(), tree.read("two").unwrap()), ("changed".to_owned(), "edited".to_owned()));
}

#[test]
fn writes_report_what_was_there_and_keep_the_permissions_without_special_bits() {
    let tree = Tree::new();
    let mode = |path: &str| fs::metadata(tree.at(path)).unwrap().mode() & 0o7777;
    assert_eq!(tree.write("f", "12345"), Ok(Replaced { before: None }));
    assert_eq!(tree.write("f", ""), Ok(Replaced { before: Some(5) }));
    assert_eq!((tree.read("f").unwrap(), mode("f")), (String::new(), 0o644));
    fs::set_permissions(tree.at("f"), fs::Permissions::from_mode(0o6755)).unwrap();
    tree.write("f", "#!/bin/sh").unwrap();
    assert_eq!(mode("f"), 0o755);
    tree.edit("f").unwrap();
    assert_eq!(mode("f"), 0o755);
    assert_eq!(tree.names(""), ["f"]);
}

#[test]
fn a_read_only_workspace_takes_no_change() {
    let tree = Tree::with(false, 100, 100);
    fs::write(tree.at("f"), "x").unwrap();
    let expected = "the workspace is read-only: `f` was not changed; files can be read, listed and searched";
    assert_eq!(tree.write("f", "y").unwrap_err(), expected);
    assert_eq!(tree.edit("f").unwrap_err(), expected);
    assert_eq!(tree.read("f").unwrap(), "x");
}

#[test]
fn quotas_hold_and_a_refused_change_leaves_nothing_behind() {
    let tree = Tree::with(true, 6, 3);
    assert!(tree.write("a", "1234567").unwrap_err().contains("7 bytes; at most 6 bytes"));
    tree.write("a", "123456").unwrap();
    fs::create_dir(tree.at("d")).unwrap();
    tree.write("d/b", "x").unwrap();
    assert!(tree.write("d/c", "x").unwrap_err().contains("holds its 3 files and directories"));
    tree.write("a", "new").unwrap();
    tree.edit("d/b").unwrap();
    fs::write(tree.at("a"), "much too long").unwrap();
    assert!(tree.edit("a").unwrap_err().contains("13 bytes; at most 6 bytes"));
    assert_eq!((tree.names(""), tree.names("d")), (vec!["a".to_owned(), "d".to_owned()], vec!["b".to_owned()]));
    fs::File::create(tree.at("a")).unwrap().set_len(1 << 40).unwrap();
    assert!(tree.edit("a").unwrap_err().contains("1099511627776 bytes; at most 6 bytes"));
}

#[test]
fn a_stopped_call_changes_nothing() {
    let tree = Tree::new();
    let cancel = CancellationToken::new();
    cancel.cancel();
    tree.write("f", "x").unwrap();
    let error = tree.workspace.write("f", b"y", &cancel).unwrap_err();
    assert_eq!(error.to_string(), "stopped before `f` was changed");
    assert_eq!((tree.read("f").unwrap(), tree.names("")), ("x".to_owned(), vec!["f".to_owned()]));
}

#[test]
fn an_edit_notices_that_somebody_else_changed_the_file() {
    let tree = Tree::new();
    tree.write("f", "x").unwrap();
    let result: Result<(), AccessError> = tree.workspace.edit("f", &CancellationToken::new(), |_| {
        fs::write(tree.at("f"), "from outside").unwrap();
        Ok((b"edited".to_vec(), ()))
    });
    assert!(matches!(result, Err(AccessError::Changed { .. })), "{result:?}");
    assert_eq!((tree.read("f").unwrap(), tree.names("")), ("from outside".to_owned(), vec!["f".to_owned()]));
}

#[test]
fn concurrent_edits_are_all_kept() {
    let tree = Arc::new(Tree::new());
    tree.write("f", "").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let tree = Arc::clone(&tree);
            scope.spawn(move || {
                for _ in 0..10 {
                    let append = |mut content: Vec<u8>| {
                        content.push(b'a' + thread);
                        Ok::<_, AccessError>((content, ()))
                    };
                    tree.workspace.edit("f", &CancellationToken::new(), append).unwrap();
                }
            });
        }
    });
    let mut letters: Vec<u8> = tree.read("f").unwrap().into_bytes();
    letters.sort_unstable();
    assert_eq!(
        String::from_utf8(letters).unwrap(),
        "a".repeat(10) + &"b".repeat(10) + &"c".repeat(10) + &"d".repeat(10)
    );
}

#[test]
fn a_tree_that_is_too_large_to_list_is_cut_and_counted() {
    let tree = Tree::new();
    for name in ["b", "a", "c", "é"] {
        fs::write(tree.at(name), name).unwrap();
    }
    let listing = tree.workspace.list(".", "a", 2).unwrap();
    let names: Vec<_> = listing.entries.iter().map(|entry| (entry.name.to_str().unwrap(), entry.size)).collect();
    assert_eq!((names, listing.left_out, listing.endless), (vec![("b", Some(1)), ("c", Some(1))], 1, false));
}

/// Growth-Circle/cadis#3113: a directory and a link that leads out change places while files are written.
#[test]
fn a_path_that_is_swapped_during_the_call_does_not_lead_out() {
    let tree = Arc::new(Tree::new());
    fs::create_dir(tree.at("d")).unwrap();
    symlink("../ws-evil", tree.at("link")).unwrap();
    let swap = || {
        // One step where the file system has it, else with a moment in which nothing is there.
        if renameat_with(CWD, tree.at("d"), CWD, tree.at("link"), RenameFlags::EXCHANGE).is_err() {
            fs::rename(tree.at("d"), tree.at("other")).unwrap();
            fs::rename(tree.at("link"), tree.at("d")).unwrap();
            fs::rename(tree.at("other"), tree.at("link")).unwrap();
        }
    };
    let done = AtomicBool::new(false);
    let (mut inside, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..150_000 {
                swap();
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut number = 0;
        while !done.load(Ordering::Relaxed) {
            number += 1;
            match number % 4 {
                0 => match tree.write("d/f", "mine") {
                    Ok(_) => inside += 1,
                    Err(_) => refused += 1,
                },
                1 => {
                    if let Ok(text) = tree.read("d/f") {
                        assert_ne!(text, "secret");
                    }
                }
                2 => match tree.edit("d/f") {
                    Ok(()) => inside += 1,
                    Err(_) => refused += 1,
                },
                _ => {
                    if let Ok(found) = tree.walk("d") {
                        assert!(found.len() <= 2, "{found:?}");
                    }
                }
            }
        }
    });
    tree.outside_is_untouched();
    assert!(inside > 0 && refused > 0, "{inside} calls went in and {refused} were refused: nothing was raced");
}
