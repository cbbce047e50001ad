//! Processes that are killed, and what the next one makes of what they left.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use crate::support::app::PATIENCE;
use crate::support::process::{Server, Site};

/// A command that leaves a line in a file, and then takes its time.
fn command(name: &str, seconds: u32, effect: &str) -> String {
    format!(
        "[commands.{name}]\nexecutable = \"sh\"\nargs = [\"-c\", \"echo ran >> {name}; sleep {seconds}\"]\n{effect}\n"
    )
}

fn calls(names: &[&str]) -> Value {
    let call = |name: &&str| json!({"id": name, "name": "run_command", "arguments": {"command": name.to_string()}});
    json!({"tool_calls": names.iter().map(call).collect::<Vec<_>>()})
}

async fn started(server: &Server, fields: Value) -> String {
    let mut request = json!({"agent": "a", "input": "x"});
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.client.post("/runs", &request).await.id()
}

/// Waits until a command has begun so many times.
async fn ran(site: &Site, name: &str, times: usize) {
    let begun = async {
        while site.lines(name).len() < times {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, begun).await.unwrap_or_else(|_| panic!("{name} did not begin {times} times"));
}

// stjude-rust-labs/sprocket#1091: after a restart nobody has the handle that a cancel would need.
#[tokio::test]
async fn a_run_of_a_killed_process_is_at_work_in_the_next_one_and_a_cancel_ends_it() {
    let site = Site::new(&command("long", 60, "effect = \"read_only\""), &json!([calls(&["long"])]));
    let server = site.start();
    let run = started(&server, json!({})).await;
    ran(&site, "long", 1).await;
    server.kill();

    let server = site.start();
    server.events(&run, "recovered", 1).await;
    let path = format!("/runs/{run}");
    assert_eq!(server.client.get(&path).await.body["status"], "running");
    assert_eq!(server.client.delete(&path).await.status, 202);
    let ended = server.at_rest(&run).await;
    assert_eq!(ended["status"], "aborted");
    let answer = server.client.delete(&path).await;
    assert_eq!((answer.status, &answer.body), (200, &ended));
}

/// A run that takes its process down is not tried for ever.
#[tokio::test]
async fn a_run_that_ends_every_process_that_takes_it_over_is_ended_itself() {
    let site = Site::new(&command("long", 60, "effect = \"read_only\""), &json!([calls(&["long"])]));
    let server = site.start();
    let run = started(&server, json!({})).await;
    ran(&site, "long", 1).await;
    server.kill();
    for crash in 1..=4 {
        let server = site.start();
        server.events(&run, "recovered", crash).await;
        server.kill();
    }
    let ended = site.start().at_rest(&run).await;
    assert_eq!((&ended["status"], &ended["error"]["code"]), (&json!("internal_error"), &json!("crash_loop")));
}

// GEMISIS/leviath#96: results were stored only when all were there, so one slow call had the others repeated.
#[tokio::test]
async fn of_a_batch_that_was_cut_off_what_had_finished_is_not_repeated() {
    let effect = "effect = \"read_only\"";
    // It takes its time when it runs first, and none when it runs again.
    let slow = command("slow", 60, effect).replace("; sleep", "; test $(wc -l < slow) -gt 1 || sleep");
    let toml = [command("one", 0, effect), command("two", 0, effect), slow].concat();
    let site = Site::new(&toml, &json!([calls(&["one", "slow", "two"]), {"text": "done"}]));
    let server = site.start();
    let run = started(&server, json!({})).await;
    server.events(&run, "tool_end", 2).await;
    ran(&site, "slow", 1).await;
    server.kill();

    let server = site.start();
    assert_eq!(server.at_rest(&run).await["answer"], "done");
    let counts = ["one", "two", "slow"].map(|name| site.lines(name).len());
    assert_eq!(counts, [1, 1, 2], "only what was cut off is repeated, as its effect allows");
    assert_eq!(server.events(&run, "tool_end", 3).await.len(), 3);
}

/// What changed something is for somebody to look at, however often the process is killed meanwhile.
#[tokio::test]
async fn a_call_whose_outcome_is_unknown_is_held_through_every_restart_until_it_is_resolved() {
    let toml = command("pay", 60, "effect = \"side_effect\"\non_unknown = \"hold\"");
    let site = Site::new(&toml, &json!([calls(&["pay"]), {"text": "paid"}]));
    let server = site.start();
    let run = started(&server, json!({})).await;
    ran(&site, "pay", 1).await;
    server.kill();
    let mut waits = Vec::new();
    for _ in 0..2 {
        let server = site.start();
        waits.push(server.at_rest(&run).await);
        server.kill();
    }
    let pending =
        json!([{"call_id": "pay", "name": "run_command", "arguments": {"command": "pay"}, "kind": "unknown_outcome"}]);
    assert_eq!((&waits[0]["status"], &waits[0]["pending"]), (&json!("waiting"), &pending));
    assert_eq!(waits[0], waits[1], "a killed process that only had it at rest leaves it as it is");

    let server = site.start();
    let results = json!({"results": [{"call_id": "pay", "content": "It was booked."}]});
    assert_eq!(server.client.post(&format!("/runs/{run}/tool_results"), &results).await.status, 200);
    assert_eq!(server.at_rest(&run).await["answer"], "paid");
    assert_eq!(site.lines("pay").len(), 1, "it is not done twice");
    let told = server.client.get(&format!("/runs/{run}/messages")).await.body["data"][2].clone();
    assert_eq!((&told["content"], &told["outcome"]), (&json!("It was booked."), &json!("result")));
}

/// The workspace of a run is there as long as the run is.
#[tokio::test]
async fn an_approval_and_what_the_run_wrote_outlive_the_process() {
    let turns = json!([
        {"tool_calls": [{"name": "write_file", "arguments": {"path": "note", "content": "keep me"}}]},
        calls(&["deploy"]),
        {"tool_calls": [{"id": "r", "name": "read_file", "arguments": {"path": "note"}}]},
        {"text": "deployed"},
    ]);
    let site = Site::new(&command("deploy", 0, ""), &turns);
    // A workspace of its own.
    let toml = std::fs::read_to_string(site.path("hames.toml")).unwrap().replace("workspace = \"w\"\n", "");
    std::fs::write(site.path("hames.toml"), toml).unwrap();
    let server = site.start();
    let run = started(&server, json!({"approval": ["run_command"]})).await;
    let waits = server.at_rest(&run).await;
    assert_eq!(waits["pending"][0]["kind"], "approval", "{waits}");
    server.kill();

    let server = site.start();
    assert_eq!(server.client.get(&format!("/runs/{run}")).await.body, waits);
    let decisions = json!({"decisions": [{"call_id": "deploy", "decision": "approve"}]});
    let path = format!("/runs/{run}/approvals");
    assert_eq!(server.client.post(&path, &decisions).await.status, 200);
    server.client.post(&path, &decisions).await.problem(409, "run_conflict");
    assert_eq!(server.at_rest(&run).await["answer"], "deployed");
    let read = server.events(&run, "tool_end", 3).await.pop().unwrap();
    assert!(read["call_id"] == "r" && read["content"].as_str().unwrap().contains("\nkeep me\n"), "{read}");
}

/// A process that is asked to end leaves what is not done to the next one, and readers go on where they were.
#[tokio::test]
async fn a_graceful_stop_in_the_middle_of_an_answer_ends_no_run_and_no_reader_misses_anything() {
    let turns = json!([{"text": "one two three four five", "chunk_chars": 2, "chunk_delay_ms": 400}]);
    let site = Site::new("[run]\ndrain_ms = 300\n", &turns);
    let server = site.start();
    let mut stream = server.client.create_and_stream(&json!({"agent": "a", "input": "x"})).await.unwrap();
    while stream.next().await.unwrap().event != "text_delta" {}
    let run = stream.path().trim_start_matches("/runs/").trim_end_matches("/events").to_owned();
    let idle = server.client.get(&format!("/runs/{run}")).await;
    assert_eq!(idle.body["status"], "running");
    server.terminate();
    let mut last = None;
    while let Some(frame) = stream.next().await {
        last = frame.seq().or(last);
        assert_ne!(frame.event, "run_end");
    }
    let cursor = stream.last_id().to_owned();
    assert!(server.ended().success());

    let server = site.start();
    let rest = server.client.stream(&format!("/runs/{run}/events"), Some(&cursor)).await.unwrap().rest().await;
    let numbers: Vec<u64> = rest.iter().filter_map(|frame| frame.seq()).collect();
    let next = cursor.split('.').next().unwrap().parse::<u64>().unwrap() + 1;
    assert_eq!(numbers, (next..next + numbers.len() as u64).collect::<Vec<_>>());
    let text: String = rest
        .iter()
        .filter(|frame| frame.event == "text_delta")
        .map(|frame| frame.json()["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, "one two three four five", "the attempt that was cut off is made again as a whole");
    let ended = rest.last().unwrap().json()["run"].clone();
    assert_eq!((&ended["status"], &ended["answer"]), (&json!("completed"), &json!("one two three four five")));
}
