//! Any sequence of verbs against a model that keeps everything in plain vectors.

use hames::domain::{
    EncodedBody, Event, InboxItem, InboxNumber, Run, RunId, RunSpec, RunStatus, RunStatusName, TenantId, Timestamp,
};
use hames::store::{ClaimedRun, Erasure, Former, NewRun, Post, RunFilter, StepCommit, Store, StoreError};
use proptest::prelude::*;

use super::contract::Database;
use super::sample::{aborted, at, completed, id, labels, mark, parked, queued, running, step, waiting};

/// One call. Runs are named by a number that may name none.
#[derive(Clone, Debug)]
pub(crate) enum Verb {
    Create { number: u32, tenant: bool, starts: bool, label: bool },
    Claim { limit: u32 },
    Load { number: u32, tenant: bool },
    Reclaim { number: u32, tenant: bool },
    Release,
    Step { number: u32, stale: Stale, events: usize, then: Then, knows: bool, reads: bool },
    Cancel { number: u32, tenant: bool },
    Post { number: u32, tenant: bool },
    Erase { number: u32, tenant: bool },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Then {
    Run,
    Park,
    Wait,
    Complete,
    Abort,
}

/// What the writer of a step does not know.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stale {
    Nothing,
    Claims(u64),
    Events(u64),
}

pub(crate) fn verbs() -> impl Strategy<Value = Vec<Verb>> {
    let number = || 1..8_u32;
    let named = || (number(), any::<bool>());
    let then = prop_oneof![
        6 => Just(Then::Run),
        1 => Just(Then::Park),
        1 => Just(Then::Wait),
        1 => Just(Then::Complete),
        1 => Just(Then::Abort)
    ];
    let stale = prop_oneof![
        6 => Just(Stale::Nothing),
        1 => (1..3_u64).prop_map(Stale::Claims),
        1 => (1..3_u64).prop_map(Stale::Events)
    ];
    let verb = prop_oneof![
        4 => (number(), any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(number, tenant, starts, label)| Verb::Create { number, tenant, starts, label }),
        3 => (0..4_u32).prop_map(|limit| Verb::Claim { limit }),
        2 => named().prop_map(|(number, tenant)| Verb::Load { number, tenant }),
        1 => named().prop_map(|(number, tenant)| Verb::Reclaim { number, tenant }),
        1 => Just(Verb::Release),
        7 => (number(), stale, 0..5_usize, then, any::<bool>(), any::<bool>()).prop_map(
            |(number, stale, events, then, knows, reads)| Verb::Step { number, stale, events, then, knows, reads }
        ),
        2 => named().prop_map(|(number, tenant)| Verb::Cancel { number, tenant }),
        2 => named().prop_map(|(number, tenant)| Verb::Post { number, tenant }),
        1 => named().prop_map(|(number, tenant)| Verb::Erase { number, tenant }),
    ];
    proptest::collection::vec(verb, 1..40)
}

fn tenant(first: bool) -> TenantId {
    TenantId::new(if first { "acme" } else { "other" })
}

fn said(now: Timestamp) -> InboxItem {
    InboxItem::Message { content: vec![hames::domain::Part::Text { text: format!("at {now:?}") }] }
}

struct Kept {
    run: Run,
    spec: RunSpec,
    state: Option<String>,
    log: Vec<Event>,
    inbox: Vec<(InboxNumber, InboxItem)>,
    newest_item: InboxNumber,
    /// Whether this process has it at work.
    held: bool,
}

impl Kept {
    fn append(&mut self, time: Timestamp, bodies: &[EncodedBody]) -> Vec<Event> {
        let first = self.run.last_seq + 1;
        let events: Vec<Event> = (first..)
            .zip(bodies)
            .map(|(seq, body)| Event { run: self.run.id, seq, time, body: body.clone() })
            .collect();
        self.run.last_seq += events.len() as u64;
        self.log.extend(events.clone());
        events
    }

    fn is_running(&self) -> bool {
        self.run.status.name() == RunStatusName::Running
    }

    fn is_free(&self) -> bool {
        (self.is_running() && !self.held) || self.run.status.name() == RunStatusName::Queued
    }

