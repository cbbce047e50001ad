//! One outcome per call, whatever the tools do.

use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Barrier, Notify};
use tokio::time::sleep;

use super::super::fake::{FakeTool, NoProgress};
use super::*;
use crate::domain::RunId;

const TIMEOUT: Duration = Duration::from_secs(30);

struct Group {
    ctx: GroupCtx,
    calls: Vec<ReadyCall>,
    _dir: tempfile::TempDir,
}

impl Group {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ctx = GroupCtx {
            run: RunId::new(uuid::Uuid::nil()),
            workspace: Arc::new(Workspace::scratch(&dir.path().join("ws")).unwrap()),
            cancel: CancellationToken::new(),
            timeout: TIMEOUT,
            progress: Arc::new(NoProgress),
        };
        Self { ctx, calls: Vec::new(), _dir: dir }
    }

    fn call<F>(mut self, id: &str, effect: Effect, work: impl Fn(ToolCtx) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<String, ToolError>> + Send + 'static,
    {
        let tool = FakeTool::tool("tool", effect, work);
        self.calls.push(ReadyCall { id: id.to_owned(), tool, arguments: Map::new() });
        self
    }

    fn start(self) -> Execution {
        execute(self.calls, self.ctx)
    }
}

fn executed(id: &str, kind: OutcomeKind, content: &str, duration_ms: u64) -> Executed {
    let outcome = ToolOutcome { call_id: id.to_owned(), kind, content: content.to_owned(), duration_ms };
    Executed { outcome, fatal: None }
}

async fn all(mut execution: Execution) -> Vec<Executed> {
    let mut all = Vec::new();
    while let Some(one) = execution.next().await {
        all.push(one);
    }
    assert_eq!(execution.next().await, None);
    all
}

/// Outcomes in the order of their calls.
async fn by_id(execution: Execution) -> Vec<Executed> {
    let mut all = all(execution).await;
    all.sort_by(|one, other| one.outcome.call_id.cmp(&other.outcome.call_id));
    all
}

const TIMED_OUT: &str = "`tool` was running and did not finish within 30000 ms; it was told to stop and did. Its result is \
                         lost. Its effects may have happened, wholly or in part: look before you repeat it.";
const CANCELLED: &str = "`tool` was running when the run was stopped; it was told to stop and did. Its result is lost. Its \
                         effects may have happened, wholly or in part: look before you repeat it.";
const DROPPED: &str = "`tool` was running when the run was stopped; it was told to stop, did not, and was abandoned. Its \
                       result is lost. It only reads, so it changed nothing.";

