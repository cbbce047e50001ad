//! The whole process tree of a command ends, whoever is in it and however the call ends.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hames::config::CommandConfig;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::support::{Bench, Sweep, failure, marked, preset, unique, until};
use super::tree::{TREE, grown};

/// From the wish to the last process gone.
const BOUND: Duration = Duration::from_secs(1);

/// A call of the script. Its arguments carry the marker too: the environment of a supervisor is hidden from
/// everybody but root.
fn bench(script: &str, marker: &str, timeout_ms: u64) -> Bench {
    let mut bench = Bench::new(CommandConfig { timeout_ms, ..preset("sh", &["-c", script, marker]) });
    bench.ctx.call_id = marker.to_owned();
    bench
}

async fn gone(marker: &str, since: Instant) {
    until("the whole tree is gone", || marked(marker).is_empty()).await;
    assert!(since.elapsed() <= BOUND, "the tree took {:?} to end", since.elapsed());
}

#[tokio::test]
async fn cancel_ends_the_tree() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(TREE, &sweep.0, 60_000);
    let cancel = async {
        grown(&sweep.0).await;
        bench.ctx.cancel.cancel();
        Instant::now()
    };
    let (result, since) = tokio::join!(bench.run(), cancel);
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the call returns");
    assert!(since.elapsed() <= BOUND, "the tree took {:?} to end", since.elapsed());
    let text = failure(result);
    assert!(text.starts_with("cancelled: it was started, and killed before it was done\n"), "{text}");
    assert!(text.contains("\n--- stdout ---\nplanted\n"), "{text}");
}

#[tokio::test]
async fn timeout_ends_the_tree() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(TREE, &sweep.0, 3_000);
    let mut call = std::pin::pin!(bench.run());
    tokio::select! {
        result = &mut call => panic!("ended before the tree had grown: {result:?}"),
        () = grown(&sweep.0) => {}
    }
    let text = failure(call.await);
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the call returns");
    assert!(text.starts_with("timed out after 3000 ms and was killed\n"), "{text}");
    assert!(text.contains("\n--- stdout ---\nplanted\n"), "{text}");
}

#[tokio::test]
async fn dropping_the_call_ends_the_tree() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(TREE, &sweep.0, 60_000);
    tokio::select! {
        result = bench.run() => panic!("ended before it was dropped: {result:?}"),
        () = grown(&sweep.0) => {}
    }
    gone(&sweep.0, Instant::now()).await;
}

#[tokio::test]
async fn the_end_of_the_command_ends_the_tree() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(&TREE.replace("wait; sleep 1000", "while [ ! -e go ]; do :; done"), &sweep.0, 60_000);
    let end = async {
        grown(&sweep.0).await;
        std::fs::write(bench.directory.path().join("go"), "").unwrap();
    };
    let (result, ()) = tokio::join!(bench.run(), end);
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the call returns");
    let text = result.unwrap();
    assert!(text.contains("\nleft behind: 50 processes, killed\n"), "{text}");
}

#[tokio::test]
async fn death_of_the_server_ends_the_tree() {
    let server = Server::start(TREE);
    let sweep = Sweep(server.marker.clone());
    grown(&sweep.0).await;
    server.kill();
    gone(&sweep.0, Instant::now()).await;
}

#[tokio::test]
async fn death_of_the_server_during_a_polite_stop_ends_the_tree() {
    let server = Server::start(TREE);
    let sweep = Sweep(server.marker.clone());
    grown(&sweep.0).await;
    std::fs::write(server.cancel_file(), "").unwrap();
    until("the server cancels", || !server.cancel_file().exists()).await;
    server.kill();
    gone(&sweep.0, Instant::now()).await;
}

/// A child that ignores SIGTERM and one that has detached itself; then a signal to the supervisor, and the command goes
/// on.
fn against_its_supervisor(signal: &str) -> String {
    format!(
        "trap '' TERM; sleep 1000 & (setsid sh -c 'sleep 1000 & touch detached' &); \
         while [ ! -e detached ]; do :; done; echo planted; kill -{signal} $PPID; touch done; wait"
    )
}

