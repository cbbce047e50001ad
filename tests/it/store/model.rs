//! Any sequence of verbs against a model that keeps everything in plain vectors.

use std::time::Duration;

use hames::config::Durability;
use hames::domain::{Event, Run, RunSpec, RunStatus, RunStatusName, TenantId, Timestamp};
use hames::store::{ClaimedRun, NewRun, RunFilter, StepCommit, Store, StoreError};
use proptest::prelude::*;

use super::contract::Database;
use super::sample::{aborted, at, completed, id, labels, mark, queued, running, step};
use super::sqlite::SqliteFile;

/// One call. Runs are named by a number that may name none.
#[derive(Clone, Debug)]
enum Verb {
    Create { number: u32, tenant: bool, starts: bool, label: bool },
    ClaimQueued { limit: u32 },
    Load { number: u32, tenant: bool },
    ClaimInterrupted,
    Step { number: u32, behind: u64, events: usize, then: Then, knows: bool },
    Cancel { number: u32, tenant: bool },
}

#[derive(Clone, Copy, Debug)]
enum Then {
    Run,
    Park,
    Complete,
    Abort,
}

fn verbs() -> impl Strategy<Value = Vec<Verb>> {
    let number = 1..8_u32;
    let then =
        prop_oneof![4 => Just(Then::Run), 1 => Just(Then::Park), 1 => Just(Then::Complete), 1 => Just(Then::Abort)];
    let verb = prop_oneof![
        4 => (number.clone(), any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(number, tenant, starts, label)| Verb::Create { number, tenant, starts, label }),
        2 => (0..4_u32).prop_map(|limit| Verb::ClaimQueued { limit }),
        2 => (number.clone(), any::<bool>()).prop_map(|(number, tenant)| Verb::Load { number, tenant }),
        1 => Just(Verb::ClaimInterrupted),
        6 => (number.clone(), prop_oneof![4 => Just(0_u64), 1 => 1..3_u64], 0..5_usize, then, any::<bool>())
            .prop_map(|(number, behind, events, then, knows)| Verb::Step { number, behind, events, then, knows }),
        2 => (number, any::<bool>()).prop_map(|(number, tenant)| Verb::Cancel { number, tenant }),
    ];
    proptest::collection::vec(verb, 1..40)
}

fn tenant(first: bool) -> TenantId {
    TenantId::new(if first { "acme" } else { "other" })
}

struct Kept {
    run: Run,
    spec: RunSpec,
    state: Option<String>,
    log: Vec<Event>,
}

impl Kept {
    fn append(&mut self, time: Timestamp, commit: &[hames::domain::EncodedBody]) -> Vec<Event> {
        let first = self.run.last_seq + 1;
        let events: Vec<Event> = (first..)
            .zip(commit)
            .map(|(seq, body)| Event { run: self.run.id, seq, time, body: body.clone() })
            .collect();
        self.run.last_seq += events.len() as u64;
        self.log.extend(events.clone());
        events
    }

    fn claim(&mut self) -> ClaimedRun {
        self.run.generation += 1;
        self.loaded()
    }

    fn loaded(&self) -> ClaimedRun {
        ClaimedRun { run: self.run.clone(), spec: self.spec.clone(), state: self.state.clone(), transcript: Vec::new() }
    }

    fn start(&mut self, now: Timestamp) -> ClaimedRun {
        self.run.status = RunStatus::Running { started_at: now, deadline_at: now.plus(Duration::from_secs(60)) };
        self.claim()
    }
}

/// What was refused, without the database's own words.
#[derive(Debug, PartialEq)]
enum Refusal {
    Fenced,
    CancelRequested,
    Failed,
}

/// What a verb answered, so that model and store can be compared.
#[derive(Debug, PartialEq)]
enum Answer {
    Events(Result<Vec<Event>, Refusal>),
    Claims(Vec<ClaimedRun>),
    Run(Option<Box<Run>>),
}