    fn claim(&mut self, now: Timestamp) -> ClaimedRun {
        let former = if self.is_running() { Former::LetGo } else { Former::None };
        let timeout = std::time::Duration::from_millis(self.run.limits.timeout_ms);
        match &self.run.status {
            RunStatus::Queued { paused: None } => {
                self.run.status = RunStatus::Running { started_at: now, deadline_at: now.plus(timeout) };
            }
            RunStatus::Queued { paused: Some(paused) } => {
                let left = std::time::Duration::from_millis(paused.left_ms);
                self.run.status = RunStatus::Running { started_at: paused.started_at, deadline_at: now.plus(left) };
            }
            RunStatus::Running { .. } | RunStatus::Waiting { .. } | RunStatus::Finished { .. } => {}
        }
        self.take(former)
    }

    fn take(&mut self, former: Former) -> ClaimedRun {
        self.run.generation += 1;
        self.held = true;
        ClaimedRun { former, ..self.loaded() }
    }

    fn loaded(&self) -> ClaimedRun {
        ClaimedRun {
            run: self.run.clone(),
            spec: self.spec.clone(),
            state: self.state.clone(),
            history: Vec::new(),
            transcript: Vec::new(),
            inbox: self.newest_item,
            former: if self.is_running() { Former::LetGo } else { Former::None },
        }
    }

    /// Does a step, or says why not.
    fn step(&mut self, commit: StepCommit) -> Result<Vec<Event>, Refusal> {
        if self.run.generation != commit.generation
            || self.run.status.is_finished()
            || self.run.last_seq != commit.after
        {
            return Err(Refusal::Fenced);
        }
        if commit.status.is_finished() && self.run.cancel_requested_at != commit.cancel_requested_at {
            return Err(Refusal::CancelRequested);
        }
        if commit.status.is_finished() && commit.inbox_read != self.newest_item {
            return Err(Refusal::Unread);
        }
        self.run.status = commit.status;
        self.run.steps = commit.steps;
        self.run.tool_calls = commit.tool_calls;
        self.run.usage = commit.usage;
        self.run.crashes = commit.crashes;
        self.state = commit.state;
        self.inbox.retain(|(number, _)| *number > commit.inbox_read);
        self.held &= self.is_running();
        if [RunStatusName::Queued, RunStatusName::Waiting].contains(&self.run.status.name()) {
            self.run.generation += 1;
        }
        Ok(self.append(commit.time, &commit.events))
    }
}

/// What was refused, without the database's own words.
#[derive(Debug, PartialEq)]
enum Refusal {
    Fenced,
    CancelRequested,
    Unread,
    Failed,
}

/// What a verb answered, so that model and store can be compared.
#[derive(Debug, PartialEq)]
enum Answer {
    Events(Result<Vec<Event>, Refusal>),
    Claims(Vec<ClaimedRun>),
    Run(Option<Box<Run>>),
    Erasure(Erasure),
    Done,
}

fn refusal(error: StoreError) -> Refusal {
    match error {
        StoreError::Fenced { .. } => Refusal::Fenced,
        StoreError::Failed(_) => Refusal::Failed,
        StoreError::CancelRequested { .. } => Refusal::CancelRequested,
        StoreError::Unread { .. } => Refusal::Unread,
        StoreError::Unavailable(_)
        | StoreError::KeyTaken(_)
        | StoreError::ThreadBusy { .. }
        | StoreError::NoPredecessor { .. }
        | StoreError::Corrupt { .. }
        | StoreError::Unusable(_) => panic!("{error}"),
    }
}

#[derive(Default)]
struct Model {
    runs: Vec<Kept>,
    erased: Vec<(TenantId, u32)>,
}

impl Model {
    fn find(&mut self, number: u32) -> Option<&mut Kept> {
        self.runs.iter_mut().find(|kept| kept.run.id == id(number))
    }

    fn find_of(&mut self, number: u32, first_tenant: bool) -> Option<&mut Kept> {
        self.find(number).filter(|kept| kept.run.tenant == tenant(first_tenant))
    }

    fn new_run(number: u32, first_tenant: bool, starts: bool, label: bool) -> NewRun {
        let mut new = if starts { running(number) } else { queued(number) };
        new.run.tenant = tenant(first_tenant);
        new.run.metadata = if label { labels(&[("a", "1"), ("b", "2")]) } else { labels(&[("a", "2")]) };
        new
    }

