//! What a command gives back, what it sees, and what it cannot.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::poll;
use hames::config::CommandConfig;
use hames::tool::Tool;
use hames::tool::command::CommandTool;
use hames::tool::supervise::CommandHost;
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::{Map, json};

use super::support::{
    Bench, Notes, Sweep, context, environment, failure, marked, preset, script, unique, until, without_duration,
};

/// Most memory this process has had, in KiB.
fn peak_memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// Takes the text between the headings of the two streams.
fn stdout_of(text: &str) -> &str {
    let (_, rest) = text.split_once("--- stdout ---\n").unwrap();
    rest.rsplit_once("--- stderr ---\n").unwrap().0
}

#[tokio::test]
async fn success_is_a_result_with_both_streams_apart() {
    let bench = Bench::new(script("echo out; echo err >&2"));
    assert_eq!(
        without_duration(&bench.run().await.unwrap()),
        "exit code: 0\nstdout: 4 bytes\nstderr: 4 bytes\n--- stdout ---\nout\n--- stderr ---\nerr\n"
    );
}

#[tokio::test]
async fn other_exit_codes_are_errors_in_the_same_form() {
    let bench = Bench::new(script("printf out; printf err >&2; exit 3"));
    assert_eq!(
        without_duration(&failure(bench.run().await)),
        "exit code: 3\nstdout: 3 bytes\nstderr: 3 bytes\n--- stdout ---\nout\n--- stderr ---\nerr\n"
    );
}

#[tokio::test]
async fn a_signal_is_told_by_number_and_name() {
    let bench = Bench::new(script("echo before; kill -9 $$"));
    assert_eq!(
        without_duration(&failure(bench.run().await)),
        "killed by signal: 9 (SIGKILL)\nstdout: 7 bytes\nstderr: 0 bytes\n--- stdout ---\nbefore\n--- stderr ---\n"
    );
}

#[tokio::test]
async fn an_unknown_preset_is_answered_with_the_known_ones() {
    let bench = Bench::new(script("exit 0"));
    let arguments = Map::from_iter([("command".to_owned(), json!("rm -rf /"))]);
    assert_eq!(
        failure(bench.tool.call(&bench.ctx, &arguments).await),
        "$.command: there is no command \"rm -rf /\"; expected one of `it`"
    );
}

#[tokio::test]
async fn a_call_cancelled_before_it_starts_runs_nothing() {
    let bench = Bench::new(script("touch ran"));
    bench.ctx.cancel.cancel();
    assert_eq!(failure(bench.run().await), "`it` was not started: the call was cancelled before");
    assert!(!bench.directory.path().join("ran").exists());
}

/// Kinds of aden-hive/hive#2108 and griffinwork40/agent-afk#507.
#[tokio::test]
async fn a_flood_keeps_head_tail_and_exit_code_in_bounded_memory() {
    let bench = Bench::new(CommandConfig { max_output_bytes: 100 * 1024, ..script("seq 1 100000000; exit 3") });
    let before = peak_memory_kib();
    let text = failure(bench.run().await);
    let grown = peak_memory_kib() - before;
    assert!(grown < 200 * 1024, "{grown} KiB for an output of 888 MB");

    let (head, rest) = text.split_once("\n--- stdout ---\n").unwrap();
    assert_eq!(
        without_duration(&format!("{head}\n")),
        "exit code: 3\nstdout: 888888898 bytes, 888786498 left out of the middle\nstderr: 0 bytes\n"
    );
    assert!(rest.starts_with("1\n2\n3\n"), "{}", &rest[..40]);
    assert!(rest.ends_with("\n99999999\n100000000\n--- stderr ---\n"), "{}", &rest[rest.len() - 80..]);
    assert!(rest.contains("\n[… 888786498 bytes left out …]\n"));
    assert!(rest.len() < 101 * 1024, "{}", rest.len());
}