fn refusal(error: StoreError) -> Refusal {
    match error {
        StoreError::Fenced { .. } => Refusal::Fenced,
        StoreError::Failed(_) => Refusal::Failed,
        StoreError::CancelRequested { .. } => Refusal::CancelRequested,
        StoreError::Unavailable(_) | StoreError::Corrupt { .. } | StoreError::Unusable(_) => panic!("{error}"),
    }
}

#[derive(Default)]
struct Model(Vec<Kept>);

impl Model {
    fn find(&mut self, number: u32) -> Option<&mut Kept> {
        self.0.iter_mut().find(|kept| kept.run.id == id(number))
    }

    fn new_run(number: u32, first_tenant: bool, starts: bool, label: bool) -> NewRun {
        let mut new = if starts { running(number) } else { queued(number) };
        new.run.tenant = tenant(first_tenant);
        new.run.metadata = if label { labels(&[("a", "1"), ("b", "2")]) } else { labels(&[("a", "2")]) };
        new
    }

    /// The step a worker would commit that holds the run, or held it some claims ago.
    fn commit(&mut self, number: u32, behind: u64, events: usize, then: Then, knows: bool) -> StepCommit {
        let generation = self.find(number).map_or(0, |kept| kept.run.generation).saturating_sub(behind);
        let bodies = (0..events).map(|n| mark(u32::try_from(n).unwrap())).collect();
        let commit = step(&running(number), generation, bodies);
        let status = match then {
            Then::Run => commit.status.clone(),
            Then::Park => RunStatus::Queued,
            Then::Complete => completed(),
            Then::Abort => aborted(),
        };
        let cancel_requested_at = self.find(number).filter(|_| knows).and_then(|kept| kept.run.cancel_requested_at);
        StepCommit { status, cancel_requested_at, ..commit }
    }

    fn apply(&mut self, verb: &Verb, now: Timestamp) -> Answer {
        match *verb {
            Verb::Create { number, tenant, starts, label } => {
                if self.find(number).is_some() {
                    return Answer::Events(Err(Refusal::Failed));
                }
                let new = Self::new_run(number, tenant, starts, label);
                let mut kept = Kept { run: new.run, spec: new.spec, state: new.state, log: Vec::new() };
                let events = kept.append(kept.run.created_at, &new.events);
                self.0.push(kept);
                self.0.sort_by_key(|kept| kept.run.id);
                Answer::Events(Ok(events))
            }
            Verb::ClaimQueued { limit } => {
                let waiting = self.0.iter_mut().filter(|kept| kept.run.status == RunStatus::Queued);
                Answer::Claims(waiting.take(limit as usize).map(|kept| kept.start(now)).collect())
            }
            Verb::Load { number, tenant: first } => {
                let kept = self.find(number).filter(|kept| kept.run.tenant == tenant(first));
                Answer::Claims(kept.map(|kept| kept.loaded()).into_iter().collect())
            }
            Verb::ClaimInterrupted => {
                let active = self.0.iter_mut().filter(|kept| kept.run.status.name() == RunStatusName::Running);
                Answer::Claims(active.map(Kept::claim).collect())
            }
            Verb::Step { number, behind, events, then, knows } => {
                let commit = self.commit(number, behind, events, then, knows);
                match self.find(number) {
                    Some(kept) if kept.run.generation == commit.generation && !kept.run.status.is_finished() => {
                        if commit.status.is_finished() && kept.run.cancel_requested_at != commit.cancel_requested_at {
                            return Answer::Events(Err(Refusal::CancelRequested));
                        }
                        kept.run.status = commit.status;
                        kept.run.steps = commit.steps;
                        kept.run.tool_calls = commit.tool_calls;
                        kept.run.usage = commit.usage;
                        kept.state = commit.state;
                        Answer::Events(Ok(kept.append(commit.time, &commit.events)))
                    }
                    Some(_) | None => Answer::Events(Err(Refusal::Fenced)),
                }
            }
            Verb::Cancel { number, tenant: first } => {
                let kept = self.find(number).filter(|kept| kept.run.tenant == tenant(first));
                Answer::Run(kept.map(|kept| {
                    if !kept.run.status.is_finished() && kept.run.cancel_requested_at.is_none() {
                        kept.run.cancel_requested_at = Some(now);
                    }
                    Box::new(kept.run.clone())
                }))
            }
        }
    }
}

