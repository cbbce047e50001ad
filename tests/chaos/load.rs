//! A steady stream of runs: as many as wanted live at the same time, until it is told to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::client::{Client, Log};

/// How the stream flows.
#[derive(Clone, Debug)]
pub(crate) struct Flow {
    /// What its keys start with.
    pub(crate) name: String,
    /// Runs in all, at least.
    pub(crate) runs: usize,
    /// Runs at the same time.
    pub(crate) live: usize,
    /// How long the model waits before each piece.
    pub(crate) delay: Duration,
    /// When clients give up.
    pub(crate) until: Instant,
}

/// A stream that flows.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    ended: Arc<AtomicUsize>,
    task: JoinHandle<Log>,
}

impl Load {
    pub(crate) fn start(client: Client, flow: Flow) -> Self {
        let (stop, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let task = tokio::spawn(flow_through(client, flow, Arc::clone(&stop), Arc::clone(&ended)));
        Self { stop, ended, task }
    }

    /// Runs that have ended so far.
    pub(crate) fn ended(&self) -> usize {
        self.ended.load(Ordering::Relaxed)
    }

    /// Makes no new runs beyond the least number, and waits for the end of all.
    pub(crate) async fn finish(self) -> Log {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

async fn flow_through(client: Client, flow: Flow, stop: Arc<AtomicBool>, ended: Arc<AtomicUsize>) -> Log {
    let (mut log, mut at_work, mut made) = (Log::default(), JoinSet::new(), 0);
    loop {
        while at_work.len() < flow.live && (made < flow.runs || !stop.load(Ordering::Relaxed)) {
            made += 1;
            let (client, key, delay, until) = (client.clone(), format!("{}-{made}", flow.name), flow.delay, flow.until);
            at_work.spawn(async move { client.live_through(&key, delay, until).await });
        }
        match at_work.join_next().await {
            Some(told) => {
                log.add(told.unwrap());
                ended.fetch_add(1, Ordering::Relaxed);
            }
            None => return log,
        }
    }
}
