//! What every database has to do for the verbs of [`Store`]. A database runs the whole of it with
//! [`contract_suite`].

mod claim;
mod erase;
mod inbox;
mod key;
mod read;
mod thread;
mod wait;
mod write;

use std::sync::Arc;

use hames::domain::{EncodedBody, Event, Generation, Run, RunId, RunStatus, Timestamp};
use hames::store::{ClaimedRun, Created, Former, NewRun, StepCommit, Store, StoreError};

pub(crate) use self::claim::*;
pub(crate) use self::erase::*;
pub(crate) use self::inbox::*;
pub(crate) use self::key::*;
pub(crate) use self::read::*;
pub(crate) use self::thread::*;
pub(crate) use self::wait::*;
pub(crate) use self::write::*;

/// An empty database for one test.
#[async_trait::async_trait]
pub(crate) trait Database: Send + Sync + Sized {
    /// Whether there can be one.
    async fn is_here() -> bool {
        true
    }

    /// A new one.
    async fn fresh() -> Self;

    /// Its open store.
    fn store(&self) -> Arc<dyn Store>;

    /// Lets go of the store without closing it, and opens it again as another process, late enough that the runs of
    /// the former one are free.
    async fn crash(&mut self);
}

/// Makes a test of each part of the contract.
macro_rules! contract_suite {
    ($database:ty) => {
        $crate::store::contract::contract_suite!(@ $database:
            a_created_run_reads_back,
            a_run_that_starts_at_once_is_not_in_the_queue,
            the_same_id_is_not_stored_twice,
            another_tenant_sees_nothing,
            a_step_stores_everything_together,
            an_end_is_final,
            a_run_can_end_in_the_queue,
            an_old_generation_is_refused,
            a_step_without_events_moves_the_run,
            events_are_read_in_pages,
            parallel_steps_number_without_gaps,
            a_step_that_is_handed_in_again_is_taken_once,
            a_step_that_knows_other_events_is_refused,
            a_refused_step_leaves_others_whole,
            any_text_reads_back_byte_for_byte,
            a_huge_result_reads_back,
            a_message_with_text_and_calls_is_one_event,
            results_are_read_in_the_order_of_the_calls,
            the_oldest_is_claimed_first,
            a_claimed_run_brings_everything_along,
            parallel_claims_never_share_a_run,
            a_run_is_loaded_without_being_taken,
            a_run_that_nobody_can_go_on_with_is_ended,
            runs_of_a_process_that_is_gone_are_claimed_first,
            runs_that_were_let_go_are_claimed_at_once,
            a_step_says_how_often_its_run_was_taken_over_in_vain,
            a_parked_run_goes_on_with_the_time_it_had,
            a_cancel_request_keeps_its_first_instant,
            a_running_run_is_taken_from_its_holder,
            a_waiting_run_is_in_nobody_s_hands,
            waiting_runs_are_due,
            of_those_who_go_on_from_a_wait_one_wins,
            an_inbox_keeps_its_order_until_it_is_read,
            what_is_not_read_keeps_a_run_from_its_end,
            a_refused_step_leaves_the_inbox,
            new_limits_are_in_the_inbox_and_in_the_run,
            labels_are_replaced,
            a_key_gives_one_run,
            racing_creates_with_one_key_make_one_run,
            a_key_is_its_tenant_s_and_grows_old,
            a_step_and_a_post_can_have_a_key,
            a_run_continues_its_thread,
            a_busy_thread_refuses_queues_or_interrupts,
            racing_creates_of_a_thread_make_one_active_run,
            a_run_continues_the_one_it_names,
            a_run_waits_for_its_predecessor,
            an_erased_run_leaves_only_that_it_was_there,
            old_runs_are_swept,
            a_list_is_newest_first_and_in_pages,
            a_list_can_be_filtered,
            what_was_acknowledged_outlives_a_crash,
            a_closed_store_refuses_work,
        );
    };
    (@ $database:ty: $($name:ident),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $name() {
                if <$database as $crate::store::contract::Database>::is_here().await {
                    $crate::store::contract::$name::<$database>().await;
                }
            }
        )*
    };
}
pub(crate) use contract_suite;

/// The events that storing `bodies` from number `first` on gives.
fn numbered(new: &NewRun, first: u64, time: Timestamp, bodies: &[EncodedBody]) -> Vec<Event> {
    let number = |(seq, body): (u64, &EncodedBody)| Event { run: new.run.id, seq, time, body: body.clone() };
    (first..).zip(bodies).map(number).collect()
}

/// The run as it is read after it was stored.
fn stored(new: &NewRun) -> Run {
    Run { last_seq: new.events.len() as u64, ..new.run.clone() }
}

/// The run as it is read after a step.
fn after(run: Run, commit: &StepCommit) -> Run {
    Run {
        status: commit.status.clone(),
        steps: commit.steps,
        tool_calls: commit.tool_calls,
        usage: commit.usage,
        crashes: commit.crashes,
        last_seq: run.last_seq + commit.events.len() as u64,
        ..run
    }
}

fn claimed(new: &NewRun, now: Timestamp) -> ClaimedRun {
    let run = Run {
        generation: 1,
        status: RunStatus::Running { started_at: now, deadline_at: now.plus(std::time::Duration::from_secs(60)) },
        ..stored(new)
    };
    ClaimedRun { state: None, ..held(new, run) }
}

/// The run in the hands of a worker, with what it was stored with.
fn held(new: &NewRun, run: Run) -> ClaimedRun {
    ClaimedRun {
        run,
        spec: new.spec.clone(),
        state: new.state.clone(),
        history: Vec::new(),
        transcript: Vec::new(),
        inbox: 0,
        former: Former::None,
    }
}

/// The answer to storing it.
fn created(new: &NewRun) -> Created {
    let events = numbered(new, 1, new.run.created_at, &new.events);
    Created { run: stored(new), events, interrupted: Vec::new() }
}

fn ids(claims: &[ClaimedRun]) -> Vec<RunId> {
    claims.iter().map(|claim| claim.run.id).collect()
}

async fn create(store: &Arc<dyn Store>, new: &NewRun) {
    store.create_run(new.clone()).await.unwrap();
}

async fn run(store: &Arc<dyn Store>, new: &NewRun) -> Option<Run> {
    store.run(&new.run.tenant, new.run.id).await.unwrap()
}

async fn events(store: &Arc<dyn Store>, new: &NewRun) -> Vec<Event> {
    store.events_after(&new.run.tenant, new.run.id, 0, u32::MAX).await.unwrap()
}

#[track_caller]
fn is_fenced<T: std::fmt::Debug>(result: Result<T, StoreError>, new: &NewRun, refused: Generation) {
    match result {
        Err(StoreError::Fenced { run, generation }) => assert_eq!((run, generation), (new.run.id, refused)),
        other => panic!("expected a refusal, got {other:?}"),
    }
}