async fn perform(store: &dyn Store, model: &mut Model, verb: &Verb, now: Timestamp) -> Answer {
    match *verb {
        Verb::Create { number, tenant, starts, label } => {
            Answer::Events(store.create_run(Model::new_run(number, tenant, starts, label)).await.map_err(refusal))
        }
        Verb::ClaimQueued { limit } => Answer::Claims(store.claim_queued(limit, now).await.unwrap()),
        Verb::Load { number, tenant: first } => {
            Answer::Claims(store.load(&tenant(first), id(number)).await.unwrap().into_iter().collect())
        }
        Verb::ClaimInterrupted => Answer::Claims(store.claim_interrupted().await.unwrap()),
        Verb::Step { number, behind, events, then, knows } => {
            let commit = model.commit(number, behind, events, then, knows);
            Answer::Events(store.commit_step(commit).await.map(|done| done.events).map_err(refusal))
        }
        Verb::Cancel { number, tenant: first } => {
            Answer::Run(store.request_cancel(&tenant(first), id(number), now).await.unwrap().map(Box::new))
        }
    }
}

/// Everything that can be read, by every way of reading.
async fn compare_all(store: &dyn Store, model: &Model) {
    let waiting = model.0.iter().filter(|kept| kept.run.status == RunStatus::Queued).count();
    assert_eq!(store.queued().await.unwrap(), waiting as u64);
    for kept in &model.0 {
        let (tenant, id) = (&kept.run.tenant, kept.run.id);
        assert_eq!(store.run(tenant, id).await.unwrap().as_ref(), Some(&kept.run));
        assert_eq!(store.events_after(tenant, id, 0, u32::MAX).await.unwrap(), kept.log);
        assert_eq!(store.transcript(tenant, id).await.unwrap().as_ref(), Some(&kept.spec.input));
    }
    for first in [true, false] {
        for (filter, keeps) in filters() {
            let newest_first = model.0.iter().rev().map(|kept| &kept.run);
            let expected: Vec<Run> =
                newest_first.filter(|run| run.tenant == tenant(first) && keeps(run)).cloned().collect();
            let mut listed = Vec::new();
            loop {
                let before = listed.last().map(|run: &Run| run.id);
                let page = store.list_runs(&tenant(first), &filter, before, 2).await.unwrap();
                if page.is_empty() {
                    break;
                }
                listed.extend(page);
            }
            assert_eq!(listed, expected, "{filter:?}");
        }
    }
}

type Keeps = fn(&Run) -> bool;

fn filters() -> [(RunFilter, Keeps); 3] {
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    [
        (RunFilter::default(), |_| true),
        (RunFilter { status: vec![RunStatusName::Queued, RunStatusName::Aborted], ..RunFilter::default() }, |run| {
            [RunStatusName::Queued, RunStatusName::Aborted].contains(&run.status.name())
        }),
        (RunFilter { metadata: vec![pair("b", "2"), pair("a", "1")], ..RunFilter::default() }, |run| {
            run.metadata.len() == 2
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_verbs_does_what_the_model_does(verbs in verbs()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let database = SqliteFile::with(Durability::Process).await;
            let store = database.store();
            let mut model = Model::default();
            for (n, verb) in verbs.iter().enumerate() {
                let now = at(10_000 + i64::try_from(n).unwrap());
                let answer = perform(&*store, &mut model, verb, now).await;
                assert_eq!(answer, model.apply(verb, now), "{n}: {verb:?}");
            }
            compare_all(&*store, &model).await;
            store.close().await;
        });
    }
}
