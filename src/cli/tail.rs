//! `hames tail`: the events of a run on a server, across broken connections.

use clap::Args;
use reqwest::Url;

use super::exit::{self, Code, Exit};
use super::feed::Feed;
use super::follow::{self, Followed, OnSignal};
use super::output::Output;
use super::remote::{Remote, parse_url};
use super::render::Renderer;
use crate::domain::RunId;
use crate::event::Cursor;
use crate::shutdown::Signals;

/// Which run, and where.
#[derive(Debug, Args)]
#[command(after_help = exit::table())]
pub(super) struct TailArgs {
    /// The run.
    run: RunId,
    /// The server.
    #[arg(long, value_parser = parse_url, default_value = "http://127.0.0.1:8080")]
    url: Url,
    /// Show what follows this event: SEQ, or SEQ.OFFSET inside a message; everything when absent.
    #[arg(long, value_name = "CURSOR", value_parser = parse_cursor)]
    after: Option<String>,
    /// Print each frame of the event stream as one line {"id":…,"event":…,"data":…}. The data are as they were sent,
    /// whole and in their order; the id is a cursor for `tail --after`, null where there is none.
    #[arg(long)]
    json: bool,
}

fn parse_cursor(text: &str) -> Result<String, String> {
    match text.parse::<Cursor>() {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

pub(super) async fn tail(args: TailArgs, mut signals: Signals) -> anyhow::Result<Exit> {
    let TailArgs { run, url, after, json } = args;
    let remote = Remote::new(url)?;
    let mut feed = Feed::Remote(Box::new(remote.follow(run, after)));
    let mut stdout = std::io::stdout();
    let mut renderer = Renderer::new(json, &stdout);
    let mut output = Output::new(&mut stdout);
    match follow::follow(run, &mut feed, OnSignal::Leave, &mut signals, &mut renderer, &mut output).await? {
        Followed::Ended(run) => Ok(follow::exit(&run)),
        Followed::Past => {
            let run = remote.get(run).await?;
            output.print(&renderer.summary(&run))?;
            Ok(follow::exit(&run))
        }
        Followed::Signal(signal) => Ok(Exit::Signal(signal)),
        Followed::Closed => Ok(Exit::Code(Code::Done)),
    }
}