    /// The step a worker would commit that holds the run, or held it some claims ago.
    fn commit(&mut self, verb: &Verb, now: Timestamp) -> StepCommit {
        let Verb::Step { number, stale, events, then, knows, reads } = *verb else { panic!("{verb:?} is no step") };
        let kept = self.find(number);
        let (generation, after, newest, asked) = kept.map_or((0, 0, 0, None), |kept| {
            (kept.run.generation, kept.run.last_seq, kept.newest_item, kept.run.cancel_requested_at)
        });
        let (generation, after) = match stale {
            Stale::Nothing => (generation, after),
            Stale::Claims(behind) => (generation.saturating_sub(behind), after),
            Stale::Events(behind) => (generation, after.saturating_sub(behind)),
        };
        // Every step that leaves the run at rest tells of it; by the time of that it differs from every other.
        let events = if matches!(then, Then::Run) { events } else { events.max(1) };
        let bodies = (0..events).map(|n| mark(u32::try_from(n).unwrap())).collect();
        let commit = step(&running(number), generation, bodies);
        let status = match then {
            Then::Run => commit.status.clone(),
            Then::Park => parked(),
            Then::Wait => waiting(50),
            Then::Complete => completed(),
            Then::Abort => aborted(),
        };
        let (inbox_read, cancel_requested_at) = (if reads { newest } else { 0 }, asked.filter(|_| knows));
        StepCommit { status, after, time: now, inbox_read, cancel_requested_at, ..commit }
    }

    fn apply(&mut self, verb: &Verb, now: Timestamp) -> Answer {
        match *verb {
            Verb::Create { number, tenant, starts, label } => {
                if self.find(number).is_some() {
                    return Answer::Events(Err(Refusal::Failed));
                }
                let new = Self::new_run(number, tenant, starts, label);
                let mut kept = Kept {
                    run: new.run,
                    spec: new.spec,
                    state: new.state,
                    log: Vec::new(),
                    inbox: Vec::new(),
                    newest_item: 0,
                    held: starts,
                };
                let events = kept.append(kept.run.created_at, &new.events);
                self.runs.push(kept);
                self.runs.sort_by_key(|kept| kept.run.id);
                Answer::Events(Ok(events))
            }
            Verb::Claim { limit } => {
                let mut free: Vec<&mut Kept> = self.runs.iter_mut().filter(|kept| kept.is_free()).collect();
                free.sort_by_key(|kept| !kept.is_running());
                Answer::Claims(free.into_iter().take(limit as usize).map(|kept| kept.claim(now)).collect())
            }
            Verb::Load { number, tenant } => {
                Answer::Claims(self.find_of(number, tenant).map(|kept| kept.loaded()).into_iter().collect())
            }
            Verb::Reclaim { number, tenant } => {
                let kept = self.find_of(number, tenant).filter(|kept| kept.is_running());
                Answer::Claims(kept.map(|kept| kept.take(Former::LetGo)).into_iter().collect())
            }
            Verb::Release => {
                self.runs.iter_mut().for_each(|kept| kept.held = false);
                Answer::Done
            }
            Verb::Step { number, .. } => {
                let commit = self.commit(verb, now);
                Answer::Events(self.find(number).map_or(Err(Refusal::Fenced), |kept| kept.step(commit)))
            }
            Verb::Cancel { number, tenant } => Answer::Run(self.find_of(number, tenant).map(|kept| {
                if !kept.run.status.is_finished() && kept.run.cancel_requested_at.is_none() {
                    kept.run.cancel_requested_at = Some(now);
                }
                Box::new(kept.run.clone())
            })),
            Verb::Post { number, tenant } => Answer::Run(self.find_of(number, tenant).map(|kept| {
                if !kept.run.status.is_finished() {
                    kept.newest_item += 1;
                    kept.inbox.push((kept.newest_item, said(now)));
                }
                Box::new(kept.run.clone())
            })),
            Verb::Erase { number, tenant: first } => {
                let erased = self.erased.contains(&(tenant(first), number));
                Answer::Erasure(match self.find_of(number, first).map(|kept| kept.run.status.is_finished()) {
                    Some(false) => Erasure::Active,
                    Some(true) => {
                        self.runs.retain(|kept| kept.run.id != id(number));
                        self.erased.push((tenant(first), number));
                        Erasure::Erased
                    }
                    None if erased => Erasure::Erased,
                    None => Erasure::Unknown,
                })
            }
        }
    }
}

