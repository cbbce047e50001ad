//! The built program: what it prints and how it exits.

pub(crate) mod program;
mod server;

use std::time::Duration;

use program::{Finished, Program};
use serde_json::json;
use server::{Connection, RUN, Script, Silence, server};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::support::client::ApiClient;
use crate::support::collector::{Collector, Manner};

fn said(seq: u64, text: &str) -> String {
    let content = json!([{"type": "text", "text": text}]);
    let message = json!({"role": "assistant", "content": content});
    server::event(seq, json!({"type": "message", "step": 1, "message": message}))
}

fn ended(seq: u64, status: &str) -> String {
    server::event(seq, json!({"type": "run_end", "duration_ms": 40, "run": server::run(status)}))
}

fn started() -> String {
    server::event(1, json!({"type": "run_queued"}))
        + &server::event(2, json!({"type": "run_start", "agent": "demo", "model": "demo/script"}))
}

/// A connection that gives everything at once and is closed.
fn whole(status: &str) -> Vec<Connection> {
    vec![Connection::closed(None, format!("{}{}{}", started(), said(3, "Hello."), ended(4, status)))]
}

#[tokio::test]
async fn check_accepts_the_example_and_names_every_problem() {
    let good = Program::new(["check", "--config", concat!(env!("CARGO_MANIFEST_DIR"), "/hames.example.toml")])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .finish()
        .await;
    assert_eq!((good.code, good.stderr.as_str()), (Some(0), ""));
    assert!(good.stdout.ends_with("no problems\n"), "{}", good.stdout);

    let bad =
        Program::new(["check"]).env("HAMES_SERVER__BIND", "nowhere").env("HAMES_RUN__DRAIN_MS", "0").finish().await;
    let expected = "environment variable HAMES_SERVER__BIND: server.bind: `nowhere`: invalid socket address syntax; expected \
        ADDRESS:PORT such as 127.0.0.1:8080\n\
        environment variable HAMES_RUN__DRAIN_MS: run.drain_ms: is 0; expected milliseconds from 1 to 2592000000 (30 \
        days)\n";
    assert_eq!((bad.code, bad.stdout.as_str(), bad.stderr.as_str()), (Some(1), expected, ""));
}

#[tokio::test]
async fn openapi_is_printed() {
    let printed = Program::new(["openapi"]).finish().await;
    assert_eq!((printed.code, printed.stderr.as_str()), (Some(0), ""));
    assert!(printed.stdout.contains("\nopenapi: 3.1"), "{}", printed.stdout);
}

#[tokio::test]
async fn a_wrong_command_line_exits_with_2_and_wrong_settings_with_1() {
    assert_eq!(Program::new(["run"]).finish().await.code, Some(2));
    let url = Program::new(["run", "hi", "--url", "127.0.0.1:8080"]).finish().await;
    let expected = "'127.0.0.1:8080' for '--url <URL>': must begin with http:// or https://";
    assert!(url.code == Some(2) && url.stderr.contains(expected), "{}", url.stderr);
    let timeout = Program::new(["run", "hi", "--timeout", "5h"]).finish().await;
    let expected = "hames: the run was refused: --timeout, in milliseconds: 18000000 is above the server's ceiling of \
        3600000\n";
    assert_eq!((timeout.code, timeout.stderr.as_str()), (Some(1), expected));
    let served = Program::new(["serve"]).env("HAMES_STORE__URL", "mysql://u:canary@h/d").finish().await;
    let expected = "hames: environment variable HAMES_STORE__URL: store.url: is no address of a database; \
        expected `sqlite:PATH` or `postgres://USER:PASSWORD@HOST:PORT/DATABASE`\n";
    assert_eq!((served.code, served.stdout.as_str(), served.stderr.as_str()), (Some(1), "", expected));
}

