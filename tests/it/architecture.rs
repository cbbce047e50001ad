//! What the code has to keep to: who imports whom, how long files are, and words that have no place here.
//!
//! `ARCHITECTURE.md` says why. A module may import itself, and what its line of [`IMPORTS`] names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use syn::visit::Visit;

/// Module, and what it may import. `name::{A, B}` allows these items only.
const IMPORTS: [(&str, &[&str]); 17] = [
    ("domain", &[]),
    ("time", &["domain"]),
    ("config", &["domain"]),
    ("tls", &[]),
    ("telemetry", &["config", "domain", "tls"]),
    ("shutdown", &["domain"]),
    ("agent", &["domain"]),
    ("provider", &["config", "domain", "time", "tls"]),
    ("tool", &["config", "domain", "time"]),
    ("store", &["config", "domain"]),
    ("event", &["domain", "store"]),
    ("run", &["agent", "config", "domain", "event", "provider", "shutdown", "store", "telemetry", "time", "tool"]),
    (
        "http",
        &[
            "config",
            "domain",
            "event",
            "provider::{Catalog, catalog}",
            "run",
            "store",
            "telemetry",
            "time",
            "tool::{Registry, Tool, registry}",
        ],
    ),
    (
        "app",
        &[
            "agent",
            "config",
            "domain",
            "event",
            "http",
            "provider",
            "run",
            "shutdown",
            "store",
            "telemetry",
            "time",
            "tool",
        ],
    ),
    (
        "cli",
        &[
            "app",
            "config",
            "domain",
            "event",
            "http::{openapi_yaml}",
            "run",
            "shutdown",
            "store",
            "telemetry",
            "time",
            "tls",
            "tool::{supervise}",
        ],
    ),
    ("lib", &[]),
    ("main", &["cli", "tool::{supervise}"]),
];

/// Who may see the whole of the settings; every other constructor takes its own section.
const WHOLE_CONFIG: [&str; 3] = ["config", "app", "cli"];

/// Most lines of a source file without its tests.
const MAX_LINES: usize = 600;

/// Words that speak of how a text came to be, or of work that is not done.
const BANNED: [&str; 11] = [
    concat!("as an", " AI"),
    concat!("Cl", "aude"),
    concat!("ChatGPT", " wrote"),
    concat!("helper", " agent"),
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("todo", "!("),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("HA", "CK"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file under a folder of the project, in order.
fn files(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

fn rust_files(folder: &str) -> impl Iterator<Item = (String, String)> {
    files(folder).into_iter().filter(|path| path.extension().is_some_and(|ext| ext == "rs")).map(|path| {
        let text = fs::read_to_string(&path).unwrap();
        (path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned(), text)
    })
}

/// The path of a file's module: `src/config/load.rs` is `[config, load]`.
fn module_of(file: &str) -> Vec<String> {
    let path = file.strip_prefix("src/").unwrap().strip_suffix(".rs").unwrap();
    let mut module: Vec<_> = path.split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| last == "mod") {
        module.pop();
    }
    module
}

fn is_test_file(file: &str) -> bool {
    file.ends_with("_tests.rs") || file.ends_with("/fake.rs")
}

/// Collects the paths of a file that lead into this crate, as `[module, item, …]`.
struct Paths {
    /// The module the visitor stands in.
    module: Vec<String>,
    found: BTreeSet<Vec<String>>,
}

impl Paths {
    fn of(file: &str, text: &str) -> BTreeSet<Vec<String>> {
        let mut paths = Self { module: module_of(file), found: BTreeSet::new() };
        if paths.module == ["main"] || paths.module == ["lib"] {
            paths.module.clear();
        }
        paths.visit_file(&syn::parse_file(text).unwrap_or_else(|error| panic!("{file}: {error}")));
        paths.found
    }

    /// Notes a path if it starts in this crate: `crate::…`, `hames::…`, or `super::…` up to the root.
    fn note(&mut self, segments: &[String]) {
        let Some((first, mut rest)) = segments.split_first() else { return };
        let mut module = match first.as_str() {
            "crate" | "hames" => Vec::new(),
            "self" => self.module.clone(),
            "super" => self.module.iter().take(self.module.len().saturating_sub(1)).cloned().collect(),
            _ => return,
        };
        while let [next, after @ ..] = rest
            && next == "super"
        {
            module.pop();
            rest = after;
        }
        module.extend_from_slice(rest);
        self.found.insert(module);
    }

    fn use_tree(&mut self, before: &mut Vec<String>, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.use_tree(before, &path.tree);
                before.pop();
            }
            syn::UseTree::Name(name) => self.use_leaf(before, &name.ident),
            syn::UseTree::Rename(rename) => self.use_leaf(before, &rename.ident),
            syn::UseTree::Glob(_) => self.note(before),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.use_tree(before, tree)),
        }
    }

    fn use_leaf(&mut self, before: &mut Vec<String>, name: &syn::Ident) {
        if name == "self" {
            return self.note(before);
        }
        before.push(name.to_string());
        self.note(before);
        before.pop();
    }
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Ident>().is_ok_and(|condition| condition == "test")
    })
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            self.module.push(item.ident.to_string());
            syn::visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_for_tests(&item.attrs) {
            self.use_tree(&mut Vec::new(), &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.note(&segments);
        syn::visit::visit_path(self, path);
    }

    /// The arguments of a macro are not parsed: every `crate::…` in them counts.
    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        let text = item.tokens.to_string().replace(" :: ", "::");
        for start in text.match_indices("crate::").map(|(start, _)| start) {
            let path: String =
                text[start..].chars().take_while(|c| c.is_alphanumeric() || matches!(c, '_' | ':')).collect();
            self.note(&path.split("::").map(str::to_owned).collect::<Vec<_>>());
        }
        syn::visit::visit_macro(self, item);
    }
}