#[tokio::test(start_paused = true)]
async fn outcomes_come_as_soon_as_they_exist() {
    let after = |seconds: u64| {
        move |_| async move {
            sleep(Duration::from_secs(seconds)).await;
            Ok(format!("{seconds}"))
        }
    };
    let group = Group::new().call("slow", Effect::ReadOnly, after(3)).call("fast", Effect::ReadOnly, after(1)).call(
        "middle",
        Effect::ReadOnly,
        after(2),
    );
    assert_eq!(
        all(group.start()).await,
        [
            executed("fast", OutcomeKind::Result, "1", 1_000),
            executed("middle", OutcomeKind::Result, "2", 2_000),
            executed("slow", OutcomeKind::Result, "3", 3_000),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn calls_of_a_group_overlap() {
    let barrier = Arc::new(Barrier::new(3));
    let meet = || {
        let barrier = Arc::clone(&barrier);
        move |_| {
            let barrier = Arc::clone(&barrier);
            async move {
                barrier.wait().await;
                Ok(String::new())
            }
        }
    };
    let group = Group::new().call("a", Effect::ReadOnly, meet()).call("b", Effect::ReadOnly, meet()).call(
        "c",
        Effect::ReadOnly,
        meet(),
    );
    let kinds: Vec<_> = all(group.start()).await.iter().map(|one| one.outcome.kind).collect();
    assert_eq!(kinds, [OutcomeKind::Result; 3]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_for_the_model_or_end_the_run() {
    let group = Group::new()
        .call("a", Effect::ReadOnly, |_| async { Err(ToolError::Respond("no such file".to_owned())) })
        .call("b", Effect::ReadOnly, |_| async { Err(ToolError::Fatal("the disk is gone".to_owned())) });
    let fatal = Executed {
        fatal: Some("the disk is gone".to_owned()),
        ..executed("b", OutcomeKind::Error, "the disk is gone", 0)
    };
    assert_eq!(by_id(group.start()).await, [executed("a", OutcomeKind::Error, "no such file", 0), fatal]);
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_one_outcome_and_leaves_the_others_alone() {
    let slow = |_| async {
        sleep(Duration::from_secs(1)).await;
        Ok("fine".to_owned())
    };
    let group = Group::new()
        .call("a", Effect::ReadOnly, slow)
        .call("b", Effect::SideEffect, |_| async { panic!("a secret detail") })
        .call("c", Effect::ReadOnly, slow);
    let text =
        "`tool` failed inside the server. Its effects may have happened, wholly or in part: look before you repeat it.";
    let panicked = Executed {
        fatal: Some("the tool `tool` panicked; the server's log has the details".to_owned()),
        ..executed("b", OutcomeKind::Error, text, 0)
    };
    assert_eq!(
        by_id(group.start()).await,
        [
            executed("a", OutcomeKind::Result, "fine", 1_000),
            panicked,
            executed("c", OutcomeKind::Result, "fine", 1_000)
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_timeout_reaches_the_tool_and_its_late_result_is_refused() {
    let group = Group::new().call("a", Effect::SideEffect, |ctx: ToolCtx| async move {
        ctx.cancel.cancelled().await;
        sleep(Duration::from_millis(500)).await;
        Ok("late".to_owned())
    });
    assert_eq!(all(group.start()).await, [executed("a", OutcomeKind::TimedOut, TIMED_OUT, 30_500)]);
}

#[tokio::test(start_paused = true)]
async fn a_result_at_the_last_moment_counts_and_one_after_it_does_not() {
    let after = |time: Duration| {
        move |_| async move {
            sleep(time).await;
            Ok("done".to_owned())
        }
    };
    let group = Group::new().call("in time", Effect::SideEffect, after(TIMEOUT - Duration::from_millis(1))).call(
        "late",
        Effect::SideEffect,
        after(TIMEOUT + Duration::from_millis(1)),
    );
    assert_eq!(
        all(group.start()).await,
        [
            executed("in time", OutcomeKind::Result, "done", 29_999),
            executed("late", OutcomeKind::TimedOut, TIMED_OUT, 30_001)
        ]
    );
}

/// A turn may hold 128 calls.
#[tokio::test(start_paused = true)]
async fn a_large_group_runs_in_the_order_of_its_calls_and_not_all_at_once() {
    let starts = Arc::new(std::sync::Mutex::new(Vec::new()));
    let began = Instant::now();
    let mut group = Group::new();
    for number in 0..40_u64 {
        let starts = Arc::clone(&starts);
        group = group.call(&format!("{number:02}"), Effect::ReadOnly, move |ctx: ToolCtx| {
            let starts = Arc::clone(&starts);
            async move {
                starts.lock().unwrap().push((number, began.elapsed().as_secs()));
                // The first never ends by itself, and does not stop when its time is up.
                if number == 0 {
                    ctx.cancel.cancelled().await;
                }
                sleep(Duration::from_secs(20)).await;
                Ok(String::new())
            }
        });
    }
    let outcomes = by_id(group.start()).await;
    let began_at = |number| match number {
        0..=15 => 0,
        16..=30 => 20,
        // Takes the place of the first.
        31 => 30,
        _ => 40,
    };
    let expected: Vec<_> = (0..40).map(|number| (number, began_at(number))).collect();
    assert_eq!(*starts.lock().unwrap(), expected);
    let (first, rest) = outcomes.split_first().unwrap();
    assert_eq!((first.outcome.kind, first.outcome.duration_ms), (OutcomeKind::TimedOut, 30_700));
    // Each has its time from its own start: the last ones end long after the time of a call has passed.
    let expected: Vec<_> =
        (1..40).map(|number| executed(&format!("{number:02}"), OutcomeKind::Result, "", 20_000)).collect();
    assert_eq!(rest, expected);
}

#[tokio::test(start_paused = true)]
async fn calls_that_wait_for_their_turn_are_not_started_after_a_cancel() {
    let mut group = Group::new();
    for number in 0..MAX_AT_ONCE + 2 {
        group = group.call(&format!("{number:02}"), Effect::SideEffect, move |ctx: ToolCtx| async move {
            assert!(number < MAX_AT_ONCE, "it was started");
            ctx.cancel.cancelled().await;
            Ok(String::new())
        });
    }
    let cancel = group.ctx.cancel.clone();
    let execution = group.start();
    sleep(Duration::from_secs(1)).await;
    cancel.cancel();
    let text = "`tool` was not started: the run was stopped first. Nothing was executed.";
    let mut expected: Vec<_> = (0..MAX_AT_ONCE)
        .map(|number| executed(&format!("{number:02}"), OutcomeKind::Aborted, CANCELLED, 1_000))
        .collect();
    expected.extend(["16", "17"].map(|id| executed(id, OutcomeKind::Aborted, text, 0)));
    assert_eq!(by_id(execution).await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_tool_knows_its_time_and_can_end_itself_before() {
    let group = Group::new().call("a", Effect::ReadOnly, |ctx: ToolCtx| async move {
        sleep(ctx.timeout - Duration::from_millis(1)).await;
        Ok("what there is so far".to_owned())
    });
    assert_eq!(all(group.start()).await, [executed("a", OutcomeKind::Result, "what there is so far", 29_999)]);
}

#[tokio::test(start_paused = true)]
async fn the_clock_runs_while_nobody_asks() {
    let told = Arc::new(Notify::new());
    let group = Group::new().call("a", Effect::SideEffect, {
        let told = Arc::clone(&told);
        move |ctx: ToolCtx| {
            let told = Arc::clone(&told);
            async move {
                ctx.cancel.cancelled().await;
                told.notify_one();
                Ok(String::new())
            }
        }
    });
    let execution = group.start();
    told.notified().await;
    assert_eq!(all(execution).await, [executed("a", OutcomeKind::TimedOut, TIMED_OUT, 30_000)]);
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_ignores_its_stop_is_dropped_after_the_grace() {
    struct Gone(Arc<AtomicUsize>);
    impl Drop for Gone {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let gone = Arc::new(AtomicUsize::new(0));
    let mut group = Group::new().call("a", Effect::SideEffect, {
        let gone = Arc::clone(&gone);
        move |_| {
            let gone = Gone(Arc::clone(&gone));
            async move {
                let _gone = gone;
                pending().await
            }
        }
    });
    group.ctx.timeout = Duration::from_millis(10);
    let all = all(group.start()).await;
    assert_eq!(gone.load(Ordering::SeqCst), 1, "the outcome came before the tool was gone");
    let text = "`tool` was running and did not finish within 10 ms; it was told to stop, did not, and was abandoned. Its \
                result is lost. Its effects may have happened, wholly or in part: look before you repeat it.";
    assert_eq!(all, [executed("a", OutcomeKind::TimedOut, text, 710)]);
}

/// The time from a stop to the end of a call is one budget, whatever the tool does: a run that is cancelled or past
/// its deadline has to have ended within a second of it.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_call_has_one_budget() {
    let stop = Instant::now();
    let mut ignoring = JoinSet::new();
    ignoring.spawn(pending::<()>());
    assert!(matches!(see_off(&mut ignoring).await, Err(Abandoned::Dropped)));
    assert_eq!(stop.elapsed(), Duration::from_millis(700));

    // On a thread of its own, which it blocks: dropping cannot reach it.
    let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let (started, has_started) = tokio::sync::oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let mut stuck = JoinSet::new();
    stuck.spawn_on(
        async move {
            started.send(()).unwrap();
            released.recv().unwrap();
        },
        other.handle(),
    );
    has_started.await.unwrap();
    let stop = Instant::now();
    assert!(matches!(see_off(&mut stuck).await, Err(Abandoned::Stuck)));
    assert_eq!(stop.elapsed(), Duration::from_millis(850));
    release.send(()).unwrap();
    other.shutdown_background();
}

#[tokio::test(start_paused = true)]
async fn a_timeout_without_end_is_none() {
    let mut group = Group::new().call("a", Effect::ReadOnly, |_| async {
        sleep(Duration::from_secs(1_000_000)).await;
        Ok("done".to_owned())
    });
    group.ctx.timeout = Duration::MAX;
    assert_eq!(all(group.start()).await, [executed("a", OutcomeKind::Result, "done", 1_000_000_000)]);
}

/// pydantic/pydantic-ai#7993, variant A: what has finished keeps its result, only the rest is aborted.
#[tokio::test(start_paused = true)]
async fn cancel_keeps_what_has_finished() {
    let group = Group::new()
        .call("a", Effect::ReadOnly, |_| async { Ok("done".to_owned()) })
        .call("b", Effect::SideEffect, |ctx: ToolCtx| async move {
            ctx.cancel.cancelled().await;
            Ok("late".to_owned())
        })
        .call("c", Effect::ReadOnly, |_| pending());
    let cancel = group.ctx.cancel.clone();
    let mut execution = group.start();
    assert_eq!(execution.next().await, Some(executed("a", OutcomeKind::Result, "done", 0)));
    cancel.cancel();
    assert_eq!(
        all(execution).await,
        [executed("b", OutcomeKind::Aborted, CANCELLED, 0), executed("c", OutcomeKind::Aborted, DROPPED, 700)]
    );
}

/// The same, but the result was there before the cancel and nobody had asked for it yet.
#[tokio::test(start_paused = true)]
async fn cancel_keeps_a_result_nobody_has_asked_for() {
    let group = Group::new().call("a", Effect::ReadOnly, |_| async { Ok("done".to_owned()) }).call(
        "b",
        Effect::ReadOnly,
        |_| pending(),
    );
    let cancel = group.ctx.cancel.clone();
    let execution = group.start();
    sleep(Duration::from_secs(1)).await;
    cancel.cancel();
    assert_eq!(
        all(execution).await,
        [executed("a", OutcomeKind::Result, "done", 0), executed("b", OutcomeKind::Aborted, DROPPED, 1_700)]
    );
}

/// pydantic/pydantic-ai#7993, variant B: none has finished; anthropics/claude-code#86001: none is said not to have run.
#[tokio::test(start_paused = true)]
async fn cancel_of_a_whole_group_answers_every_call() {
    let stop = |ctx: ToolCtx| async move {
        ctx.cancel.cancelled().await;
        Err(ToolError::Respond("interrupted".to_owned()))
    };
    let group = Group::new().call("a", Effect::SideEffect, stop).call("b", Effect::SideEffect, stop);
    let cancel = group.ctx.cancel.clone();
    let execution = group.start();
    sleep(Duration::from_secs(1)).await;
    cancel.cancel();
    assert_eq!(
        by_id(execution).await,
        [executed("a", OutcomeKind::Aborted, CANCELLED, 1_000), executed("b", OutcomeKind::Aborted, CANCELLED, 1_000)]
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_starts_after_a_cancel() {
    let group = Group::new().call("a", Effect::SideEffect, |_| async { panic!("it was started") });
    group.ctx.cancel.cancel();
    let text = "`tool` was not started: the run was stopped first. Nothing was executed.";
    assert_eq!(all(group.start()).await, [executed("a", OutcomeKind::Aborted, text, 0)]);
}

#[tokio::test(start_paused = true)]
async fn dropping_an_execution_stops_its_calls_and_nothing_else() {
    let told = Arc::new(Notify::new());
    let (started, start) = (Arc::new(Notify::new()), CancellationToken::new());
    let mut group = Group::new().call("a", Effect::SideEffect, {
        let (told, started) = (Arc::clone(&told), Arc::clone(&started));
        move |ctx: ToolCtx| {
            struct Tell(Arc<Notify>, CancellationToken);
            impl Drop for Tell {
                fn drop(&mut self) {
                    assert!(self.1.is_cancelled());
                    self.0.notify_one();
                }
            }
            let (tell, started) = (Tell(Arc::clone(&told), ctx.cancel), Arc::clone(&started));
            async move {
                let _tell = tell;
                started.notify_one();
                pending().await
            }
        }
    });
    group.ctx.cancel = start.clone();
    let execution = group.start();
    started.notified().await;
    drop(execution);
    told.notified().await;
    assert!(!start.is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn no_calls_are_no_outcomes() {
    assert_eq!(all(Group::new().start()).await, []);
}
