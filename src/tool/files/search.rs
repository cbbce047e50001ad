//! search_files: lines that match, in many files.

use std::io::{self, Read as _};
use std::sync::Arc;
use std::time::Duration;

use globset::{GlobBuilder, GlobMatcher};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::super::time_to_return;
use super::super::workspace::{Found, Kind};
use super::line::{BUFFER, Lines};
use super::pattern::Pattern;
use super::{SNIFFED, Threads, Tool, ToolCtx, ToolError, built_in, count, here, looks_binary};
use crate::domain::Effect;
use crate::domain::text::shown;

/// Most matching lines of one call.
const MAX_MATCHES: usize = 100;
/// Most bytes of text of one call.
const MAX_TEXT: usize = 20_000;
/// Most Unicode scalar values shown of a line.
const MAX_LINE: usize = 250;
/// Largest file that is searched.
const MAX_FILE_BYTES: u64 = 8 * 1024 * 1024;
/// Most bytes read in one call.
const MAX_BYTES: u64 = 512 * 1024 * 1024;
/// Most files and directories looked at in one call.
const MAX_VISITED: usize = 200_000;
/// Most time of one call.
const MAX_TIME: Duration = Duration::from_secs(20);
/// What a line counts for at least, in bytes, until the next look at the clock.
const LEAST_WORK: usize = 64;
/// Most Unicode scalar values shown of the path of a match; it has to be given to read_file.
const MAX_PATH: usize = 1_000;

const DESCRIPTION: &str = "\
Searches the text files of the workspace, line by line, and returns each matching line as `path:line: text`, sorted by \
path; lines count from 1, and long lines are cut around the match. With `glob` and an empty \
`pattern` it lists the names of files instead.

`pattern` is a regular expression in the syntax of Rust's regex crate (no look-around, no back-references), matched \
within single lines; with `literal` it is plain text. `ignore_case` ignores case. `path` is the directory or file to \
search, the whole workspace when absent. `glob` limits the files: without a slash it is compared with the file's name \
(`*.rs`), with one to its path from the workspace (`src/**/*.rs`).

The last line, in square brackets, says what was searched and what was left out: binary files, files over 8 MiB, what \
cannot be read. Long lines are searched in parts, so a match longer than half a part can be missed; a part has 64 KiB, or \
less for a large pattern but at least 1 KiB, and the last line says so when it happened. `.git` is searched only when `path` leads into it, and symbolic links are not followed. It stops after \
100 matches, 512 MiB or 20 seconds, or when the time of the call is nearly over, and says so; then narrow the pattern, the glob or the path. It fails for a pattern or \
glob that cannot be read, for a pattern that is too large when compiled, and for a `path` that does not exist or leads out of the workspace. To see more around a match \
use read_file with `start_line`.";

/// The tool.
pub(super) fn tool(threads: Threads) -> Arc<dyn Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "maxLength": 2_000,
                "description": "What to find in a line; empty: list the files that fit `glob`."},
            "literal": {"type": "boolean", "description": "Take `pattern` as plain text; false when absent."},
            "ignore_case": {"type": "boolean", "description": "Ignore case; false when absent."},
            "path": {"type": "string", "description": "Where to search, relative to the workspace; `.` when absent."},
            "glob": {"type": "string", "maxLength": 500, "description": "Only these files: `*.rs`, `src/**/*.md`."}
        },
        "required": ["pattern"],
        "additionalProperties": false
    });
    built_in("search_files", DESCRIPTION, parameters, Effect::ReadOnly, threads, search)
}

#[derive(Deserialize)]
struct Args {
    pattern: String,
    #[serde(default)]
    literal: bool,
    #[serde(default)]
    ignore_case: bool,
    #[serde(default = "here")]
    path: String,
    glob: Option<String>,
}

fn search(ctx: &ToolCtx, args: Args) -> Result<String, ToolError> {
    Search::new(ctx, Query::new(&args)?).run(&args.path)
}

/// What to look for.
struct Query {
    wanted: Wanted,
    files: Option<(GlobMatcher, Against)>,
}

/// What to look for in a file.
enum Wanted {
    /// Nothing: the file itself is what is wanted.
    Names,
    /// Lines that match.
    Lines(Box<Pattern>),
}

/// What a glob is compared with.
enum Against {
    Name,
    Path,
}