async fn perform(store: &dyn Store, model: &mut Model, verb: &Verb, now: Timestamp) -> Answer {
    match *verb {
        Verb::Create { number, tenant, starts, label } => {
            let created = store.create_run(Model::new_run(number, tenant, starts, label)).await;
            Answer::Events(created.map(|created| created.events).map_err(refusal))
        }
        Verb::Claim { limit } => Answer::Claims(store.claim(limit, now).await.unwrap()),
        Verb::Load { number, tenant: first } => {
            Answer::Claims(store.load(&tenant(first), id(number)).await.unwrap().into_iter().collect())
        }
        Verb::Reclaim { number, tenant: first } => {
            Answer::Claims(store.reclaim(&tenant(first), id(number)).await.unwrap().into_iter().collect())
        }
        Verb::Release => {
            let held: Vec<RunId> = store.held().await.unwrap().into_iter().map(|(_, id)| id).collect();
            store.release(&held).await.unwrap();
            Answer::Done
        }
        Verb::Step { .. } => {
            let commit = model.commit(verb, now);
            Answer::Events(store.commit_step(commit).await.map(|done| done.events).map_err(refusal))
        }
        Verb::Cancel { number, tenant: first } => {
            Answer::Run(store.request_cancel(&tenant(first), id(number), now).await.unwrap().map(Box::new))
        }
        Verb::Post { number, tenant: first } => {
            let post = Post { tenant: tenant(first), run: id(number), item: said(now), key: None };
            Answer::Run(store.post(post).await.unwrap().map(Box::new))
        }
        Verb::Erase { number, tenant: first } => {
            Answer::Erasure(store.erase(&tenant(first), id(number), now).await.unwrap())
        }
    }
}

/// Everything that can be read, by every way of reading.
async fn compare_all(store: &dyn Store, model: &Model) {
    let queued = model.runs.iter().filter(|kept| kept.is_free()).count();
    assert_eq!(store.backlog().await.unwrap().ready, queued as u64);
    let mut held = store.held().await.unwrap();
    held.sort_by_key(|(_, run)| *run);
    let kept = model.runs.iter().filter(|kept| kept.held).map(|kept| (kept.run.tenant.clone(), kept.run.id));
    assert_eq!(held, kept.collect::<Vec<_>>());
    for kept in &model.runs {
        let (tenant, id) = (&kept.run.tenant, kept.run.id);
        assert_eq!(store.run(tenant, id).await.unwrap().as_ref(), Some(&kept.run));
        assert_eq!(store.events_after(tenant, id, 0, u32::MAX).await.unwrap(), kept.log);
        assert_eq!(store.transcript(tenant, id).await.unwrap().as_ref(), Some(&kept.spec.input));
        assert_eq!(store.inbox(id, 0).await.unwrap(), kept.inbox);
    }
    for first in [true, false] {
        for (filter, keeps) in filters() {
            let newest_first = model.runs.iter().rev().map(|kept| &kept.run);
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

/// Does what the verbs say with an empty database and with the model.
pub(crate) async fn check<D: Database>(verbs: &[Verb]) {
    if !D::is_here().await {
        return;
    }
    let database = D::fresh().await;
    let store = database.store();
    let mut model = Model::default();
    for (n, verb) in verbs.iter().enumerate() {
        let now = at(10_000 + i64::try_from(n).unwrap());
        let answer = perform(&*store, &mut model, verb, now).await;
        assert_eq!(answer, model.apply(verb, now), "{n}: {verb:?}");
    }
    compare_all(&*store, &model).await;
    store.close().await;
}

/// Makes a test of it.
macro_rules! model_test {
    ($cases:literal, $database:ty) => {
        proptest::proptest! {
            #![proptest_config(proptest::prelude::ProptestConfig { cases: $cases, ..Default::default() })]

            #[test]
            fn any_sequence_of_verbs_does_what_the_model_does(verbs in $crate::store::model::verbs()) {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on($crate::store::model::check::<$database>(&verbs));
            }
        }
    };
}
pub(crate) use model_test;
