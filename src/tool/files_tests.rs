//! The file tools on real directories: results, refusals, bounds, and no way out of the workspace.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::super::fake::NoProgress;
use super::super::registry::Registry;
use super::super::workspace::Workspace;
use super::*;
use crate::config::WorkspaceConfig;
use crate::domain::{Arguments, Effect, RunId};

/// The file tools behind their registry, on a fresh workspace.
struct Tools {
    dir: tempfile::TempDir,
    registry: Registry,
    ctx: ToolCtx,
}

impl Tools {
    fn new() -> Self {
        Self::on(&Threads::new(MAX_THREADS), &Threads::new(MAX_SEARCHES))
    }

    fn on(threads: &Threads, searches: &Threads) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace::scratch(&dir.path().join("ws")).unwrap();
        let ctx = ToolCtx {
            run: RunId::new(uuid::Uuid::nil()),
            call_id: "call".to_owned(),
            workspace: Arc::new(workspace),
            timeout: Duration::MAX,
            cancel: CancellationToken::new(),
            progress: Arc::new(NoProgress),
        };
        Self { dir, registry: Registry::new(tools_on(threads, searches)).unwrap(), ctx }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("ws").join(path)
    }

    fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), content).unwrap();
    }

    fn get(&self, path: &str) -> Vec<u8> {
        fs::read(self.at(path)).unwrap()
    }

    async fn call(&self, tool: &str, given: Value) -> Result<String, String> {
        let given = Arguments::parse(&given.to_string());
        let registered = self.registry.check(tool, &given)?;
        let Arguments::Object(object) = given else { panic!("the arguments are an object") };
        registered.tool.call(&self.ctx, &object).await.map_err(|error| match error {
            ToolError::Respond(text) => text,
            ToolError::Fatal(text) => panic!("fatal: {text}"),
        })
    }

    async fn ok(&self, tool: &str, given: Value) -> String {
        self.call(tool, given).await.unwrap()
    }

    async fn err(&self, tool: &str, given: Value) -> String {
        self.call(tool, given).await.unwrap_err()
    }
}

#[test]
fn every_tool_has_a_manual_and_an_effect() {
    let none = Map::new();
    let effects: Vec<_> = file_tools()
        .iter()
        .map(|tool| (tool.spec().name.to_string(), tool.effect(&none), tool.is_pollable(&none)))
        .collect();
    assert_eq!(
        effects,
        [
            ("read_file".to_owned(), Effect::ReadOnly, false),
            ("list_dir".to_owned(), Effect::ReadOnly, false),
            ("search_files".to_owned(), Effect::ReadOnly, false),
            ("write_file".to_owned(), Effect::Idempotent, false),
            ("edit_file".to_owned(), Effect::SideEffect, false),
        ]
    );
    for tool in file_tools() {
        let spec = tool.spec();
        assert!(spec.description.len() > 500 && spec.description.contains("fails"), "{}", spec.name);
        assert!(!spec.description.contains("\n "), "{}", spec.name);
        for (name, property) in spec.parameters["properties"].as_object().unwrap() {
            assert!(property["description"].is_string(), "{}: {name}", spec.name);
        }
    }
}