impl Query {
    fn new(args: &Args) -> Result<Self, ToolError> {
        let wanted = if args.pattern.is_empty() {
            if args.glob.is_none() {
                return Err(ToolError::Respond(
                    "Give a `pattern` to find, or a `glob` to list files by name.".to_owned(),
                ));
            }
            Wanted::Names
        } else {
            let source = if args.literal { regex::escape(&args.pattern) } else { args.pattern.clone() };
            let pattern = Pattern::new(&source, args.ignore_case).map_err(|error| {
                ToolError::Respond(format!(
                    "`pattern` is not a usable regular expression: {error}. Set `literal` to search for it as plain text."
                ))
            })?;
            Wanted::Lines(Box::new(pattern))
        };
        let files = match &args.glob {
            None => None,
            Some(glob) => {
                let matcher = GlobBuilder::new(glob)
                    .literal_separator(true)
                    .build()
                    .map_err(|error| ToolError::Respond(format!("`glob` cannot be read: {error}.")))?
                    .compile_matcher();
                Some((matcher, if glob.contains('/') { Against::Path } else { Against::Name }))
            }
        };
        Ok(Self { wanted, files })
    }

    fn wants(&self, found: &Found) -> bool {
        match &self.files {
            None => true,
            Some((glob, Against::Path)) => glob.is_match(&found.path),
            Some((glob, Against::Name)) => found.path.file_name().is_some_and(|name| glob.is_match(name)),
        }
    }
}

/// Why a search ended before everything was searched.
#[derive(Clone, Copy)]
enum Stop {
    Matches,
    Bytes,
    Time,
    Entries,
    Cancelled,
}

/// A search at work.
struct Search<'a> {
    ctx: &'a ToolCtx,
    query: Query,
    time: Duration,
    until: Instant,
    text: String,
    matches: usize,
    searched: usize,
    bytes: u64,
    binary: usize,
    huge: usize,
    unreadable: usize,
    /// Lines that were searched in parts.
    parted: usize,
    /// Bytes searched since the last look at the clock.
    unwatched: usize,
}

impl<'a> Search<'a> {
    fn new(ctx: &'a ToolCtx, query: Query) -> Self {
        // A search that outlasts its call would lose what it has found.
        let time = MAX_TIME.min(time_to_return(ctx.timeout));
        Self {
            ctx,
            query,
            time,
            until: Instant::now() + time,
            text: String::new(),
            matches: 0,
            searched: 0,
            bytes: 0,
            binary: 0,
            huge: 0,
            unreadable: 0,
            parted: 0,
            unwatched: 0,
        }
    }

    fn run(mut self, path: &str) -> Result<String, ToolError> {
        let workspace = Arc::clone(&self.ctx.workspace);
        let mut walk = workspace.walk(path)?;
        let mut buffer = vec![0; BUFFER];
        let mut stop = None;
        let mut visited = 0;
        while let Some(found) = walk.next() {
            visited += 1;
            stop = self.stop().or((visited > MAX_VISITED).then_some(Stop::Entries));
            if stop.is_some() {
                break;
            }
            match found.kind {
                Kind::Directory if found.path.file_name().is_some_and(|name| name == ".git") => {
                    walk.leave_out(&found.path);
                }
                Kind::File if self.query.wants(&found) => {
                    stop = self.file(&found, &mut buffer);
                    if stop.is_some() {
                        break;
                    }
                }
                Kind::File | Kind::Directory | Kind::Link | Kind::Fifo | Kind::Socket | Kind::Device | Kind::Other => {}
            }
        }
        self.unreadable += walk.unreadable;
        if matches!(stop, Some(Stop::Cancelled)) {
            return Err(ToolError::Respond("The search was stopped before it was finished.".to_owned()));
        }
        Ok(self.report(stop))
    }

    fn stop(&self) -> Option<Stop> {
        if self.ctx.cancel.is_cancelled() {
            Some(Stop::Cancelled)
        } else if self.matches >= MAX_MATCHES || self.text.len() >= MAX_TEXT {
            Some(Stop::Matches)
        } else if self.bytes >= MAX_BYTES {
            Some(Stop::Bytes)
        } else if Instant::now() >= self.until {
            Some(Stop::Time)
        } else {
            None
        }
    }