#[tokio::test]
async fn a_run_on_a_server_is_shown_across_a_broken_connection() {
    let connections = vec![
        Connection::closed(None, format!("retry: 1\n\n{}{}", started(), server::delta(2, 0, "Hel"))),
        // A frame that was cut off does not count.
        Connection::closed(Some("2.3"), "event: text_delta\nid: 2.5\ndata: {\"text\":\"lost".to_owned()),
        Connection::closed(Some("2.3"), server::delta(2, 3, "lo.")),
        Connection::closed(Some("2.6"), format!("{}{}", said(3, "Hello."), ended(4, "completed"))),
    ];
    let server = server(Script { connections, ..Script::default() }).await;
    let args = ["run", "hi", "--agent", "demo", "--metadata", "k=v", "--timeout", "5s", "--url", &server.url];
    let finished = Program::new(args).finish().await;
    let expected = format!(
        "agent demo, model demo/script\nHello.\ncompleted: 1 step, 0 tool calls, 3 + 2 tokens, 40 ms ({RUN})\n"
    );
    assert_eq!((finished.code, finished.stdout, finished.stderr.as_str()), (Some(0), expected, ""));
    let request = json!({
        "agent": "demo", "input": "hi", "limits": {"timeout_ms": 5000}, "context": {"strategy": "trim"},
        "on_busy": "reject", "on_repeat": "warn", "parallel_tools": "read_only", "metadata": {"k": "v"},
    });
    assert_eq!(server.seen(), [request]);
}

#[tokio::test]
async fn the_exit_code_is_0_for_completed_runs_only() {
    for (status, code) in
        [("completed", 0), ("step_limit", 3), ("timeout", 3), ("aborted", 3), ("model_error", 4), ("internal_error", 5)]
    {
        let server = server(Script { connections: whole(status), ..Script::default() }).await;
        let finished = Program::new(["run", "hi", "--url", &server.url]).finish().await;
        assert_eq!(finished.code, Some(code), "{status}: {}{}", finished.stdout, finished.stderr);
    }
}

/// A frame of [`server::event`] as `--json` prints it.
fn json_line(seq: u64, body: &serde_json::Value) -> String {
    format!("{{\"id\":\"{seq}\",\"event\":{},\"data\":{body}}}\n", body["type"])
}

#[tokio::test]
async fn the_prompt_can_come_from_standard_input_and_events_go_out_as_json() {
    let server = server(Script { connections: whole("completed"), ..Script::default() }).await;
    let finished =
        Program::new(["run", "-", "--json", "--url", &server.url]).input("two\nlines").closed().finish().await;
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""));
    let expected: String = [
        json_line(1, &json!({"type": "run_queued"})),
        json_line(2, &json!({"type": "run_start", "agent": "demo", "model": "demo/script"})),
    ]
    .concat();
    assert!(finished.stdout.starts_with(&expected), "{}", finished.stdout);
    assert_eq!(finished.stdout.lines().count(), 4);
    assert_eq!(server.seen()[0]["input"], "two\nlines");
}

#[tokio::test]
async fn what_a_server_refuses_is_told_field_by_field() {
    let problem = json!({"title": "Invalid request", "status": 400, "detail": "2 fields are wrong", "errors": [
        {"path": "$.agent", "message": "no agent `x`\u{1b}[2J"}, {"path": "$.input", "message": "is empty"},
    ]});
    let server = server(Script { refusal: Some(problem), ..Script::default() }).await;
    let finished = Program::new(["run", "", "--agent", "x", "--url", &server.url]).finish().await;
    let expected = "hames: the server answered 400 Bad Request: Invalid request: 2 fields are wrong\n  \
        --agent: no agent `x`\\u{1b}[2J\n  the prompt: is empty\n";
    assert_eq!((finished.code, finished.stdout.as_str(), finished.stderr.as_str()), (Some(1), "", expected));
}

/// Every clause of what was printed: what stands between colons, semicolons and line ends.
fn clauses(text: &str) -> Vec<&str> {
    text.split(['\n', ';'])
        .flat_map(|line| line.split(": "))
        .map(str::trim)
        .filter(|clause| !clause.is_empty())
        .collect()
}

