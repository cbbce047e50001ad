//! list_dir: what a directory holds.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::json;

use super::super::workspace::{Entry, Kind, shown_path};
use super::{Threads, Tool, ToolCtx, ToolError, built_in, count, here};
use crate::domain::Effect;
use crate::domain::text::shown;

/// Most entries of one call.
const MAX_ENTRIES: usize = 200;
/// Most Unicode scalar values shown of a name; no name has more.
const MAX_NAME: usize = 255;

const DESCRIPTION: &str = "\
Lists what a directory of the workspace holds, one entry a line, sorted by name: `src/` is a directory, `a.txt  120 \
bytes` a file, `b -> a.txt` a symbolic link, `p (named pipe)` something that cannot be used. Hidden entries are shown.

`path` is relative to the workspace; without it the workspace itself is listed. Only the directory itself is listed, not \
what its directories hold. At most 200 entries are shown; when there are more, the last line says how many and how to go \
on with `after`. It fails for files (use read_file), for paths that do not exist and for paths that lead out of the \
workspace. To find files anywhere below a directory use search_files.";

/// The tool.
pub(super) fn tool(threads: Threads) -> Arc<dyn Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The directory, relative to the workspace; `.` when absent."},
            "after": {"type": "string", "description": "Show only names that sort after this one."}
        },
        "additionalProperties": false
    });
    built_in("list_dir", DESCRIPTION, parameters, Effect::ReadOnly, threads, list)
}

#[derive(Deserialize)]
struct Args {
    #[serde(default = "here")]
    path: String,
    #[serde(default)]
    after: String,
}

fn list(ctx: &ToolCtx, args: Args) -> Result<String, ToolError> {
    let listing = ctx.workspace.list(&args.path, &args.after, MAX_ENTRIES)?;
    let path = shown_path(&args.path);
    let mut text = match (listing.entries.len(), args.after.is_empty()) {
        (0, true) => format!("[{path}: empty]\n"),
        (0, false) => format!("[{path}: nothing after `{}`]\n", shown(&args.after, MAX_NAME)),
        (number, _) => format!("[{path}: {}]\n", count(number, "entry")),
    };
    for entry in &listing.entries {
        text.push_str(&line(entry));
        text.push('\n');
    }
    if listing.left_out > 0
        && let Some(last) = listing.entries.last()
    {
        let more = if listing.endless { "at least " } else { "" };
        let last = shown(&last.name.to_string_lossy(), MAX_NAME);
        text.push_str(&format!("[{more}{} more; go on with after=\"{last}\"]\n", listing.left_out));
    }
    Ok(text)
}

fn line(entry: &Entry) -> String {
    let name = shown(&entry.name.to_string_lossy(), MAX_NAME);
    let mut line = match entry.kind {
        Kind::Directory => format!("{name}/"),
        Kind::File => match entry.size {
            Some(size) => format!("{name}  {size} bytes"),
            None => format!("{name}  (gone meanwhile)"),
        },
        Kind::Link => match &entry.target {
            Some(target) => format!("{name} -> {}", shown(&target.to_string_lossy(), MAX_NAME)),
            None => format!("{name} (symbolic link)"),
        },
        kind @ (Kind::Fifo | Kind::Socket | Kind::Device | Kind::Other) => format!("{name} ({kind})"),
    };
    if entry.name.to_str().is_none() {
        line.push_str("  (the name is not UTF-8 and cannot be given to a tool)");
    }
    line
}