/// Kind of MoonshotAI/kimi-code#1285. One thread serves the flood and its neighbours.
#[tokio::test]
async fn a_flood_holds_up_neither_its_timeout_nor_other_calls_nor_the_notes() {
    let flood = Bench::new(CommandConfig { timeout_ms: 1_500, ..preset("yes", &[]) });
    let others = [Bench::new(script("yes | head -c 100000")), Bench::new(script("exit 0"))];
    let (of_flood, of_others) = {
        let mut flood = std::pin::pin!(flood.run());
        let mut others = std::pin::pin!(futures_util::future::join_all(others.iter().map(Bench::run)));
        tokio::select! {
            biased;
            flood = &mut flood => panic!("the others did not end before the flood: {flood:?}"),
            others = &mut others => (flood.await, others),
        }
    };
    assert!(of_others.iter().all(Result::is_ok), "{of_others:?}");
    let text = failure(of_flood);
    assert!(text.starts_with("timed out after 1500 ms and was killed\nduration: "), "{text}");
    let duration: u64 = text.lines().nth(1).unwrap()["duration: ".len()..].trim_end_matches(" ms").parse().unwrap();
    assert!((1_500..10_000).contains(&duration), "{duration}");
    assert!(stdout_of(&text).starts_with("y\ny\n"));

    let notes = flood.notes.0.lock().unwrap();
    assert!((1..=duration as usize / 300 + 2).contains(&notes.len()), "{} notes in {duration} ms", notes.len());
    assert!(notes.iter().all(|note| (1..=1024).contains(&note.len()) && note.ends_with("y\n")));
}

/// The default timeout of a command is longer than that of a call; what it printed must not be lost for that.
#[tokio::test]
async fn a_command_that_would_outlast_its_call_returns_what_it_printed() {
    let mut bench = Bench::new(script("echo so far; exec sleep 1000"));
    bench.ctx.timeout = Duration::from_millis(2_000);
    assert_eq!(
        without_duration(&failure(bench.run().await)),
        "timed out after 1600 ms and was killed: a tool call of this run may take 2000 ms in all\nstdout: 7 bytes\n\
         stderr: 0 bytes\n--- stdout ---\nso far\n--- stderr ---\n"
    );
}

/// Kind of nix-community/colmena#75.
#[tokio::test]
async fn any_bytes_become_text_that_can_be_stored() {
    let cases = [
        (r"printf '\377\376\000A\303'", "\u{fffd}\u{fffd}␀A\u{fffd}\n", "stdout: 5 bytes; note: 3 bytes are not UTF-8"),
        (r"printf 'caf\351\n'", "caf\u{fffd}\n", "stdout: 5 bytes; note: 1 bytes are not UTF-8"),
        (r"printf '\377\376h\000i\000'", "\u{fffd}\u{fffd}h␀i␀\n", "stdout: 6 bytes; note: 2 bytes are not UTF-8"),
        (r"printf '\033[31mred\r\n'", "␛[31mred\n", "stdout: 10 bytes; note: 1 control characters"),
    ];
    for (print, expected, fact) in cases {
        let text = failure(Bench::new(script(&format!("{print}; exit 7"))).run().await);
        assert!(text.starts_with("exit code: 7\n"), "{text}");
        assert_eq!(stdout_of(&text), expected);
        assert!(text.lines().any(|line| line.starts_with(fact)), "{fact}: {text}");
    }
    let binary = Bench::new(script("head -c 1048576 /dev/urandom; exit 7"));
    let text = failure(binary.run().await);
    assert!(text.starts_with("exit code: 7\n") && text.contains("\nstdout: 1048576 bytes, "), "{}", &text[..200]);
    assert!(!text.chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
}

#[tokio::test]
async fn what_cannot_start_is_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let gone = file("gone", "#!/bin/sh\n");
    let bench = Bench::new(preset(&gone, &[]));
    std::fs::remove_file(&gone).unwrap();
    let missing = "does not exist, or it is a script and the interpreter in its first line does not";
    assert_eq!(failure(bench.run().await), format!("`it` did not run: {gone} {missing}"));

    let orphan = file("orphan", "#!/no/such/interpreter\n");
    assert_eq!(failure(Bench::new(preset(&orphan, &[])).run().await), format!("`it` did not run: {orphan} {missing}"));

    let closed = file("closed", "#!/bin/sh\n");
    let bench = Bench::new(preset(&closed, &[]));
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(failure(bench.run().await), format!("`it` did not run: {closed} is not executable: permission denied"));

    let bench = Bench::new(script("exit 0"));
    let path = bench.directory.path().to_owned();
    std::fs::remove_dir(&path).unwrap();
    assert_eq!(
        failure(bench.run().await),
        format!(
            "`it` did not run: the working directory {} cannot be entered: No such file or directory (os error 2)",
            path.display()
        )
    );
    std::fs::create_dir(&path).unwrap();

    let presets = BTreeMap::from([("it".to_owned(), script("exit 0"))]);
    let tool = CommandTool::new(&presets, &environment(&[]), CommandHost::program("/no/such/hames"));
    let arguments = Map::from_iter([("command".to_owned(), json!("it"))]);
    assert_eq!(
        failure(tool.unwrap().unwrap().call(&bench.ctx, &arguments).await),
        "`it` did not run: its supervisor could not be started: No such file or directory (os error 2)"
    );
}