#[tokio::test]
async fn no_printed_error_says_anything_twice() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    write("list.json", r#"{"turns": 5}"#);
    write("scripted.toml", "[providers.p]\nkind = \"scripted\"\nscript = \"list.json\"\n[agents.a]\nmodel = \"p/m\"\n");
    let demo = "[providers.demo]\nkind = \"scripted\"\n[agents.a]\nmodel = \"demo/m\"\n";
    write("tool.toml", &format!("{demo}tools = [\"no_such_tool\"]\n"));
    write("command.toml", &format!("{demo}[commands.test]\nexecutable = \"no-such-program\"\n"));
    write("syntax.toml", "[agents\n");
    write("plain", "");
    let run = |args: Vec<&'static str>| {
        Program::new(args)
            .current_dir(directory.path())
            .env("PATH", "/usr/bin:/bin")
            .env("HAMES_SERVER__BIND", "127.0.0.1:0")
    };
    let mut printed = Vec::new();
    for file in ["scripted.toml", "tool.toml", "command.toml", "syntax.toml", "missing.toml"] {
        for command in [vec!["check"], vec!["serve"], vec!["run", "hi"]] {
            printed.push(run([command, vec!["--config", file]].concat()).finish().await);
        }
    }
    for args in [vec!["run", "hi", "--agent", "nope"], vec!["run", "hi", "--timeout", "5h"], vec!["run", ""]] {
        printed.push(run(args).finish().await);
    }
    let unwritable = Program::new(["serve"]).current_dir(directory.path()).env("HAMES_STORE__URL", "sqlite:plain/x.db");
    printed.push(unwritable.finish().await);
    let field = json!({"path": "$.agent", "message": "there is no agent `nope`; there are `demo`"});
    for (detail, errors) in [
        ("$.agent: there is no agent `nope`; there are `demo`", json!([field])),
        (
            "$.agent: there is no agent `nope`; there are `demo` (and 1 more)",
            json!([field, {"path": "$.b", "message": "c"}]),
        ),
        ("In words.", json!([])),
    ] {
        let refusal = Some(json!({"title": "The request is not valid", "detail": detail, "errors": errors}));
        let server = server(Script { refusal, ..Script::default() }).await;
        let refused = Program::new(["run", "hi", "--agent", "nope", "--url", &server.url]).finish().await;
        assert!(refused.stderr.contains(if errors[0].is_null() { detail } else { "--agent: there is no agent" }));
        printed.push(refused);
    }
    for Finished { code, stdout, stderr } in printed {
        assert_eq!(code, Some(1), "{stdout}{stderr}");
        let text = format!("{stdout}{stderr}");
        let mut seen = std::collections::HashSet::new();
        for clause in clauses(&text).into_iter().filter(|clause| clause.len() > 3) {
            assert!(seen.insert(clause), "{clause:?} stands twice in {text}");
        }
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named() {
    let server = server(Script::default()).await;
    let url = server.url.clone();
    drop(server);
    let finished = Program::new(["run", "hi", "--url", &url]).finish().await;
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""));
    assert!(finished.stderr.starts_with(&format!("hames: {url}/ cannot be reached: ")), "{}", finished.stderr);
}

#[tokio::test]
async fn tail_gives_up_at_once_on_a_server_that_never_answered() {
    let server = server(Script::default()).await;
    let url = server.url.clone();
    drop(server);
    let finished = Program::new(["tail", RUN, "--url", &url]).finish().await;
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(1), ""));
    assert!(finished.stderr.starts_with(&format!("hames: {url}/ cannot be reached: ")), "{}", finished.stderr);
}

