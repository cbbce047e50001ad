//! How the program ends: a signal, a soft token, time to drain, a hard token; and the owner of long-lived tasks.
//!
//! The soft token means: accept nothing new, bring what is at work to a safe point. The hard token means: stop now.
//! A second signal ends the program without waiting for anything.

use std::collections::BTreeMap;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::signal::unix::{self, SignalKind};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::domain::text::panic_text;

/// Time for everything to stop after the hard token.
pub const HARD_STOP: Duration = Duration::from_secs(5);

/// A wish of the operating system or of a person that the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// `SIGINT`: Ctrl-C.
    Interrupt,
    /// `SIGTERM`: a service manager.
    Terminate,
}

impl Signal {
    /// The usual name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        }
    }

    /// The exit code a shell expects of a program that this ended: 128 and the signal's number.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Where signals come from.
#[derive(Debug)]
pub enum Signals {
    /// The operating system.
    System {
        /// `SIGINT`
        interrupt: unix::Signal,
        /// `SIGTERM`
        terminate: unix::Signal,
    },
    /// Whoever holds the sender.
    Channel(mpsc::Receiver<Signal>),
}

impl Signals {
    /// Takes the signals over from the operating system's default, which is to end the process.
    pub fn from_system() -> io::Result<Self> {
        Ok(Self::System {
            interrupt: unix::signal(SignalKind::interrupt())?,
            terminate: unix::signal(SignalKind::terminate())?,
        })
    }

    /// The next signal; never returns when none can come any more. Nothing is lost when it is dropped waiting.
    pub async fn recv(&mut self) -> Signal {
        let received = match self {
            Self::System { interrupt, terminate } => tokio::select! {
                received = interrupt.recv() => received.map(|()| Signal::Interrupt),
                received = terminate.recv() => received.map(|()| Signal::Terminate),
            },
            Self::Channel(receiver) => receiver.recv().await,
        };
        match received {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }
}

/// The two tokens and the tasks they stop. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    soft: CancellationToken,
    hard: CancellationToken,
    tasks: Tasks,
}

/// How [`Shutdown::run`] came to its end.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended<T> {
    /// The work returned, and so did every task.
    Finished(T),
    /// A second signal came: leave at once.
    Forced(Signal),
    /// These tasks did not stop, nor perhaps did the work; the names of several alike are repeated.
    Stuck(Vec<&'static str>),
}

enum Stage {
    Serving,
    Draining(Instant),
    Stopping(Instant),
}

impl Shutdown {
    /// Nothing is stopped yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Fires when nothing new may start.
    pub const fn soft(&self) -> &CancellationToken {
        &self.soft
    }

    /// Fires when everything has to stop.
    pub const fn hard(&self) -> &CancellationToken {
        &self.hard
    }

    /// The long-lived tasks.
    pub const fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Runs `work` to its end, then waits for the tasks.
    ///
    /// The first signal, the soft token, or the end of the work starts the drain; when it has lasted `drain`, the
    /// hard token fires, and five seconds later the wait ends.
    pub async fn run<T>(&self, mut signals: Signals, drain: Duration, work: impl Future<Output = T>) -> Ended<T> {
        let work = async {
            let output = work.await;
            self.soft.cancel();
            self.tasks.finished().await;
            output
        };
        tokio::pin!(work);
        let mut stage = Stage::Serving;
        loop {
            let timer = async {
                match stage {
                    Stage::Serving => self.soft.cancelled().await,
                    Stage::Draining(until) | Stage::Stopping(until) => tokio::time::sleep_until(until).await,
                }
            };
            tokio::select! {
                output = &mut work => return Ended::Finished(output),
                signal = signals.recv() => match stage {
                    Stage::Serving => {
                        tracing::info!(
                            signal = signal.name(),
                            "stopping; a second signal ends the program at once"
                        );
                        self.soft.cancel();
                        stage = Stage::Draining(Instant::now() + drain);
                    }
                    Stage::Draining(_) | Stage::Stopping(_) => return Ended::Forced(signal),
                },
                () = timer => match stage {
                    Stage::Serving => stage = Stage::Draining(Instant::now() + drain),
                    Stage::Draining(_) => {
                        tracing::warn!(tasks = ?self.tasks.names(), "the time to drain is over");
                        self.hard.cancel();
                        stage = Stage::Stopping(Instant::now() + HARD_STOP);
                    }
                    Stage::Stopping(_) => return Ended::Stuck(self.tasks.names()),
                },
            }
        }
    }
}

/// Owns long-lived tasks: each has a name, and a panic of one is logged under it. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    running: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

