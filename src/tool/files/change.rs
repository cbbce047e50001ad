//! write_file and edit_file: whole files and exact replacements.

use std::sync::Arc;

use memchr::memmem;
use serde::Deserialize;
use serde_json::json;

use super::super::workspace::{Replaced, shown_path};
use super::{Threads, Tool, ToolCtx, ToolError, built_in, count};
use crate::domain::Effect;
use crate::domain::text::shown;

/// Most places counted.
const MAX_FOUND: usize = 1_000;
/// Most places named when a text is found more than once.
const MAX_PLACES: usize = 5;
/// Most lines compared to find one that is like a text that was not found.
const MAX_COMPARED: usize = 5_000;
/// Longest line compared, in bytes.
const MAX_COMPARED_LINE: usize = 400;
/// Most Unicode scalar values shown of a line.
const MAX_LINE: usize = 200;

const WRITE_DESCRIPTION: &str = "\
Writes a whole text file of the workspace: creates it, or replaces all of its content. The result says which of the two \
happened and how large the file is.

`path` is relative to the workspace; its directory must exist. `content` becomes the whole file, byte for byte; end it \
with a newline where text files should. The file is put in place in one step: nobody sees half of it, and a failed call \
changes nothing. A replaced file keeps its permissions; a new one can be read by everybody and written by the server.

It fails on a read-only workspace, for files over the workspace's size limit, for new files when the workspace is full, \
for paths that lead out of the workspace, and when the path is a directory, a symbolic link, a pipe or a device. To change \
a part of a file use edit_file, which needs only that part.";

const EDIT_DESCRIPTION: &str = "\
Replaces one piece of text in a file of the workspace by another. `old_text` must be in the file exactly once, with the \
same spaces and line ends: copy it from read_file, with enough lines around it to make it unique. `new_text` takes its \
place, byte for byte; empty, it deletes. The result names the lines that were changed.

When `old_text` is not in the file or is there more than once nothing is changed, and the error says how often and where, \
or which line is most like it. It fails on a read-only workspace, for files that do not exist, files over the workspace's \
size limit, paths that lead out of the workspace, directories, symbolic links, pipes and devices, and when somebody else \
changes the file at the same time. To create a file or replace all of it use write_file.";

/// The tool that writes whole files. Writing the same content again changes nothing more, so it may be repeated.
pub(super) fn write_file(threads: Threads) -> Arc<dyn Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The file, relative to the workspace: `notes/today.md`."},
            "content": {"type": "string", "description": "All of the file."}
        },
        "required": ["path", "content"],
        "additionalProperties": false
    });
    built_in("write_file", WRITE_DESCRIPTION, parameters, Effect::Idempotent, threads, write)
}

#[derive(Deserialize)]
struct WriteArgs {
    path: String,
    content: String,
}

fn write(ctx: &ToolCtx, args: WriteArgs) -> Result<String, ToolError> {
    let Replaced { before } = ctx.workspace.write(&args.path, args.content.as_bytes(), &ctx.cancel)?;
    let (path, size) = (shown_path(&args.path), args.content.len());
    let lines = count(args.content.lines().count(), "line");
    Ok(match before {
        None => format!("Created `{path}`: {size} bytes, {lines}."),
        Some(before) => format!("Replaced `{path}`: {size} bytes, {lines}; it had {before} bytes before."),
    })
}

/// The tool that replaces a text in a file. A repeat could hit another place, so it is never repeated by itself.
pub(super) fn edit_file(threads: Threads) -> Arc<dyn Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The file, relative to the workspace: `src/main.rs`."},
            "old_text": {"type": "string", "minLength": 1, "description": "What is in the file exactly once."},
            "new_text": {"type": "string", "description": "What takes its place."}
        },
        "required": ["path", "old_text", "new_text"],
        "additionalProperties": false
    });
    built_in("edit_file", EDIT_DESCRIPTION, parameters, Effect::SideEffect, threads, edit)
}

#[derive(Deserialize)]
struct EditArgs {
    path: String,
    old_text: String,
    new_text: String,
}

