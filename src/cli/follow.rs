//! Shows a run from its feed until it ends, and what a signal does meanwhile.

use super::exit::{Code, Exit};
use super::feed::{Executor, Feed, Heard};
use super::output::Output;
use super::render::{FinalRun, Renderer};
use crate::domain::RunId;
use crate::shutdown::{Signal, Signals};

/// What the first signal does to the run; a second one always ends the program.
pub(super) enum OnSignal<'a> {
    /// The run is aborted, and its end awaited.
    Abort(&'a Executor),
    /// The program ends and the run goes on.
    Leave,
}

/// How a stream came to its end.
pub(super) enum Followed {
    /// With the end of the run.
    Ended(FinalRun),
    /// There is nothing after the cursor: the run had ended before.
    Past,
    /// A signal ended the program.
    Signal(Signal),
    /// Nobody reads the output any more.
    Closed,
}

/// Shows a run until it ends.
pub(super) async fn follow(
    run: RunId,
    feed: &mut Feed,
    on_signal: OnSignal<'_>,
    signals: &mut Signals,
    renderer: &mut Renderer,
    output: &mut Output<'_>,
) -> anyhow::Result<Followed> {
    let mut aborting = false;
    loop {
        tokio::select! {
            heard = feed.next() => {
                let shown = match heard? {
                    Some(Heard::Frame(frame)) => renderer.frame(&frame),
                    Some(Heard::Trouble(what)) => renderer.trouble(&what),
                    None => return Ok(Followed::Past),
                };
                output.print(&shown.text)?;
                if let Some(end) = shown.end {
                    return Ok(Followed::Ended(end));
                }
                if output.is_closed() && matches!(on_signal, OnSignal::Leave) {
                    return Ok(Followed::Closed);
                }
            }
            signal = signals.recv() => match &on_signal {
                OnSignal::Abort(executor) if !aborting => {
                    aborting = true;
                    tokio::select! {
                        cancelled = executor.cancel(run) => cancelled?,
                        second = signals.recv() => return Ok(Followed::Signal(second)),
                    }
                }
                OnSignal::Abort(_) | OnSignal::Leave => return Ok(Followed::Signal(signal)),
            },
        }
    }
}

/// The exit of a program that showed a run to its end.
pub(super) const fn exit(run: &FinalRun) -> Exit {
    Exit::Code(Code::of(run.status))
}
