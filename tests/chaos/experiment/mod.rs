//! The experiments. Each makes its place, brings faults, and hands what is left to the checker.

pub(crate) mod commits;
pub(crate) mod kill;
pub(crate) mod outage;
pub(crate) mod pause;
pub(crate) mod prove;
pub(crate) mod short;
pub(crate) mod sigterm;

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::check::{Invariant, Violation, check};
use crate::client::{Client, Log};
use crate::evidence::Evidence;
use crate::load::{Flow, Load};
use crate::sandbox::Sandbox;

/// Runs that have to complete once the faults have stopped.
const TAIL: usize = 20;
/// Most time for the end of everything after the faults.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often a server is asked whether runs are left.
const LOOK: Duration = Duration::from_millis(100);

/// Figures of an experiment, by name.
type Figures = Vec<(&'static str, String)>;

/// Brings an experiment to its end: all runs end, new ones complete, then the checker looks at everything.
async fn conclude(sandbox: &Sandbox, log: Log, figures: &mut Figures) -> Vec<Violation> {
    conclude_within(PATIENCE, sandbox, log, figures).await
}

/// The same within another time.
async fn conclude_within(patience: Duration, sandbox: &Sandbox, mut log: Log, figures: &mut Figures) -> Vec<Violation> {
    let mut violations = Vec::new();
    let client = sandbox.client();
    let until = Instant::now() + patience;
    let tail = Flow { name: "tail".to_owned(), runs: TAIL, live: TAIL, delay: Duration::ZERO, until };
    let tail = Load::start(client.clone(), tail).finish().await;
    if tail.acknowledged.len() < TAIL {
        let shown = format!("of {TAIL} new runs after the faults {} were accepted", tail.acknowledged.len());
        violations.push(Violation { invariant: Invariant::I10, shown });
    }
    log.add(tail);
    let left = wait_for_all(&client, until).await;
    if left > 0 {
        let shown = format!("{left} runs have not ended {} s after the faults", patience.as_secs());
        violations.push(Violation { invariant: Invariant::I10, shown });
    }
    for shown in log.gave_up.clone() {
        violations.push(Violation { invariant: Invariant::I10, shown });
    }
    let answers = format!("{:?}", log.answers);
    let evidence = sandbox.collect(log).await;
    violations.extend(check(&evidence));
    figures.extend(describe(&evidence));
    figures.push(("answers", answers));
    if !sandbox.sees_generations() {
        figures.push(("generations", "not seen".to_owned()));
    }
    violations
}

/// Waits until no run is left; how many are when time is up.
async fn wait_for_all(client: &Client, until: Instant) -> usize {
    loop {
        let left = client.unfinished().await.unwrap_or(usize::MAX);
        if left == 0 || Instant::now() >= until {
            return left;
        }
        sleep(LOOK).await;
    }
}

fn describe(evidence: &Evidence) -> Figures {
    let connections = || evidence.readers.iter().flat_map(|reader| &reader.connections);
    let frames: usize = connections().map(|connection| connection.frames.len()).sum();
    let events: usize = evidence.runs.values().map(|record| record.events.len()).sum();
    let unknown = evidence.runs.values().flat_map(|record| &record.events);
    let unknown = unknown.filter(|event| event.json["outcome"] == "outcome_unknown").count();
    vec![
        ("runs", evidence.runs.len().to_string()),
        ("events", events.to_string()),
        ("connections", connections().count().to_string()),
        ("frames", frames.to_string()),
        ("calls started", evidence.ledger.len().to_string()),
        ("outcome unknown", unknown.to_string()),
    ]
}