#[tokio::test]
async fn read_shows_whole_files_and_ranges_of_lines() {
    let tools = Tools::new();
    tools.put("a.txt", "one\ntwo\nthree\nfour");
    let read = |given: Value| tools.ok("read_file", given);
    let whole = "[a.txt: lines 1 to 4 of 4, 18 bytes in all]\none\ntwo\nthree\nfour\n[the last line has no newline at its end]\n";
    assert_eq!(read(json!({"path": "a.txt"})).await, whole);
    assert_eq!(
        read(json!({"path": "./a.txt", "start_line": 2.0, "line_count": 2})).await,
        "[./a.txt: lines 2 to 3 of 4, 18 bytes in all]\ntwo\nthree\n[1 line left; go on with start_line=4]\n"
    );
    assert_eq!(
        read(json!({"path": "a.txt", "start_line": 4, "line_count": 5000})).await,
        "[a.txt: lines 4 to 4 of 4, 18 bytes in all]\nfour\n[the last line has no newline at its end]\n"
    );
    tools.put("b.txt", "one\n");
    assert_eq!(read(json!({"path": "b.txt"})).await, "[b.txt: lines 1 to 1 of 1, 4 bytes in all]\none\n");
    tools.put("blank", "\n\n");
    assert_eq!(read(json!({"path": "blank"})).await, "[blank: lines 1 to 2 of 2, 2 bytes in all]\n\n\n");
    tools.put("empty", "");
    assert_eq!(read(json!({"path": "empty"})).await, "[empty: empty, 0 bytes]\n");
    tools.put("dos", "a\r\nb\r\n");
    assert_eq!(
        read(json!({"path": "dos"})).await,
        "[dos: lines 1 to 2 of 2, 6 bytes in all]\na\r\nb\r\n[lines end in CR LF]\n"
    );
}

#[tokio::test]
async fn read_says_what_is_wrong() {
    let tools = Tools::new();
    tools.put("a.txt", "one\ntwo\n");
    tools.put("image", b"\x89PNG\0\0");
    tools.put("huge", "x");
    fs::OpenOptions::new().write(true).open(tools.at("huge")).unwrap().set_len(1 << 40).unwrap();
    for (given, expected) in [
        (json!({"path": "a.txt", "start_line": 3}), "`a.txt` has 2 lines; `start_line` 3 is past its end."),
        (json!({"path": "a.txt", "start_byte": 8}), "`a.txt` has 8 bytes; `start_byte` 8 is past its end."),
        (
            json!({"path": "a.txt", "start_byte": 0, "line_count": 1}),
            "Give either `start_line` and `line_count` or `start_byte` and `byte_count`, not both.",
        ),
        (
            json!({"path": "image"}),
            "`image` is a binary file of 6 bytes; read_file shows text only. Nothing here can show its content.",
        ),
        (
            json!({"path": "huge", "start_byte": 1}),
            "`huge` is a binary file of 1099511627776 bytes; read_file shows text only. Nothing here can show its content.",
        ),
        (
            json!({"path": "/etc/passwd"}),
            "The path `/etc/passwd` is absolute; give one relative to the workspace, such as `src/main.rs`.",
        ),
        (json!({"path": "."}), "`.` is a directory; name a file in it, or use list_dir to see what it holds."),
    ] {
        assert_eq!(tools.err("read_file", given).await, expected);
    }
    let schema = tools.err("read_file", json!({"path": "a.txt", "start_line": 0, "lines": 3})).await;
    assert!(schema.contains("$.start_line: ") && schema.contains("unknown property `lines`"), "{schema}");
}

/// Following the hints shows every byte once, whatever the size of lines.
#[tokio::test]
async fn long_files_and_long_lines_are_read_in_parts_that_join() {
    let tools = Tools::new();
    let lines: String = (0..2_000).map(|number| format!("line {number} with some text\n")).collect();
    tools.put("many", &lines);
    let (mut seen, mut next) = (String::new(), 1);
    loop {
        let text = tools.ok("read_file", json!({"path": "many", "start_line": next})).await;
        assert!(text.len() < 6_200);
        let (_, body) = text.split_once('\n').unwrap();
        match body.rsplit_once('[') {
            Some((body, hint)) => {
                seen.push_str(body);
                next = hint.split_once("start_line=").unwrap().1.trim_end_matches("]\n").parse().unwrap();
            }
            None => {
                seen.push_str(body);
                break;
            }
        }
    }
    assert_eq!(seen, lines);

    let long = format!("short\n{}\nend\n", "é€😀x".repeat(100_000));
    tools.put("long", &long);
    let first = tools.ok("read_file", json!({"path": "long"})).await;
    assert_eq!(
        first,
        "[long: lines 1 to 1 of 3, 1000011 bytes in all]\nshort\n[2 lines left; go on with start_line=2]\n"
    );
    let cut = tools.ok("read_file", json!({"path": "long", "start_line": 2})).await;
    assert!(cut.contains("line 2 is long and was cut at byte 6006 of the file; go on with start_byte=6006"), "{cut}");
    let (mut seen, mut next) = (String::new(), 0);
    loop {
        let text = tools.ok("read_file", json!({"path": "long", "start_byte": next, "byte_count": 59_999})).await;
        let (_, body) = text.split_once('\n').unwrap();
        match body.rsplit_once("\n[") {
            Some((body, hint)) => {
                seen.push_str(body);
                next = hint.split_once("start_byte=").unwrap().1.trim_end_matches("]\n").parse().unwrap();
            }
            None => {
                seen.push_str(body);
                break;
            }
        }
    }
    assert!(seen == long, "the parts do not join to the file");
}