#[tokio::test]
async fn tail_tells_that_a_server_is_gone_while_it_tries_again() {
    for json in [false, true] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let args = ["tail", RUN, "--url", &url, "--json"];
        let mut running = Program::new(args[..if json { 5 } else { 4 }].iter().copied()).start().await;
        let (mut connection, _) = timeout(PATIENCE, listener.accept()).await.unwrap().unwrap();
        drop(listener);
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            assert_ne!(connection.read_buf(&mut request).await.unwrap(), 0);
        }
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        let answer = format!("{head}retry: 1\n\n{}", started());
        connection.write_all(answer.as_bytes()).await.unwrap();
        connection.shutdown().await.unwrap();
        let trouble = "not reachable; attempt 2 follows in ";
        if json {
            running.wait_for_stderr(&format!("hames: {trouble}")).await;
            running.wait_for_stderr("; attempt 3 follows in ").await;
        } else {
            running.wait_for(&format!("agent demo, model demo/script\n! {trouble}")).await;
            running.wait_for("; attempt 3 follows in ").await;
        }
        running.interrupt();
        assert_eq!(running.finish().await.code, Some(130));
    }
}

#[tokio::test]
async fn the_first_interrupt_aborts_the_run_and_its_end_is_shown() {
    let connections = vec![Connection::open(None, started(), ended(3, "aborted"))];
    let server = server(Script { connections, ..Script::default() }).await;
    let mut running = Program::new(["run", "hi", "--url", &server.url]).start().await;
    running.wait_for("agent demo").await;
    running.interrupt();
    let finished = running.finish().await;
    assert_eq!(finished.code, Some(3), "{}", finished.stderr);
    assert!(finished.stdout.contains("aborted: "), "{}", finished.stdout);
}

#[tokio::test]
async fn the_second_interrupt_waits_for_nothing() {
    let connections = vec![Connection::open(None, started(), String::new())];
    let mut server = server(Script { connections, silence: Silence::OnDelete, ..Script::default() }).await;
    let mut running = Program::new(["run", "hi", "--url", &server.url]).start().await;
    running.wait_for("agent demo").await;
    running.interrupt();
    server.deletion().await;
    running.interrupt();
    assert_eq!(running.finish().await.code, Some(130));
}

#[tokio::test]
async fn an_interrupt_ends_the_program_while_it_waits_for_its_prompt_or_for_the_server() {
    let mut server = server(Script { silence: Silence::OnCreate, ..Script::default() }).await;
    // More than a pipe holds: once it is written, the program reads.
    let waiting = Program::new(["run", "-", "--url", &server.url]).input(&"x".repeat(1 << 20)).start().await;
    waiting.interrupt();
    assert_eq!(waiting.finish().await.code, Some(130));

    let creating = Program::new(["run", "hi", "--url", &server.url]).start().await;
    server.creation().await;
    creating.interrupt();
    assert_eq!(creating.finish().await.code, Some(130));
}

#[tokio::test]
async fn tail_follows_from_a_cursor_and_an_interrupt_leaves_the_run_alone() {
    let connections = vec![Connection::open(Some("2"), said(3, "Hello."), String::new())];
    let server = server(Script { connections, ..Script::default() }).await;
    let mut running = Program::new(["tail", RUN, "--after", "2", "--url", &server.url]).start().await;
    running.wait_for("Hello.").await;
    running.interrupt();
    let finished = running.finish().await;
    assert_eq!((finished.code, finished.stdout.as_str()), (Some(130), "Hello.\n"));
    assert_eq!(server.deletions(), 0);
}

#[tokio::test]
async fn tail_past_the_end_tells_how_it_ended() {
    let server = server(Script { connections: vec![Connection::past(Some("9"))], ..Script::default() }).await;
    let finished = Program::new(["tail", RUN, "--after", "9", "--url", &server.url]).finish().await;
    let expected = format!("model_error: 1 step, 0 tool calls, 3 + 2 tokens ({RUN})\n");
    assert_eq!((finished.code, finished.stdout, finished.stderr.as_str()), (Some(4), expected, ""));
}