/// The same with SIGSTOP, and with a child that cannot be told by its environment. It carries the marker as an argument.
fn stops_its_supervisor() -> String {
    let child = "setsid env -i /bin/sh -c 'touch cleared; kill -STOP $$; :' $0 &";
    format!("({child}); while [ ! -e cleared ]; do :; done; {}", against_its_supervisor("STOP"))
}

/// From the moment a supervisor is missed to the last process gone.
const TAKEN_OVER: Duration = Duration::from_secs(2);

async fn taken_over(marker: &str, since: Instant) {
    until("the whole tree is gone", || marked(marker).is_empty()).await;
    assert!(since.elapsed() <= TAKEN_OVER, "the tree took {:?} to end", since.elapsed());
}

#[tokio::test]
async fn a_stopped_supervisor_does_not_save_its_tree_from_cancel() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(&stops_its_supervisor(), &sweep.0, 60_000);
    let cancel = async {
        until("the supervisor is stopped", || bench.directory.path().join("done").exists()).await;
        bench.ctx.cancel.cancel();
        Instant::now()
    };
    let (result, since) = tokio::join!(bench.run(), cancel);
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the call returns");
    assert!(since.elapsed() <= TAKEN_OVER, "the tree took {:?} to end", since.elapsed());
    let text = failure(result);
    assert!(text.starts_with("cancelled: it was started, and killed before it was done\n"), "{text}");
    assert!(text.contains("\n--- stdout ---\nplanted\n"), "{text}");
}

#[tokio::test]
async fn a_stopped_supervisor_does_not_save_its_tree_from_a_timeout() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(&stops_its_supervisor(), &sweep.0, 3_000);
    let text = failure(bench.run().await);
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the call returns");
    assert!(text.starts_with("timed out after 3000 ms and was killed\n"), "{text}");
    assert!(bench.directory.path().join("done").exists());
}

#[tokio::test]
async fn a_stopped_supervisor_does_not_save_its_tree_when_the_call_is_dropped() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(&stops_its_supervisor(), &sweep.0, 60_000);
    tokio::select! {
        result = bench.run() => panic!("ended before it was dropped: {result:?}"),
        () = until("the supervisor is stopped", || bench.directory.path().join("done").exists()) => {}
    }
    taken_over(&sweep.0, Instant::now()).await;
}

#[tokio::test]
async fn a_killed_supervisor_does_not_save_what_its_command_detached() {
    let sweep = Sweep(unique("tree"));
    let bench = bench(&against_its_supervisor("KILL"), &sweep.0, 60_000);
    let text = failure(bench.run().await);
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the call returns");
    assert!(text.starts_with("outcome unknown: its supervisor process died, and the command with it; "), "{text}");
    assert!(text.contains("\n--- stdout ---\nplanted\n"), "{text}");
}

/// What the process of [`server`] has to do.
#[derive(Serialize, Deserialize)]
struct Order {
    script: String,
    marker: String,
    cancel_file: PathBuf,
}

/// A process that runs one call, as a server does.
struct Server {
    child: Child,
    marker: String,
    directory: tempfile::TempDir,
}

impl Server {
    fn start(script: &str) -> Self {
        let marker = unique("tree");
        let directory = tempfile::tempdir().unwrap();
        let order =
            Order { script: script.to_owned(), marker: marker.clone(), cancel_file: directory.path().join("cancel") };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["tool::command_tree::server", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let line = serde_json::to_string(&order).unwrap();
        child.stdin.take().unwrap().write_all(line.as_bytes()).unwrap();
        Self { child, marker, directory }
    }

    fn cancel_file(&self) -> PathBuf {
        self.directory.path().join("cancel")
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[tokio::test]
#[ignore = "the process that other tests start and kill; takes its orders from standard input"]
async fn server() {
    let order: Order = serde_json::from_reader(std::io::stdin().lock()).unwrap();
    let bench = bench(&order.script, &order.marker, 60_000);
    let exists = |path: &Path| path.exists();
    let cancel = async {
        until("the order to cancel", || exists(&order.cancel_file)).await;
        bench.ctx.cancel.cancel();
        std::fs::remove_file(&order.cancel_file).unwrap();
    };
    let (result, ()) = tokio::join!(bench.run(), cancel);
    panic!("the server was to be killed during the call: {result:?}");
}