#[tokio::test]
async fn the_environment_is_the_allow_list_and_nothing_else() {
    let config = CommandConfig { env: vec!["EXTRA".to_owned(), "NOT_SET".to_owned()], ..preset("env", &[]) };
    let server = environment(&[("SECRET", "canary"), ("EXTRA", "e"), ("LANG", "C"), ("TZ", "UTC"), ("HOME", "/root")]);
    let bench = Bench::with(config, &server);
    let text = bench.run().await.unwrap();
    let mut seen: Vec<&str> = stdout_of(&text).lines().collect();
    seen.sort_unstable();
    assert_eq!(
        seen,
        [
            "EXTRA=e".to_owned(),
            format!("HAMES_CALL_ID={}", bench.ctx.call_id),
            format!("HAMES_RUN_ID={}", bench.ctx.run),
            format!("HOME={}", bench.directory.path().display()),
            "LANG=C".to_owned(),
            "PATH=/usr/local/bin:/usr/bin:/bin".to_owned(),
            "TZ=UTC".to_owned(),
        ]
    );
}

#[tokio::test]
async fn a_preset_can_ask_for_the_home_of_the_server() {
    let config = CommandConfig { env: vec!["HOME".to_owned()], ..script("echo $HOME") };
    let bench = Bench::with(config, &environment(&[("HOME", "/home/of-server")]));
    assert_eq!(stdout_of(&bench.run().await.unwrap()), "/home/of-server\n");
}

#[tokio::test]
async fn the_parent_of_a_command_knows_no_secrets_either() {
    // This process has variables of its own (cargo sets them); the parent of the command has the allow-list
    // alone, and hides even that from everybody but root.
    let bench = Bench::new(script(r"tr '\0' '\n' < /proc/$PPID/environ | cut -d= -f1 | sort; exit 0"));
    let text = bench.run().await.unwrap();
    let is_hidden = text.contains("/environ: Permission denied");
    let expected = if is_hidden { "" } else { "HAMES_CALL_ID\nHAMES_RUN_ID\nHOME\nPATH\n" };
    assert_eq!(stdout_of(&text), expected, "{text}");
}

#[tokio::test]
async fn no_open_file_of_the_server_reaches_a_command() {
    let inherited = tempfile::tempfile().unwrap();
    fcntl_setfd(&inherited, FdFlags::empty()).unwrap();
    let bench = Bench::new(script("ls /proc/$$/fd; exit 0"));
    assert_eq!(stdout_of(&bench.run().await.unwrap()), "0\n1\n2\n");
}

#[tokio::test]
async fn a_command_starts_restricted_and_without_input() {
    let bench = Bench::new(script(
        "umask; ulimit -c; ulimit -Hc; grep -c 'NoNewPrivs:.1' /proc/self/status; cat; pwd; \
         readlink /proc/$$/fd/0; cut -d' ' -f6 /proc/$$/stat | grep -cx $$; exit 0",
    ));
    let root = std::fs::canonicalize(bench.directory.path()).unwrap();
    let expected = format!("0077\n0\n0\n1\n{}\n/dev/null\n1\n", root.display());
    assert_eq!(stdout_of(&bench.run().await.unwrap()), expected);
}