#[tokio::test]
async fn a_reader_that_goes_away_ends_tail_without_an_error() {
    let connections = vec![Connection::open(None, started(), ended(3, "completed"))];
    let mut server = server(Script { connections, ..Script::default() }).await;
    let mut running = Program::new(["tail", RUN, "--url", &server.url]).start().await;
    running.wait_for("agent demo").await;
    running.close_stdout();
    server.release();
    let finished = running.finish().await;
    assert_eq!((finished.code, finished.stderr.as_str()), (Some(0), ""));
}

#[tokio::test]
async fn a_run_on_the_screen_is_not_mixed_with_the_log_unless_a_level_is_given() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hames.toml");
    let settings = "[log]\nlevel = \"info\"\n[providers.demo]\nkind = \"scripted\"\n\
        [agents.default]\nmodel = \"demo/script\"\n";
    std::fs::write(&path, settings).unwrap();
    let run = |args: &'static [&'static str]| Program::new(args.iter().copied()).current_dir(directory.path());
    let quiet = run(&["run", "hi"]).finish().await;
    let unused = "settings: built in; ./hames.toml is not used, give --config hames.toml\n";
    assert_eq!((quiet.code, quiet.stderr.as_str()), (Some(0), unused), "{}", quiet.stdout);
    assert!(quiet.stdout.starts_with("agent demo, model demo/script\n"), "{}", quiet.stdout);
    // A level that is also the default counts as given, in a file and in a variable.
    let file = run(&["run", "hi", "--config", "hames.toml"]).finish().await;
    assert!(file.stderr.contains(" INFO ") && !file.stderr.contains("is not used"), "{}{}", file.stdout, file.stderr);
    let variable = run(&["run", "hi"]).env("HAMES_LOG__LEVEL", "info").finish().await;
    assert!(variable.stderr.contains(" INFO "), "{}{}", variable.stdout, variable.stderr);

    let mut demo = run(&["serve", "--demo"]).env("HAMES_SERVER__BIND", "127.0.0.1:0").start().await;
    demo.wait_for("Ctrl-C stops it.").await;
    demo.terminate();
    let demo = demo.finish().await;
    let end = "Ctrl-C stops it.\n\nStopping; a second Ctrl-C ends the program at once.\n";
    assert!(demo.stdout.ends_with(end), "{}", demo.stdout);
    let unused = "settings: built in; ./hames.toml is not used by --demo\n";
    assert_eq!((demo.code, demo.stderr.as_str()), (Some(0), unused), "{}", demo.stdout);

    let checked = run(&["check"]).finish().await;
    let unused = "settings: built in; ./hames.toml is not used, give --config hames.toml\n";
    assert_eq!((checked.code, checked.stderr.as_str()), (Some(0), unused), "{}", checked.stdout);
}

#[tokio::test]
async fn exit_codes_stand_in_the_help_of_commands_that_show_a_run() {
    for command in ["run", "tail"] {
        let help = Program::new([command, "--help"]).finish().await;
        let table = "Exit codes:\n  0     the run completed\n";
        assert!(help.code == Some(0) && help.stdout.contains(table), "{}", help.stdout);
    }
}

#[tokio::test]
async fn serve_stops_cleanly_on_a_signal() {
    let directory = tempfile::tempdir().unwrap();
    let mut running = Program::new(["serve"])
        .current_dir(directory.path())
        .env("HAMES_SERVER__BIND", "127.0.0.1:0")
        .env("HAMES_RUN__DRAIN_MS", "5000")
        .start()
        .await;
    running.wait_for_stderr("listening").await;
    running.terminate();
    let finished = running.finish().await;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert!(finished.stderr.contains("SIGTERM") && finished.stderr.contains("stopped"), "{}", finished.stderr);
}