#[tokio::test]
async fn bytes_that_are_not_utf8_are_shown_and_said() {
    let tools = Tools::new();
    tools.put("latin", b"caf\xe9\nend\n");
    assert_eq!(
        tools.ok("read_file", json!({"path": "latin"})).await,
        "[latin: lines 1 to 2 of 2, 9 bytes in all]\ncaf\u{fffd}\nend\n[some bytes are not UTF-8 and are shown as U+FFFD]\n"
    );
    tools.put("continuation", vec![0x80; 100]);
    let shown = tools.ok("read_file", json!({"path": "continuation", "start_byte": 10, "byte_count": 5})).await;
    assert!(shown.starts_with("[continuation: bytes 13 to 15 of 100]\n"), "{shown}");
    tools.put("cut", "€€");
    assert_eq!(
        tools.ok("read_file", json!({"path": "cut", "start_byte": 1, "byte_count": 5})).await,
        "[cut: bytes 3 to 6 of 6]\n€"
    );
}

#[tokio::test]
async fn a_directory_is_listed_with_kinds_and_sizes() {
    let tools = Tools::new();
    assert_eq!(tools.ok("list_dir", json!({})).await, "[.: empty]\n");
    tools.put("src/main.rs", "fn main() {}");
    tools.put("a.txt", "12345");
    tools.put(".hidden", "");
    tools.put("bad\nname]", "");
    symlink("/etc/passwd", tools.at("out")).unwrap();
    fs::write(tools.at("").join(std::ffi::OsStr::from_bytes(b"\xff")), "").unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, tools.at("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .unwrap();
    assert_eq!(
        tools.ok("list_dir", json!({"path": "."})).await,
        "[.: 7 entries]\n.hidden  0 bytes\na.txt  5 bytes\nbad\\nname]  0 bytes\nout -> /etc/passwd\npipe (named pipe)\nsrc/\n\
         \u{fffd}  0 bytes  (the name is not UTF-8 and cannot be given to a tool)\n"
    );
    assert_eq!(tools.ok("list_dir", json!({"path": "src/"})).await, "[src/: 1 entry]\nmain.rs  12 bytes\n");
    assert!(tools.err("list_dir", json!({"path": "a.txt"})).await.contains("is not a directory"));
    assert!(tools.err("list_dir", json!({"path": "out"})).await.contains("leads out of the workspace"));
}

#[tokio::test]
async fn a_long_directory_is_listed_in_parts() {
    let tools = Tools::new();
    for number in 0..250 {
        tools.put(&format!("d/f{number:03}"), "");
    }
    let first = tools.ok("list_dir", json!({"path": "d"})).await;
    assert!(first.starts_with("[d: 200 entries]\nf000  0 bytes\n"), "{first}");
    assert!(first.ends_with("f199  0 bytes\n[50 more; go on with after=\"f199\"]\n"), "{first}");
    let second = tools.ok("list_dir", json!({"path": "d", "after": "f199"})).await;
    assert!(second.starts_with("[d: 50 entries]\nf200  0 bytes\n") && second.ends_with("f249  0 bytes\n"), "{second}");
    assert_eq!(tools.ok("list_dir", json!({"path": "d", "after": "x"})).await, "[d: nothing after `x`]\n");
}

#[tokio::test]
async fn search_finds_lines_by_expression_text_case_and_glob() {
    let tools = Tools::new();
    tools.put("src/a.rs", "fn one() {}\nfn two() {}\r\n\nlet x = (1);\n");
    tools.put("src/deep/b.rs", "// FN three\nno newline: fn");
    tools.put("c.md", "fn four\n");
    tools.put("empty", "");
    tools.put(".git/config", "fn hidden\n");
    symlink("/etc", tools.at("etc")).unwrap();
    symlink("c.md", tools.at("link.md")).unwrap();
    let search = |given: Value| tools.ok("search_files", given);
    assert_eq!(
        search(json!({"pattern": r"^fn \w+"})).await,
        "c.md:1: fn four\nsrc/a.rs:1: fn one() {}\nsrc/a.rs:2: fn two() {}\n[3 matches in 4 files searched]\n"
    );
    assert_eq!(
        search(json!({"pattern": "fn", "ignore_case": true, "glob": "*.rs", "path": "src/deep"})).await,
        "src/deep/b.rs:1: // FN three\nsrc/deep/b.rs:2: no newline: fn\n[2 matches in 1 file searched]\n"
    );
    assert_eq!(
        search(json!({"pattern": "(1)", "literal": true, "glob": "src/*.rs"})).await,
        "src/a.rs:4: let x = (1);\n[1 match in 1 file searched]\n"
    );
    assert_eq!(search(json!({"pattern": "^$"})).await, "src/a.rs:3: \n[1 match in 4 files searched]\n");
    assert_eq!(search(json!({"pattern": "", "glob": "**/*.rs"})).await, "src/a.rs\nsrc/deep/b.rs\n[2 files]\n");
    assert_eq!(
        search(json!({"pattern": "fn", "path": "c.md"})).await,
        "c.md:1: fn four\n[1 match in 1 file searched]\n"
    );
    assert_eq!(
        search(json!({"pattern": "hidden", "path": ".git"})).await,
        ".git/config:1: fn hidden\n[1 match in 1 file searched]\n"
    );
}

#[tokio::test]
async fn search_says_what_is_wrong_and_what_it_left_out() {
    let tools = Tools::new();
    tools.put("binary", b"needle\0");
    tools.put("huge", "");
    fs::OpenOptions::new().write(true).open(tools.at("huge")).unwrap().set_len(9 * 1024 * 1024).unwrap();
    assert_eq!(
        tools.ok("search_files", json!({"pattern": "needle"})).await,
        "[0 matches in 0 files searched; left out: 1 binary, 1 over 8 MiB]\n"
    );
    let error = tools.err("search_files", json!({"pattern": "("})).await;
    assert!(
        error.starts_with("`pattern` is not a usable regular expression") && error.contains("`literal`"),
        "{error}"
    );
    assert!(tools.err("search_files", json!({"pattern": "(?=x)"})).await.contains("look-around"));
    assert!(tools.err("search_files", json!({"pattern": "x", "glob": "[a"})).await.contains("`glob` cannot be read"));
    assert!(tools.err("search_files", json!({"pattern": ""})).await.contains("Give a `pattern`"));
    assert!(tools.err("search_files", json!({"pattern": "x", "path": "none"})).await.contains("does not exist"));
    tools.ctx.cancel.cancel();
    assert!(tools.err("search_files", json!({"pattern": "x"})).await.contains("stopped before it was finished"));
}

#[tokio::test]
async fn a_search_ends_before_its_call_does() {
    let mut tools = Tools::new();
    tools.put("a", "needle\n");
    tools.ctx.timeout = Duration::ZERO;
    assert_eq!(
        tools.ok("search_files", json!({"pattern": "needle"})).await,
        "[0 matches in 0 files searched; stopped after 0 ms, as the time of the call is nearly over, there may be \
         more: narrow the pattern, the glob or the path]\n"
    );
}

#[tokio::test]
async fn search_results_are_bounded_and_long_lines_are_cut_around_the_match() {
    let tools = Tools::new();
    tools.put("many", "needle\n".repeat(500));
    let text = tools.ok("search_files", json!({"pattern": "needle"})).await;
    assert_eq!(text.lines().count(), 101);
    assert!(text.ends_with("[100 matches in 1 file searched; stopped at the most matches of one search, there may be more: narrow the pattern, the glob or the path]\n"), "{text}");
    tools.put("long", format!("{}needle{}", "é".repeat(500_000), "y".repeat(500_000)));
    let text = tools.ok("search_files", json!({"pattern": "needle", "path": "long"})).await;
    let line = text.lines().next().unwrap();
    assert!(line.starts_with("long:1: …éé") && line.contains("éneedley") && line.ends_with("y…"), "{line}");
    assert!(line.chars().count() < 300);
    tools.put("lines", ["z".repeat(400), "\n".to_owned()].concat().repeat(99));
    let text = tools.ok("search_files", json!({"pattern": "zz", "path": "lines"})).await;
    assert!(text.len() < 21_000 && text.contains("stopped"), "{}", text.len());
    tools.put("evil", "a".repeat(200_000) + "!");
    assert!(tools.ok("search_files", json!({"pattern": "(a+)+$", "path": "evil"})).await.starts_with("[0 matches"));
}

/// The work of a pattern grows with its size times that of a line, and the engine cannot be interrupted.
#[tokio::test]
async fn a_search_ends_in_its_time_whatever_the_pattern_and_the_line() {
    let searches = Threads::new(1);
    let mut tools = Tools::on(&Threads::new(1), &searches);
    tools.put("line", "ab".repeat(4 * 1024 * 1024));
    tools.ctx.timeout = Duration::from_millis(500);
    let given = json!({"pattern": "[ab]*a[ab]{2500}c"});
    let text = tools.ok("search_files", given.clone()).await;
    assert!(
        text.starts_with("[0 matches in 1 file searched; 1 long line searched in parts, where a match over "),
        "{text}"
    );
    assert!(text.contains(" ms, as the time of the call is nearly over"), "{text}");
    assert_eq!(searches.0.available_permits(), 1);

    // Nobody waits for it any more: the thread ends all the same.
    tools.ctx.timeout = Duration::MAX;
    let cancel = tools.ctx.cancel.clone();
    assert!(futures_util::poll!(std::pin::pin!(tools.call("search_files", given))).is_pending());
    assert_eq!(searches.0.available_permits(), 0);
    cancel.cancel();
    drop(searches.0.acquire().await.unwrap());

    let mut refused = tools;
    refused.ctx.cancel = CancellationToken::new();
    assert_eq!(
        refused.err("search_files", json!({"pattern": "[ab]*a[ab]{12000}c"})).await,
        "`pattern` is not a usable regular expression: compiled it is larger than 256 KiB; use fewer or smaller \
         repetitions. Set `literal` to search for it as plain text."
    );
}

#[tokio::test]
async fn a_pattern_sees_the_line_and_not_its_parts() {
    let tools = Tools::new();
    let mut line = "x".repeat(300_000);
    line.replace_range(150_000..150_006, "needle");
    tools.put("line", &line);
    for pattern in ["^needle", "needle$", "^x{10}n", r"\bneedle", r"needle\b", r"x$\n"] {
        let text = tools.ok("search_files", json!({"pattern": pattern})).await;
        assert_eq!(
            text,
            "[0 matches in 1 file searched; 1 long line searched in parts, where a match over 32768 bytes can be \
             missed]\n",
            "{pattern}"
        );
    }
    for pattern in ["^x+", "x+$", r"\Bneedle\B", "x{400}.*needle.*x{400}"] {
        let text = tools.ok("search_files", json!({"pattern": pattern})).await;
        assert!(text.starts_with("line:1: ") && text.contains("[1 match in 1 file searched"), "{pattern}: {text}");
    }
}

/// Notes of running work: tells when it begins and holds it until it may go on.
struct Gate {
    entered: tokio::sync::mpsc::UnboundedSender<()>,
    open: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
}

impl super::super::ProgressSink for Gate {
    fn progress(&self, _call_id: &str, _text: &str) {
        self.entered.send(()).unwrap();
        self.open.lock().unwrap().recv().unwrap();
    }
}

#[tokio::test]
async fn calls_share_a_bounded_number_of_threads_until_their_work_returns() {
    let (entered, mut has_entered) = tokio::sync::mpsc::unbounded_channel();
    let (open, opened) = std::sync::mpsc::channel();
    let tools = Tools::new();
    let threads = Threads::new(2);
    let mut ctx = tools.ctx.clone();
    ctx.progress = Arc::new(Gate { entered, open: std::sync::Mutex::new(opened) });
    let call = |ctx: &ToolCtx| {
        let (threads, ctx) = (threads.clone(), ctx.clone());
        async move {
            threads
                .run(ctx, (), |ctx, ()| {
                    ctx.progress.progress("", "");
                    Ok(format!("{:?}", ctx.timeout))
                })
                .await
        }
    };
    let mut calls: Vec<_> = (0..20).map(|_| Box::pin(call(&ctx))).collect();
    for call in &mut calls {
        assert!(futures_util::poll!(call).is_pending());
    }
    has_entered.recv().await.unwrap();
    has_entered.recv().await.unwrap();
    // All are abandoned; the two that run hold their threads, and the others have never begun.
    drop(calls);
    assert_eq!(threads.0.available_permits(), 0);
    let mut waits = ctx.clone();
    waits.cancel = CancellationToken::new();
    let mut waiting = std::pin::pin!(call(&waits));
    assert!(futures_util::poll!(&mut waiting).is_pending());
    waits.cancel.cancel();
    let text = "The call was stopped while it waited for a free thread; nothing was done.";
    assert_eq!(waiting.await, Err(ToolError::Respond(text.to_owned())));
    open.send(()).unwrap();
    open.send(()).unwrap();
    drop(threads.0.acquire_many(2).await.unwrap());
    assert!(has_entered.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_thread_counts_against_the_time_of_a_call() {
    let mut tools = Tools::new();
    tools.ctx.timeout = Duration::from_secs(30);
    let threads = Threads::new(1);
    let permit = Arc::clone(&threads.0).acquire_owned().await.unwrap();
    let call = threads.run(tools.ctx.clone(), (), |ctx, ()| Ok(format!("{:?}", ctx.timeout)));
    let release = async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        drop(permit);
    };
    assert_eq!(tokio::join!(call, release).0, Ok("20s".to_owned()));
}

#[tokio::test]
async fn write_creates_and_replaces() {
    let tools = Tools::new();
    assert_eq!(
        tools.ok("write_file", json!({"path": "a.txt", "content": "one\ntwo\n"})).await,
        "Created `a.txt`: 8 bytes, 2 lines."
    );
    assert_eq!(
        tools.ok("write_file", json!({"path": "./a.txt", "content": "é\0"})).await,
        "Replaced `./a.txt`: 3 bytes, 1 line; it had 8 bytes before."
    );
    assert_eq!(tools.get("a.txt"), "é\0".as_bytes());
    assert_eq!(
        tools.err("write_file", json!({"path": "no/a.txt", "content": ""})).await,
        "The directory `no` of `no/a.txt` does not exist; files can only be written into directories that exist."
    );
}

#[tokio::test]
async fn a_read_only_workspace_can_be_read_and_not_changed() {
    let mut tools = Tools::new();
    tools.put("a", "text\n");
    let config = WorkspaceConfig { path: tools.at(""), writable: false, max_file_bytes: 100, max_files: 100 };
    tools.ctx.workspace = Arc::new(Workspace::open(&config).unwrap());
    let expected = "The workspace is read-only: `a` was not changed; files can be read, listed and searched.";
    assert_eq!(tools.err("write_file", json!({"path": "a", "content": ""})).await, expected);
    assert_eq!(tools.err("edit_file", json!({"path": "a", "old_text": "x", "new_text": ""})).await, expected);
    assert_eq!(tools.get("a"), b"text\n");
    assert!(tools.ok("read_file", json!({"path": "a"})).await.contains("text"));
}

#[tokio::test]
async fn edit_replaces_what_is_there_exactly_once() {
    let tools = Tools::new();
    tools.put("a", b"one\n\xfftwo\nthree\n");
    let edit = |old: &str, new: &str| json!({"path": "a", "old_text": old, "new_text": new});
    assert_eq!(
        tools.ok("edit_file", edit("two\n", "2\n2\n")).await,
        "Edited `a` at line 2: 1 line replaced by 2 lines; the file has 15 bytes now."
    );
    assert_eq!(tools.get("a"), b"one\n\xff2\n2\nthree\n");
    tools.ok("edit_file", edit("one\n", "")).await;
    assert_eq!(tools.get("a"), b"\xff2\n2\nthree\n");
    // Replaced text is taken as it is: nothing in it has a meaning.
    tools.ok("edit_file", edit("three", "$0 \\1 {}")).await;
    assert_eq!(tools.get("a"), b"\xff2\n2\n$0 \\1 {}\n");
}

#[tokio::test]
async fn edit_tells_why_a_text_cannot_be_replaced() {
    let tools = Tools::new();
    tools.put("a", "fn main() {\n    let x = 1;\n}\naaa\n");
    tools.put("dos", "one\r\ntwo\r\n");
    for (path, old, expected) in [
        (
            "a",
            "aa",
            "`old_text` is 2 times in `a` (at lines 4, 4); nothing was changed. Add lines before or after it until it is there once.",
        ),
        (
            "a",
            "  let x = 1;\n\n",
            "`old_text` is not in `a`; nothing was changed. Line 2 has its first line, so the difference is in white space or \
             in what follows: `    let x = 1;`.",
        ),
        (
            "a",
            "let y = 1;",
            "`old_text` is not in `a`; nothing was changed. The line most like its first is 2: `    let x = 1;`.",
        ),
        ("a", "zzz", "`old_text` is not in `a`; nothing was changed. No line is like its first; read the file again."),
        (
            "dos",
            "one\ntwo",
            "`old_text` is not in `dos`; nothing was changed. The file's lines end in CR LF, and `old_text` has LF only: use \\r\\n.",
        ),
        ("b", "x", "`b` does not exist; list_dir shows what a directory holds, search_files finds files."),
    ] {
        let before = tools.get("a");
        assert_eq!(tools.err("edit_file", json!({"path": path, "old_text": old, "new_text": "new"})).await, expected);
        assert_eq!(tools.get("a"), before);
    }
    assert!(tools.err("edit_file", json!({"path": "a", "old_text": "", "new_text": "x"})).await.contains("$.old_text"));
    let same = tools.err("edit_file", json!({"path": "a", "old_text": "x", "new_text": "x"})).await;
    assert_eq!(same, "`old_text` and `new_text` are the same; nothing was changed.");
    tools.put("repeated", "a".repeat(1_000_000));
    let often = tools.err("edit_file", json!({"path": "repeated", "old_text": "aaaa", "new_text": "b"})).await;
    assert!(often.contains("very often"), "{often}");
}

/// A tree outside of the workspace, whole, to be compared.
fn snapshot(dir: &Path) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pending.push(path.clone());
                found.push((path, None));
            } else {
                let content = fs::read(&path).unwrap();
                found.push((path, Some(content)));
            }
        }
    }
    found.sort();
    found
}