fn edit(ctx: &ToolCtx, args: EditArgs) -> Result<String, ToolError> {
    if args.old_text == args.new_text {
        return Err(ToolError::Respond("`old_text` and `new_text` are the same; nothing was changed.".to_owned()));
    }
    ctx.workspace.edit(&args.path, &ctx.cancel, |content| replace_once(&args, content))
}

/// The changed content and what to tell, or why nothing was changed. Bytes that are not UTF-8 stay as they are.
fn replace_once(args: &EditArgs, content: Vec<u8>) -> Result<(Vec<u8>, String), ToolError> {
    let path = shown_path(&args.path);
    let (old, new) = (args.old_text.as_bytes(), args.new_text.as_bytes());
    let places = find_all(&content, old);
    let [at] = places.as_slice() else {
        let why = match places.len() {
            0 => format!("`old_text` is not in `{path}`; nothing was changed. {}", near(&content, &args.old_text)),
            number => {
                let times = if number < MAX_FOUND { format!("{number} times") } else { "very often".to_owned() };
                let lines: Vec<String> =
                    places.iter().take(MAX_PLACES).map(|at| line_of(&content, *at).to_string()).collect();
                let more = if number > MAX_PLACES { ", …" } else { "" };
                format!(
                    "`old_text` is {times} in `{path}` (at lines {}{more}); nothing was changed. Add lines before or \
                     after it until it is there once.",
                    lines.join(", ")
                )
            }
        };
        return Err(ToolError::Respond(why));
    };
    let mut changed = Vec::with_capacity(content.len() - old.len() + new.len());
    changed.extend_from_slice(content.get(..*at).unwrap_or_default());
    changed.extend_from_slice(new);
    changed.extend_from_slice(content.get(at + old.len()..).unwrap_or_default());
    let told = format!(
        "Edited `{path}` at line {}: {} replaced by {}; the file has {} bytes now.",
        line_of(&content, *at),
        count(args.old_text.lines().count(), "line"),
        count(args.new_text.lines().count(), "line"),
        changed.len()
    );
    Ok((changed, told))
}

/// Where a text begins, places that overlap included: a choice between them would be a guess.
fn find_all(content: &[u8], text: &[u8]) -> Vec<usize> {
    let finder = memmem::Finder::new(text);
    let mut places: Vec<usize> = Vec::new();
    while places.len() < MAX_FOUND {
        let from = places.last().map_or(0, |last| last + 1);
        match content.get(from..).and_then(|rest| finder.find(rest)) {
            Some(at) => places.push(from + at),
            None => break,
        }
    }
    places
}

/// The number of the line a byte stands in, from 1.
fn line_of(content: &[u8], at: usize) -> usize {
    1 + content.iter().take(at).filter(|byte| **byte == b'\n').count()
}

/// What in the file is most like a text that is not in it.
fn near(content: &[u8], text: &str) -> String {
    let file = String::from_utf8_lossy(content);
    if !text.contains('\r') && file.contains("\r\n") && file.replace("\r\n", "\n").contains(text) {
        return "The file's lines end in CR LF, and `old_text` has LF only: use \\r\\n.".to_owned();
    }
    let Some(wanted) = text.lines().map(str::trim).find(|line| !line.is_empty()) else {
        return "It holds only white space; take more of the text around it.".to_owned();
    };
    let wanted: String = wanted.chars().take(MAX_COMPARED_LINE).collect();
    if let Some((index, line)) = file.lines().enumerate().find(|(_, line)| line.trim() == wanted) {
        return format!(
            "Line {} has its first line, so the difference is in white space or in what follows: `{}`.",
            index + 1,
            shown(line, MAX_LINE)
        );
    }
    let alike = file
        .lines()
        .enumerate()
        .take(MAX_COMPARED)
        .filter(|(_, line)| line.len() <= MAX_COMPARED_LINE && !line.trim().is_empty())
        .map(|(index, line)| (strsim::sorensen_dice(line.trim(), &wanted), index, line))
        .max_by(|(one, ..), (other, ..)| one.total_cmp(other));
    match alike {
        Some((score, index, line)) if score >= 0.5 => {
            format!("The line most like its first is {}: `{}`.", index + 1, shown(line, MAX_LINE))
        }
        _ => "No line is like its first; read the file again.".to_owned(),
    }
}