impl Tasks {
    /// Starts a task. It ends by itself when a token says so; dropping the handle leaves it running.
    pub fn spawn<F>(&self, name: &'static str, future: F) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let entry = Entry::new(name, self.running.clone());
        self.tracker.spawn(async move {
            let _entry = entry;
            if let Err(panic) = AssertUnwindSafe(future).catch_unwind().await {
                tracing::error!(task = name, panic = panic_text(&*panic), "a task panicked");
            }
        })
    }

    /// The tasks that have not ended, by name.
    pub fn names(&self) -> Vec<&'static str> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().flat_map(|(name, count)| std::iter::repeat_n(*name, *count)).collect()
    }

    /// Waits until all have ended.
    async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}

/// A running task in the list of names; goes with it, however it ends.
struct Entry {
    name: &'static str,
    running: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

impl Entry {
    fn new(name: &'static str, running: Arc<Mutex<BTreeMap<&'static str, usize>>>) -> Self {
        *running.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
        Self { name, running }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = running.get_mut(self.name) {
            *count -= 1;
            if *count == 0 {
                running.remove(self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    const DRAIN: Duration = Duration::from_secs(30);

    fn signals() -> (mpsc::Sender<Signal>, Signals) {
        let (sender, receiver) = mpsc::channel(4);
        (sender, Signals::Channel(receiver))
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_ends_by_itself_takes_its_tasks_along() {
        let shutdown = Shutdown::new();
        let (_sender, signals) = signals();
        let soft = shutdown.soft().clone();
        shutdown.tasks().spawn("sweeper", async move { soft.cancelled().await });
        assert_eq!(shutdown.run(signals, DRAIN, async { 7 }).await, Ended::Finished(7));
        assert!(!shutdown.hard().is_cancelled());
        assert_eq!(shutdown.tasks().names(), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_signal_is_soft_and_there_is_time_to_drain() {
        let shutdown = Shutdown::new();
        let (sender, signals) = signals();
        let started = Instant::now();
        let soft = shutdown.soft().clone();
        let work = async {
            sender.send(Signal::Terminate).await.unwrap();
            soft.cancelled().await;
            tokio::time::sleep(DRAIN - Duration::from_millis(1)).await;
            "drained"
        };
        assert_eq!(shutdown.run(signals, DRAIN, work).await, Ended::Finished("drained"));
        assert_eq!(started.elapsed(), DRAIN - Duration::from_millis(1));
        assert!(!shutdown.hard().is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn the_hard_token_follows_the_drain() {
        let shutdown = Shutdown::new();
        let (sender, signals) = signals();
        sender.send(Signal::Interrupt).await.unwrap();
        let started = Instant::now();
        let hard = shutdown.hard().clone();
        let ended = shutdown.run(signals, DRAIN, async move { hard.cancelled().await }).await;
        assert_eq!(ended, Ended::Finished(()));
        assert_eq!(started.elapsed(), DRAIN);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_never_stops_is_named() {
        let shutdown = Shutdown::new();
        let (sender, signals) = signals();
        sender.send(Signal::Interrupt).await.unwrap();
        let started = Instant::now();
        shutdown.tasks().spawn("stuck", std::future::pending());
        shutdown.tasks().spawn("stuck", std::future::pending());
        let soft = shutdown.soft().clone();
        shutdown.tasks().spawn("good", async move { soft.cancelled().await });
        let ended = shutdown.run(signals, DRAIN, async {}).await;
        assert_eq!(ended, Ended::Stuck(vec!["stuck", "stuck"]));
        assert_eq!(started.elapsed(), DRAIN + HARD_STOP);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_waits_for_nothing() {
        let shutdown = Shutdown::new();
        let (sender, signals) = signals();
        sender.send(Signal::Terminate).await.unwrap();
        sender.send(Signal::Interrupt).await.unwrap();
        let started = Instant::now();
        let ended = shutdown.run(signals, DRAIN, std::future::pending::<()>()).await;
        assert_eq!(ended, Ended::Forced(Signal::Interrupt));
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_ends_its_task_only() {
        let tasks = Tasks::default();
        let (sender, receiver) = oneshot::channel();
        tasks.spawn("broken", async { panic!("out of paper") }).await.unwrap();
        tasks.spawn("whole", async move { sender.send(1).unwrap() }).await.unwrap();
        assert_eq!(receiver.await, Ok(1));
        assert_eq!(tasks.names(), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_aborted_task_leaves_the_list() {
        let tasks = Tasks::default();
        let handle = tasks.spawn("aborted", std::future::pending());
        assert_eq!(tasks.names(), ["aborted"]);
        handle.abort();
        assert!(handle.await.unwrap_err().is_cancelled());
        assert_eq!(tasks.names(), [""; 0]);
    }
}
