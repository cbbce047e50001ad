//! read_file: a text file, or a part of it.

use std::io::{self, BufRead as _, BufReader, Read, Seek as _, SeekFrom};
use std::sync::Arc;

use cap_std::fs::File;
use serde::Deserialize;
use serde_json::json;

use super::super::utf8::{cut_end, cut_start};
use super::super::workspace::{AccessError, shown_path};
use super::{SNIFFED, Threads, Tool, ToolCtx, ToolError, built_in, count, looks_binary, whole};
use crate::domain::Effect;

/// Most lines of one call.
const MAX_LINES: u64 = 5_000;
/// Most bytes of one call.
const MAX_BYTES: u64 = 60_000;
/// Most bytes when the call does not say how much: fits the default cut of tool results.
const DEFAULT_BYTES: u64 = 6_000;
/// Largest file read by lines, since finding a line means reading everything before it.
const MAX_SCANNED: u64 = 64 * 1024 * 1024;

const DESCRIPTION: &str = "\
Reads a text file of the workspace and returns its text unchanged, without line numbers.

`path` is relative to the workspace. Without a range the file is read from its start. Choose lines with `start_line` \
(the first is 1) and `line_count` (up to 5000), or bytes with `start_byte` (the first is 0) and `byte_count` (up to \
60000); lines and bytes cannot be mixed. Without a count at most about 6000 bytes are returned, with one at most 60000. \
The first line of the result, in square brackets, is not part of the file: it names the part shown and how large the \
whole is. When there is more, a last line in square brackets says how to go on.

Bytes that are not UTF-8 are shown as U+FFFD, and a note says so. It fails for binary files (with a zero byte near their \
start), for directories (use list_dir), pipes and devices, for paths that do not exist or lead out of the workspace, and \
for lines of files over 64 MiB (use bytes). To find a place in a file or a file by its content use search_files.";

/// The tool.
pub(super) fn tool(threads: Threads) -> Arc<dyn Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The file, relative to the workspace: `src/main.rs`."},
            "start_line": {"type": "integer", "minimum": 1, "description": "First line to show; 1 when absent."},
            "line_count": {"type": "integer", "minimum": 1, "maximum": MAX_LINES, "description": "How many lines."},
            "start_byte": {"type": "integer", "minimum": 0, "description": "First byte to show, instead of lines."},
            "byte_count": {"type": "integer", "minimum": 1, "maximum": MAX_BYTES, "description": "How many bytes."}
        },
        "required": ["path"],
        "additionalProperties": false
    });
    built_in("read_file", DESCRIPTION, parameters, Effect::ReadOnly, threads, read)
}

#[derive(Deserialize)]
struct Args {
    path: String,
    #[serde(default, deserialize_with = "whole")]
    start_line: Option<u64>,
    #[serde(default, deserialize_with = "whole")]
    line_count: Option<u64>,
    #[serde(default, deserialize_with = "whole")]
    start_byte: Option<u64>,
    #[serde(default, deserialize_with = "whole")]
    byte_count: Option<u64>,
}

fn read(ctx: &ToolCtx, args: Args) -> Result<String, ToolError> {
    let by_bytes = args.start_byte.is_some() || args.byte_count.is_some();
    if by_bytes && (args.start_line.is_some() || args.line_count.is_some()) {
        return Err(ToolError::Respond(
            "Give either `start_line` and `line_count` or `start_byte` and `byte_count`, not both.".to_owned(),
        ));
    }
    let (mut file, metadata) = ctx.workspace.file(&args.path)?;
    let path = shown_path(&args.path);
    let size = metadata.len();
    let failed = |source| ToolError::from(AccessError::Io { path: path.clone(), source });
    if starts_binary(&mut file).map_err(failed)? {
        return Err(ToolError::Respond(format!(
            "`{path}` is a binary file of {size} bytes; read_file shows text only. Nothing here can show its content."
        )));
    }
    if by_bytes {
        bytes(file, &path, size, &args).map_err(failed)?
    } else if size > MAX_SCANNED {
        Err(ToolError::Respond(format!(
            "`{path}` has {size} bytes, too many to count its lines. Read it by `start_byte` and `byte_count`, or find the \
             place with search_files."
        )))
    } else {
        lines(ctx, file, &path, &args).map_err(failed)?
    }
}

/// Looks at the start of a file and goes back to it.
fn starts_binary(file: &mut File) -> io::Result<bool> {
    let mut start = Vec::new();
    file.by_ref().take(SNIFFED as u64).read_to_end(&mut start)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(looks_binary(&start))
}

/// A part of a file by bytes, moved to the borders of characters.
fn bytes(mut file: File, path: &str, size: u64, args: &Args) -> io::Result<Result<String, ToolError>> {
    let start = args.start_byte.unwrap_or(0);
    let wanted = args.byte_count.unwrap_or(DEFAULT_BYTES).min(MAX_BYTES);
    if start > 0 && start >= size {
        return Ok(Err(ToolError::Respond(format!(
            "`{path}` has {size} bytes; `start_byte` {start} is past its end."
        ))));
    }
    file.seek(SeekFrom::Start(start))?;
    let mut content = Vec::new();
    file.take(wanted).read_to_end(&mut content)?;
    // A range may begin inside a character: up to three bytes belong to the one before.
    let skipped = if start == 0 { 0 } else { cut_start(&content) };
    content.drain(..skipped);
    let from = start.saturating_add(length(skipped));
    if from.saturating_add(length(content.len())) < size {
        let cut = cut_end(&content);
        // Never so much that nothing is left and the reader stands still.
        if cut < content.len() {
            content.truncate(content.len() - cut);
        }
    }
    let end = from.saturating_add(length(content.len()));
    let mut notes = Vec::new();
    if end < size {
        notes.push(format!("{} bytes left; go on with start_byte={end}", size - end));
    }
    let header = format!("{path}: bytes {from} to {end} of {size}");
    Ok(Ok(present(&header, content, notes)))
}