#[tokio::test]
async fn arguments_pass_no_shell() {
    let bench = Bench::new(preset("printf", &["%s\\n", "$HOME", "a b", "*", "; echo x", "", "-n", "ü"]));
    assert_eq!(stdout_of(&bench.run().await.unwrap()), "$HOME\na b\n*\n; echo x\n\n-n\nü\n");
}

#[tokio::test]
async fn a_call_id_of_any_form_is_passed() {
    let mut bench = Bench::new(script("printf %s \"$HAMES_CALL_ID\""));
    bench.ctx.call_id = "a\0b=c\n".to_owned();
    assert_eq!(stdout_of(&bench.run().await.unwrap()), "a\u{fffd}b=c\n");
}

#[tokio::test]
async fn what_a_command_leaves_behind_is_ended_and_does_not_hold_up_the_call() {
    for start in ["sleep 1000 &", "setsid sleep 1000 &", "(setsid sh -c 'sleep 1000 &' &);"] {
        let bench = Bench::new(script(&format!("{start} echo done")));
        let sweep = Sweep(bench.ctx.call_id.clone());
        let text = bench.run().await.unwrap();
        assert!(text.starts_with("exit code: 0\n") && stdout_of(&text) == "done\n", "{start}: {text}");
        assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "{start}");
    }
    let bench = Bench::new(script("sleep 1000 & echo done"));
    let text = without_duration(&bench.run().await.unwrap());
    assert_eq!(
        text,
        "exit code: 0\nstdout: 5 bytes\nstderr: 0 bytes\nleft behind: 1 processes, killed\n--- stdout ---\ndone\n\
         --- stderr ---\n"
    );
}

#[tokio::test]
async fn a_command_that_kills_its_supervisor_dies_with_it() {
    let bench = Bench::new(script("echo before; kill -9 $PPID; while :; do :; done"));
    let sweep = Sweep(bench.ctx.call_id.clone());
    let text = failure(bench.run().await);
    assert!(text.starts_with("outcome unknown: its supervisor process died, and the command with it; "), "{text}");
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the call returns");
}

#[tokio::test]
async fn polite_signals_do_not_end_the_supervisor() {
    let bench = Bench::new(script("kill -TERM $PPID; kill -INT $PPID; kill -HUP $PPID; echo still here"));
    assert_eq!(stdout_of(&bench.run().await.unwrap()), "still here\n");
}

/// The parent-death signal follows the thread that starts a process: none may come from a thread of the server.
#[tokio::test]
async fn a_command_outlives_the_thread_that_started_it() {
    let bench = Bench::new(script("touch started; while [ ! -e go ]; do sleep 0.01; done; echo alive"));
    let sweep = Sweep(bench.ctx.call_id.clone());
    let directory = bench.directory.clone();
    let handle = tokio::runtime::Handle::current();
    let bench = Arc::new(bench);
    let call = std::thread::spawn(move || {
        let mut call = Box::pin(async move { bench.run().await });
        handle.block_on(async {
            assert!(poll!(&mut call).is_pending());
            until("the command runs", || directory.path().join("started").exists()).await;
        });
        std::fs::write(directory.path().join("go"), "").unwrap();
        call
    });
    // The directory of the workspace lives in the call.
    let call = tokio::task::spawn_blocking(move || call.join().unwrap()).await.unwrap();
    let text = call.await.unwrap();
    assert_eq!(stdout_of(&text), "alive\n");
    drop(sweep);
}

#[tokio::test]
async fn calls_run_side_by_side() {
    let directory = tempfile::tempdir().unwrap();
    let presets = BTreeMap::from([("it".to_owned(), script("echo $HAMES_CALL_ID"))]);
    let tool = CommandTool::new(&presets, &environment(&[]), super::support::host()).unwrap().unwrap();
    let arguments = Map::from_iter([("command".to_owned(), json!("it"))]);
    let contexts: Vec<_> =
        (0..16).map(|_| context(directory.path(), &unique("call"), Arc::new(Notes::default()))).collect();
    let results = futures_util::future::join_all(contexts.iter().map(|ctx| tool.call(ctx, &arguments))).await;
    for (ctx, result) in contexts.iter().zip(results) {
        assert_eq!(stdout_of(&result.unwrap()), format!("{}\n", ctx.call_id));
    }
}