#[derive(Clone, Debug)]
enum Make {
    Directory(String),
    File(String),
    Link(String, String),
}

fn component() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => prop::sample::select(vec!["a", "b", "c"]).prop_map(str::to_owned),
        3 => Just("..".to_owned()),
        1 => Just(".".to_owned()),
        1 => Just(String::new()),
        1 => prop::sample::select(vec!["ws", "ws-evil", "outside", "f", "\0", "é", "~"]).prop_map(str::to_owned),
    ]
}

fn path() -> impl Strategy<Value = String> {
    let relative = || prop::collection::vec(component(), 1..6).prop_map(|parts| parts.join("/"));
    prop_oneof![12 => relative(), 1 => relative().prop_map(|path| format!("/{path}")), 1 => any::<String>()]
}

fn target() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => path(),
        3 => prop::sample::select(vec!["..", "../ws-evil", "../ws-evil/f", "../outside/new", "../..", "/", "/proc/self/root", "OUT", "OUT/f"])
            .prop_map(str::to_owned),
    ]
}

fn make() -> impl Strategy<Value = Make> {
    let name =
        || prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4).prop_map(|parts| parts.join("/"));
    prop_oneof![
        2 => name().prop_map(Make::Directory),
        1 => name().prop_map(Make::File),
        3 => (name(), target()).prop_map(|(name, target)| Make::Link(name, target)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever the tree and whatever the path: nothing outside is read, made or changed. A directory beside the
    /// workspace whose name begins like the workspace's is outside.
    #[test]
    fn no_path_escapes(tree in prop::collection::vec(make(), 0..8), paths in prop::collection::vec(path(), 1..6)) {
        let tools = Tools::new();
        let base = tools.dir.path().to_owned();
        for directory in ["ws-evil", "outside"] {
            fs::create_dir(base.join(directory)).unwrap();
            fs::write(base.join(directory).join("f"), "SECRET\n").unwrap();
        }
        fs::write(base.join("f"), "SECRET\n").unwrap();
        // The tree is made below a held handle too: a link made by one step must not carry the next one out.
        let root = cap_std::fs::Dir::open_ambient_dir(tools.at(""), cap_std::ambient_authority()).unwrap();
        for step in tree {
            // Steps that do not fit what is there are left out.
            let _made = match step {
                Make::Directory(name) => root.create_dir(name),
                Make::File(name) => root.write(name, "inside"),
                Make::Link(name, target) => {
                    root.symlink_contents(target.replace("OUT", base.join("outside").to_str().unwrap()), name)
                }
            };
        }
        let outside = || {
            let mut all = vec![(base.join("f"), Some(fs::read(base.join("f")).unwrap()))];
            all.extend(snapshot(&base.join("ws-evil")));
            all.extend(snapshot(&base.join("outside")));
            let mut names: Vec<_> = fs::read_dir(&base).unwrap().map(|entry| (entry.unwrap().path(), None)).collect();
            names.sort();
            all.extend(names);
            all
        };
        let before = outside();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for path in &paths {
            for (tool, given) in [
                ("list_dir", json!({"path": path})),
                ("search_files", json!({"pattern": "SECRET", "path": path})),
                ("edit_file", json!({"path": path, "old_text": "SECRET", "new_text": "gone"})),
                ("write_file", json!({"path": path, "content": "mine"})),
                ("read_file", json!({"path": path})),
            ] {
                let (Ok(text) | Err(text)) = runtime.block_on(tools.call(tool, given));
                prop_assert!(!text.contains("SECRET\n"), "{tool} {path:?}: {text}");
                prop_assert!(!text.contains("ws-evil/\n"), "{tool} {path:?}: {text}");
            }
        }
        prop_assert_eq!(outside(), before);
    }
}