/// Whether a rule such as `tool::{Registry, registry}` or `domain` allows a path.
fn allows(rule: &str, path: &[String]) -> bool {
    let (module, items) = match rule.split_once("::") {
        Some((module, items)) => (module, Some(items.trim_matches(['{', '}']))),
        None => (rule, None),
    };
    path.first().is_some_and(|first| first == module)
        && items.is_none_or(|items| path.get(1).is_some_and(|item| items.split(", ").any(|allowed| allowed == item)))
}

#[test]
fn modules_import_only_what_is_below_them() {
    let mut wrong = Vec::new();
    for (file, text) in rust_files("src").filter(|(file, _)| !is_test_file(file)) {
        let from = module_of(&file)[0].clone();
        let Some((_, rules)) = IMPORTS.iter().find(|(module, _)| *module == from) else {
            wrong.push(format!("{file}: the module `{from}` has no line in IMPORTS"));
            continue;
        };
        for path in Paths::of(&file, &text) {
            let itself = path.first().is_none_or(|first| *first == from);
            if !itself && !rules.iter().any(|rule| allows(rule, &path)) {
                wrong.push(format!("{file}: `{from}` may not import {}", path.join("::")));
            }
            let whole = path.first().is_some_and(|first| first == "config")
                && path.get(1).is_some_and(|item| item == "Config" || item == "load");
            if whole && !WHOLE_CONFIG.contains(&from.as_str()) {
                wrong.push(format!("{file}: `{from}` takes its own section, not {}", path.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_import_check_sees_every_way_to_write_a_path() {
    let text = r#"
        use crate::store::{Store, row::{self as r, *}};
        mod inner {
            fn f() { super::super::http::g(); self::h(); println!("{}", crate::run::K); let x: crate::app::App; }
        }
        #[cfg(test)]
        mod tests { use crate::cli::main; }
    "#;
    let found: Vec<_> = Paths::of("src/tool/files.rs", text).into_iter().map(|path| path.join("::")).collect();
    // From `tool::files::inner`, two steps up is `tool`.
    let expected = ["app::App", "run::K", "store::Store", "store::row", "tool::files::inner::h", "tool::http::g"];
    assert_eq!(found, expected);
    let root: Vec<_> = Paths::of("src/tool/mod.rs", "use super::http::x;").into_iter().collect();
    assert_eq!(root, [["http", "x"].map(str::to_owned)]);
    assert!(allows("tool::{Registry, registry}", &["tool", "registry", "X"].map(str::to_owned)));
    assert!(!allows("tool::{Registry, registry}", &["tool", "executor"].map(str::to_owned)));
    assert!(!allows("tool::{Registry, registry}", &["tool"].map(str::to_owned)));
}

/// The machine decides and does nothing else.
struct Effects(Vec<String>);

impl<'ast> Visit<'ast> for Effects {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let first = path.segments.first().map(|segment| segment.ident.to_string()).unwrap_or_default();
        if ["tokio", "tokio_util", "futures_util", "reqwest", "sqlx"].contains(&first.as_str()) {
            self.0.push(first);
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_use_path(&mut self, path: &'ast syn::UsePath) {
        let first = path.ident.to_string();
        if ["tokio", "tokio_util", "futures_util", "reqwest", "sqlx", "fs", "net", "process", "env"]
            .contains(&first.as_str())
        {
            self.0.push(first);
        }
        syn::visit::visit_use_path(self, path);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        if signature.asyncness.is_some() {
            self.0.push(format!("async fn {}", signature.ident));
        }
        syn::visit::visit_signature(self, signature);
    }

    fn visit_expr_async(&mut self, block: &'ast syn::ExprAsync) {
        self.0.push("async block".to_owned());
        syn::visit::visit_expr_async(self, block);
    }
}

#[test]
fn the_agent_does_no_io_and_waits_for_nothing() {
    for (file, text) in rust_files("src").filter(|(file, _)| file.starts_with("src/agent/")) {
        let mut effects = Effects(Vec::new());
        effects.visit_file(&syn::parse_file(&text).unwrap());
        assert!(effects.0.is_empty(), "{file}: {:?}", effects.0);
    }
}

#[test]
fn the_effect_check_sees_what_it_is_for() {
    for text in [
        "use tokio::sync::mpsc;",
        "async fn f() {}",
        "fn f() { let x = async {}; }",
        "fn f() { tokio::spawn(x); }",
        "use std::fs;\nuse std::{net::TcpStream};",
    ] {
        let mut effects = Effects(Vec::new());
        effects.visit_file(&syn::parse_file(text).unwrap());
        assert!(!effects.0.is_empty(), "{text}");
    }
}

/// The ways past the handle of a workspace that its files and the file tools have, each with its reason. Paths of a
/// model lead to files by that handle alone, or they could lead anywhere.
const RAW_FILE_ACCESS: [(&str, &str, &str); 3] = [
    ("src/tool/workspace/mod.rs", "cap_std::ambient_authority", "opens the directory itself, which the operator names"),
    ("src/tool/workspace/mod.rs", "ambient_authority", "its call"),
    ("src/tool/workspace/mod.rs", "std::fs::DirBuilder::new", "makes the directory of a run, named by its id"),
];

/// Collects the paths of a file that reach the file system by name: `std::fs`, `tokio::fs`, ambient authority.
#[derive(Default)]
struct RawFiles(BTreeSet<String>);

impl RawFiles {
    fn of(text: &str) -> BTreeSet<String> {
        let mut found = Self::default();
        found.visit_file(&syn::parse_file(text).unwrap());
        found.0
    }

    fn note(&mut self, segments: &[String]) {
        let path = segments.join("::");
        let is_fs = |root: &str| path == root || path.starts_with(&format!("{root}::"));
        if is_fs("std::fs") || is_fs("tokio::fs") || path.contains("ambient_authority") || is_fs("fs") {
            self.0.insert(path);
        }
    }

    fn use_tree(&mut self, before: &mut Vec<String>, tree: &syn::UseTree) {
        let mut leaf = |name: String| {
            let path: Vec<_> = before.iter().cloned().chain([name]).collect();
            self.note(&path);
        };
        match tree {
            syn::UseTree::Name(name) if name.ident == "self" => self.note(before),
            syn::UseTree::Name(name) => leaf(name.ident.to_string()),
            syn::UseTree::Rename(rename) => leaf(rename.ident.to_string()),
            syn::UseTree::Glob(_) => leaf("*".to_owned()),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.use_tree(before, tree)),
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.use_tree(before, &path.tree);
                before.pop();
            }
        }
    }
}

impl<'ast> Visit<'ast> for RawFiles {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_for_tests(&item.attrs) {
            self.use_tree(&mut Vec::new(), &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.note(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>());
        syn::visit::visit_path(self, path);
    }
}

#[test]
fn the_file_tools_reach_files_by_the_handle_of_a_workspace_alone() {
    let is_guarded = |file: &str| ["src/tool/files", "src/tool/workspace"].iter().any(|part| file.starts_with(part));
    let found: BTreeSet<_> = rust_files("src")
        .filter(|(file, _)| is_guarded(file) && !is_test_file(file))
        .flat_map(|(file, text)| RawFiles::of(&text).into_iter().map(move |path| (file.clone(), path)))
        .collect();
    let expected: BTreeSet<_> =
        RAW_FILE_ACCESS.iter().map(|(file, path, _)| ((*file).to_owned(), (*path).to_owned())).collect();
    assert_eq!(found, expected, "use the workspace's handle, or list the access in RAW_FILE_ACCESS with its reason");
}

#[test]
fn the_file_check_sees_every_way_to_write_a_path() {
    for (text, expected) in [
        ("use std::fs;", "std::fs"),
        ("use std::{fs::{self, File}, io};", "std::fs"),
        ("use tokio::fs::*;", "tokio::fs::*"),
        ("use std::fs::read as r;", "std::fs::read"),
        ("fn f() { std::fs::write(a, b); }", "std::fs::write"),
        ("fn f() { fs::write(a, b); }", "fs::write"),
        ("fn f(x: std::fs::File) {}", "std::fs::File"),
        ("fn f() { Dir::open_ambient_dir(p, cap_std::ambient_authority()); }", "cap_std::ambient_authority"),
    ] {
        assert!(RawFiles::of(text).contains(expected), "{text}");
    }
    let text = "use cap_std::fs::File; #[cfg(test)] mod tests { use std::fs; } #[cfg(test)] use std::fs;";
    assert_eq!(RawFiles::of(text), BTreeSet::new());
}

/// The names of the fields of log records and spans in a file, without its tests. Looks at the text, since the inside
/// of other macros (`select!`) is not parsed.
fn log_fields(text: &str) -> BTreeSet<String> {
    const LEVELS: [&str; 5] = ["trace", "debug", "info", "warn", "error"];
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let mut fields = BTreeSet::new();
    for (start, _) in text.match_indices("tracing::") {
        let rest = &text[start..];
        let Some((path, _)) = rest.split_once("!(").filter(|(path, _)| !path.contains(char::is_whitespace)) else {
            continue;
        };
        let name = path.trim_start_matches("tracing::");
        let level = name.trim_end_matches("_span");
        assert!(LEVELS.contains(&level), "{path}! is not known here");
        let ends = rest.match_indices(')').map(|(end, _)| &rest[..=end]);
        let item = ends.filter_map(|item| syn::parse_str::<syn::Macro>(item).ok()).next().unwrap();
        let tokens: Vec<String> = item.tokens.into_iter().map(|token| token.to_string()).collect();
        for argument in tokens.split(|token| token == ",") {
            match argument.first().map(String::as_str) {
                // The name of a span stands before its fields, the message of a record after them.
                Some(text) if text.starts_with('"') && level == name => break,
                Some(text) if text.starts_with('"') => {}
                Some("target" | "parent") if argument.get(1).is_some_and(|token| token == ":") => {}
                Some("%" | "?") => drop(fields.insert(argument[1..].concat())),
                Some(_) => drop(fields.insert(argument.iter().take_while(|token| *token != "=").cloned().collect())),
                None => {}
            }
        }
    }
    fields
}

#[test]
fn log_records_have_known_fields() {
    let known: BTreeSet<_> = hames::telemetry::FIELDS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(known.len(), hames::telemetry::FIELDS.len(), "a name stands twice in telemetry::FIELDS");
    let mut used = BTreeSet::new();
    let mut wrong = Vec::new();
    for (file, text) in rust_files("src").filter(|(file, _)| !is_test_file(file)) {
        for name in log_fields(&text) {
            if !known.contains(&name) {
                wrong.push(format!("{file}: the field `{name}` is not in telemetry::FIELDS"));
            }
            used.insert(name);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(known, used, "names that no record uses");
}

#[test]
fn the_field_check_sees_every_way_to_write_a_field() {
    let text = r#"
        fn f() {
            tracing::info!(a = 1, %b, ?c, d, e.f = ?g(1, 2), { CONST } = 3, "text {} {x}", y);
            tracing::warn!("{z}");
            let span = tracing::info_span!(target: T, parent: &p, "name", i = %j);
            println!("{k}", k = 1);
            tokio::select! { () = x => tracing::error!(l = "a) \"", "text"), }
        }
#[cfg(test)]
mod tests {
    fn f() { tracing::info!(m = 1); }
}
    "#;
    let found: Vec<_> = log_fields(text).into_iter().collect();
    assert_eq!(found, ["a", "b", "c", "d", "e.f", "i", "l", "{ CONST }"]);
}

/// Lines outside of `#[cfg(test)] mod … { … }`, as rustfmt lays them out.
fn production_lines(text: &str) -> usize {
    let (mut count, mut for_tests, mut inside) = (0, false, false);
    for line in text.lines() {
        match line {
            "#[cfg(test)]" => for_tests = true,
            "}" if inside => (for_tests, inside) = (false, false),
            _ if inside => {}
            _ if for_tests && line.starts_with("mod ") && line.ends_with('{') => inside = true,
            _ if for_tests && line.starts_with("#[path") => {}
            _ => (for_tests, count) = (false, count + 1),
        }
    }
    count
}

#[test]
fn files_are_short_enough_to_read() {
    let long: Vec<_> = rust_files("src")
        .filter(|(file, _)| !is_test_file(file))
        .map(|(file, text)| (file, production_lines(&text)))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .collect();
    assert!(long.is_empty(), "more than {MAX_LINES} lines: {long:?}");
    let text = "a\nb\n\n#[cfg(test)]\nmod tests {\n    c\n}\n#[cfg(test)]\nuse d;\ne\n";
    assert_eq!(production_lines(text), 5);
}

#[test]
fn the_entry_points_stay_small() {
    let main = fs::read_to_string(root().join("src/main.rs")).unwrap();
    assert!(main.lines().count() <= 40);
    let lib = syn::parse_file(&fs::read_to_string(root().join("src/lib.rs")).unwrap()).unwrap();
    for item in &lib.items {
        let is_pub_mod =
            matches!(item, syn::Item::Mod(syn::ItemMod { vis: syn::Visibility::Public(_), content: None, .. }));
        assert!(is_pub_mod, "lib.rs holds more than `pub mod` lines");
    }
}

#[test]
fn every_file_says_what_it_is_and_allows_nothing() {
    let mut wrong = Vec::new();
    for (file, text) in rust_files("src").chain(rust_files("tests")) {
        if !text.starts_with("//!") {
            wrong.push(format!("{file}: does not start with `//!`"));
        }
        for allow in [concat!("#[al", "low("), concat!("#![al", "low(")] {
            if text.contains(allow) {
                wrong.push(format!("{file}: use #[expect(…, reason = \"…\")] in place of {allow}…)]"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn migrations_are_numbered_without_a_gap() {
    let names: Vec<_> =
        files("migrations/sqlite").iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    assert!(!names.is_empty());
    for (index, name) in names.iter().enumerate() {
        let stem = name.strip_prefix(&format!("{:04}_", index + 1)).and_then(|rest| rest.strip_suffix(".sql"));
        let valid = stem.is_some_and(|stem| stem.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
        assert!(valid, "{name} is not {:04}_name.sql", index + 1);
    }
}

/// Whether the word stands in the line, and not as a part of a longer one.
fn holds_word(line: &str, word: &str) -> bool {
    let joins = |inner: Option<char>, outer: Option<char>| {
        inner.is_some_and(char::is_alphanumeric) && outer.is_some_and(char::is_alphanumeric)
    };
    line.match_indices(word).any(|(start, _)| {
        let (before, after) = (&line[..start], &line[start + word.len()..]);
        !joins(word.chars().next(), before.chars().next_back())
            && !joins(word.chars().next_back(), after.chars().next())
    })
}

#[test]
fn words_are_found_whole() {
    for (line, expected) in [("see b-C: x", true), ("b", false), ("ab-C", false), ("b-Cd", false), ("(b-C)", true)] {
        assert_eq!(holds_word(line, "b-C"), expected, "{line}");
    }
    assert!(holds_word("x/b/y", "/b/"));
}

#[test]
fn no_text_holds_a_word_that_has_no_place_here() {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut wrong = Vec::new();
    for file in listed.split('\0').filter(|file| !file.is_empty()) {
        // Files may be deleted and not yet staged; those that are not text have no words.
        let Ok(text) = fs::read_to_string(root().join(file)) else { continue };
        for (number, line) in text.lines().enumerate() {
            for word in BANNED.iter().filter(|word| holds_word(line, word)) {
                wrong.push(format!("{file}:{}: {word}", number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