    fn file(&mut self, found: &Found, buffer: &mut [u8]) -> Option<Stop> {
        let window = match &self.query.wanted {
            Wanted::Names => {
                self.searched += 1;
                self.matches += 1;
                self.text.push_str(&shown(&found.path.to_string_lossy(), MAX_PATH));
                self.text.push('\n');
                return None;
            }
            Wanted::Lines(pattern) => pattern.window(),
        };
        // What is not read has no lines; the search goes on.
        let Ok((file, metadata)) = self.ctx.workspace.found(found) else {
            self.unreadable += 1;
            return None;
        };
        if metadata.len() > MAX_FILE_BYTES {
            self.huge += 1;
            return None;
        }
        let mut lines = Lines::new(file.take(MAX_FILE_BYTES), buffer, window);
        let stop = self.lines(found, &mut lines);
        self.bytes += lines.bytes();
        stop.unwrap_or_else(|_| {
            self.unreadable += 1;
            None
        })
    }

    /// Searches the lines of a file.
    fn lines(&mut self, found: &Found, lines: &mut Lines<'_, impl io::Read>) -> io::Result<Option<Stop>> {
        if looks_binary(lines.start(SNIFFED)?) {
            self.binary += 1;
            return Ok(None);
        }
        self.searched += 1;
        while let Some(piece) = lines.next()? {
            let Wanted::Lines(pattern) = &mut self.query.wanted else { return Ok(None) };
            self.unwatched += piece.span.len().max(LEAST_WORK);
            self.parted += usize::from(piece.is_first_of_many());
            let is_due = self.unwatched >= pattern.window();
            if let Some(hit) = pattern.find(&piece) {
                let path = shown(&found.path.to_string_lossy(), MAX_PATH);
                let line = around(piece.text, hit.start(), hit.end());
                self.text.push_str(&format!("{path}:{}: {line}\n", piece.number));
                self.matches += 1;
                lines.leave_out_rest()?;
                if self.matches >= MAX_MATCHES || self.text.len() >= MAX_TEXT {
                    return Ok(Some(Stop::Matches));
                }
            }
            if is_due {
                self.unwatched = 0;
                let stop = self.stop();
                if stop.is_some() {
                    return Ok(stop);
                }
            }
        }
        Ok(None)
    }

    fn report(mut self, stop: Option<Stop>) -> String {
        let mut notes = vec![match self.query.wanted {
            Wanted::Names => count(self.matches, "file"),
            Wanted::Lines(_) => {
                format!("{} in {} searched", count(self.matches, "match"), count(self.searched, "file"))
            }
        }];
        let skipped: Vec<String> =
            [(self.binary, "binary"), (self.huge, "over 8 MiB"), (self.unreadable, "unreadable")]
                .iter()
                .filter(|(number, _)| *number > 0)
                .map(|(number, what)| format!("{number} {what}"))
                .collect();
        if !skipped.is_empty() {
            notes.push(format!("left out: {}", skipped.join(", ")));
        }
        if let (Wanted::Lines(pattern), 1..) = (&self.query.wanted, self.parted) {
            notes.push(format!(
                "{} searched in parts, where a match over {} bytes can be missed",
                count(self.parted, "long line"),
                pattern.window() / 2
            ));
        }
        let why = match stop {
            None => None,
            Some(Stop::Matches) => Some("at the most matches of one search".to_owned()),
            Some(Stop::Bytes) => Some("after 512 MiB".to_owned()),
            Some(Stop::Time) if self.time == MAX_TIME => Some("after 20 seconds".to_owned()),
            Some(Stop::Time) => {
                Some(format!("after {} ms, as the time of the call is nearly over", self.time.as_millis()))
            }
            Some(Stop::Entries) => Some("after 200000 files and directories".to_owned()),
            Some(Stop::Cancelled) => Some("because the call was cancelled".to_owned()),
        };
        if let Some(why) = why {
            notes.push(format!("stopped {why}, there may be more: narrow the pattern, the glob or the path"));
        }
        self.text.push_str(&format!("[{}]\n", notes.join("; ")));
        self.text
    }
}

/// A line, cut around a match when it is long.
fn around(line: &[u8], start: usize, end: usize) -> String {
    let text = String::from_utf8_lossy(line);
    if text.chars().count() <= MAX_LINE {
        return shown(&text, MAX_LINE);
    }
    let before = String::from_utf8_lossy(line.get(..start).unwrap_or_default()).into_owned();
    let rest = String::from_utf8_lossy(line.get(start..).unwrap_or_default()).into_owned();
    let hit = String::from_utf8_lossy(line.get(start..end).unwrap_or_default()).chars().count();
    let lead = MAX_LINE.saturating_sub(hit) / 2;
    let kept: String = before.chars().skip(before.chars().count().saturating_sub(lead)).collect();
    let mark = if kept.len() < before.len() { "…" } else { "" };
    format!("{mark}{}", shown(&format!("{kept}{rest}"), MAX_LINE))
}