/// A part of a file by lines. Goes through the whole file, to say how many lines it has.
fn lines(ctx: &ToolCtx, file: File, path: &str, args: &Args) -> io::Result<Result<String, ToolError>> {
    let first = args.start_line.unwrap_or(1);
    let wanted = args.line_count.unwrap_or(MAX_LINES).min(MAX_LINES);
    let budget = if args.line_count.is_some() { MAX_BYTES } else { DEFAULT_BYTES };
    let mut reader = BufReader::new(file);
    let mut part = Part::default();
    let (mut line, mut at) = (1_u64, 0_u64);
    let mut ends_in_newline = true;
    loop {
        if ctx.cancel.is_cancelled() {
            return Ok(Err(ToolError::Respond("Stopped while reading.".to_owned())));
        }
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() || at > MAX_SCANNED {
            break;
        }
        let taken = buffer.iter().position(|byte| *byte == b'\n').map_or(buffer.len(), |end| end + 1);
        let piece = buffer.get(..taken).unwrap_or_default();
        ends_in_newline = piece.last() == Some(&b'\n');
        if line >= first && line - first < wanted {
            part.add(piece, line, at, budget);
        }
        at += length(taken);
        line += u64::from(ends_in_newline);
        reader.consume(taken);
    }
    let total = if ends_in_newline { line - 1 } else { line };
    let size = at;
    if total == 0 && first == 1 {
        return Ok(Ok(format!("[{path}: empty, 0 bytes]\n")));
    }
    if first > total {
        let lines = count(usize::try_from(total).unwrap_or(usize::MAX), "line");
        return Ok(Err(ToolError::Respond(format!("`{path}` has {lines}; `start_line` {first} is past its end."))));
    }
    let mut notes = Vec::new();
    let last = match part.cut {
        Some(Cut::At { line, .. }) if line > first => line - 1,
        Some(Cut::Inside { line, .. } | Cut::At { line, .. }) => line,
        None => total.min(first.saturating_add(wanted - 1)),
    };
    match part.cut {
        Some(Cut::Inside { line, byte }) => notes.push(format!(
            "line {line} is long and was cut at byte {byte} of the file; go on with start_byte={byte}, or with the next line: \
             start_line={}",
            line + 1
        )),
        Some(Cut::At { .. }) | None if last < total => {
            let left = count(usize::try_from(total - last).unwrap_or(usize::MAX), "line");
            notes.push(format!("{left} left; go on with start_line={}", last + 1));
        }
        Some(Cut::At { .. }) | None => {}
    }
    if last == total && !ends_in_newline && part.cut.is_none() {
        notes.push("the last line has no newline at its end".to_owned());
    }
    if part.content.windows(2).any(|pair| pair == b"\r\n") {
        notes.push("lines end in CR LF".to_owned());
    }
    let header = format!("{path}: lines {first} to {last} of {total}, {size} bytes in all");
    Ok(Ok(present(&header, part.content, notes)))
}

/// What is shown of the lines.
#[derive(Default)]
struct Part {
    content: Vec<u8>,
    /// Where the line being read began in `content`.
    line_start: usize,
    line: u64,
    cut: Option<Cut>,
}

/// Where the budget ended.
#[derive(Clone, Copy)]
enum Cut {
    /// Before a line.
    At { line: u64 },
    /// Inside a line that does not fit even alone, before a byte of the file.
    Inside { line: u64, byte: u64 },
}

impl Part {
    /// Takes a piece of a line that stands at byte `at` of the file.
    fn add(&mut self, piece: &[u8], line: u64, at: u64, budget: u64) {
        if self.cut.is_some() {
            return;
        }
        if line != self.line {
            (self.line, self.line_start) = (line, self.content.len());
        }
        let room = usize::try_from(budget).unwrap_or(usize::MAX).saturating_sub(self.content.len());
        if piece.len() <= room {
            self.content.extend_from_slice(piece);
        } else if self.line_start > 0 {
            self.content.truncate(self.line_start);
            self.cut = Some(Cut::At { line });
        } else {
            self.content.extend_from_slice(piece.get(..room).unwrap_or_default());
            let cut = cut_end(&self.content);
            self.content.truncate(self.content.len() - cut);
            self.cut = Some(Cut::Inside { line, byte: at + length(room) - length(cut) });
        }
    }
}

fn present(header: &str, content: Vec<u8>, mut notes: Vec<String>) -> String {
    let text = match String::from_utf8(content) {
        Ok(text) => text,
        Err(error) => {
            notes.push("some bytes are not UTF-8 and are shown as U+FFFD".to_owned());
            String::from_utf8_lossy(error.as_bytes()).into_owned()
        }
    };
    let gap = if text.is_empty() || text.ends_with('\n') || notes.is_empty() { "" } else { "\n" };
    let notes = if notes.is_empty() { String::new() } else { format!("[{}]\n", notes.join("; ")) };
    format!("[{header}]\n{text}{gap}{notes}")
}

fn length(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