#[tokio::test]
async fn health_says_whether_a_server_accepts_runs() {
    let directory = tempfile::tempdir().unwrap();
    let mut running =
        Program::new(["serve"]).current_dir(directory.path()).env("HAMES_SERVER__BIND", "127.0.0.1:0").start().await;
    running.wait_for_stderr("listening address=").await;
    running.wait_for_stderr("\n").await;
    let address = running.stderr().split("address=").nth(1).unwrap().lines().next().unwrap().trim().to_owned();
    let url = format!("http://{address}");
    for health in
        [Program::new(["health", "--url", &url]), Program::new(["health"]).env("HAMES_SERVER__BIND", &address)]
    {
        let health = health.finish().await;
        assert_eq!((health.code, health.stdout.as_str(), health.stderr.as_str()), (Some(0), "ready\n", ""));
    }
    running.terminate();
    assert_eq!(running.finish().await.code, Some(0));
    let gone = Program::new(["health", "--url", &url]).finish().await;
    assert_eq!((gone.code, gone.stdout.as_str()), (Some(1), ""));
    assert!(gone.stderr.starts_with(&format!("hames: {url}/ cannot be reached: ")), "{}", gone.stderr);
}

#[tokio::test]
async fn health_waits_for_a_silent_server_only_so_long_and_takes_no_other_for_ours() {
    // Connections are taken by the system and never answered.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let late = Program::new(["health", "--url", &url]).finish().await;
    let expected = format!("hames: {url}/ gave no answer within 4 seconds");
    assert!(late.code == Some(1) && late.stderr.starts_with(&expected), "{}", late.stderr);
    // A server without this route.
    let other = server(Script::default()).await;
    let other = Program::new(["health", "--url", &other.url]).finish().await;
    assert_eq!((other.code, other.stderr.as_str()), (Some(1), "hames: the server answered 404 Not Found\n"));
}

#[tokio::test]
async fn serve_names_an_address_that_is_taken() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let finished = Program::new(["serve"]).env("HAMES_SERVER__BIND", &address).finish().await;
    assert_eq!(finished.code, Some(1));
    let expected = format!("hames: cannot listen on {address}; is another server running there? (server.bind)");
    assert!(finished.stderr.starts_with(&expected), "{}", finished.stderr);
}

#[tokio::test]
async fn telemetry_is_sent_however_serve_ends() {
    // It cannot begin.
    let collector = Collector::start(Manner::Takes).await;
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let serve = |bind: &str| {
        Program::new(["serve", "--config", "hames.toml"])
            .env("HAMES_SERVER__BIND", bind)
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.endpoint)
    };
    let directory = tempfile::tempdir().unwrap();
    let silent = format!("http://{}/v1", taken.local_addr().unwrap());
    let settings = format!(
        "[providers.p]\nkind = \"openai_chat\"\nbase_url = {silent:?}\n[agents.a]\nmodel = \"p/m\"\n[run]\ndefault_agent = \"a\"\n"
    );
    std::fs::write(directory.path().join("hames.toml"), settings).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let finished = serve(&address).current_dir(directory.path()).finish().await;
    assert_eq!(finished.code, Some(1), "{}", finished.stderr);
    assert!(collector.metrics().contains_key("hames.build.info"), "{}", finished.stderr);

    // It is told to end twice, with a run at work whose model says nothing.
    let mut running = serve("127.0.0.1:0").current_dir(directory.path()).start().await;
    running.wait_for_stderr("listening address=").await;
    let address = running.stderr().split("address=").nth(1).unwrap().lines().next().unwrap().trim().parse().unwrap();
    assert_eq!(ApiClient::new(address).post("/runs", &json!({"input": "x"})).await.status, 202);
    running.interrupt();
    running.wait_for_stderr("SIGINT").await;
    running.interrupt();
    let finished = running.finish().await;
    assert_eq!(finished.code, Some(130), "{}", finished.stderr);
    assert_eq!(collector.named("POST /runs").len(), 1, "{}", finished.stderr);
}

/// Longest a program may take before its test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
