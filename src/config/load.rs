//! Fills the settings: defaults, then a TOML file, then `HAMES_SECTION__KEY` variables, then the checks. Every
//! problem is found in one go, each with its place.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use figment::error::{Actual, Kind};
use figment::providers::{Format, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::env::{Env, PREFIX, SEPARATOR};
use super::problem::{Origin, Problem, Problems, meant};
use super::provider::ProviderSection;
use super::{Config, builtin, check, otlp};
use crate::domain::text::shown;

/// Most characters of a value that a message repeats.
const MAX_SHOWN: usize = 200;

/// Loads the settings. Without a file there are built-in providers and agents.
///
/// Relative paths in the settings are relative to the working directory.
pub fn load(file: Option<&Path>, env: &Env) -> Result<Config, Problems> {
    read(file, env).into_config()
}

/// Reads the settings as [`load`] does, and keeps what could be read when there are problems.
pub fn read(file: Option<&Path>, env: &Env) -> Loaded {
    let mut problems = Vec::new();
    let mut sources = Sources::read(file, env, &mut problems);
    if problems.iter().any(|problem| problem.key.is_empty()) {
        // Without the file, everything it defines would seem to be missing.
        return Loaded { config: None, problems, sources };
    }
    let mut broken = Broken::new();
    let sections = sources.fit::<ProviderSections>(&mut problems, &mut broken);
    let rest = sources.without(PROVIDERS, |sources| sources.fit::<Config>(&mut problems, &mut broken));
    let (Some(ProviderSections { providers }), Some(mut config)) = (sections, rest) else {
        return Loaded { config: None, problems, sources };
    };
    config.providers = check::providers(&providers, env, &sources, &mut broken, &mut problems);
    config.given = sources.given();
    otlp::from_environment(&mut config.telemetry, env, &sources, &mut problems);
    if file.is_none() {
        builtin::fill(&mut config, env, &mut broken, &mut problems);
    }
    check::check(&config, &providers, &sources, &mut broken, &mut problems);
    Loaded { config: Some(config), problems, sources }
}

/// Settings as far as they could be read, and what is wrong with them.
pub struct Loaded {
    config: Option<Config>,
    problems: Vec<Problem>,
    sources: Sources,
}

impl Loaded {
    /// What could be read: entries with problems too, unless they could not be read at all. `None` when nothing could.
    pub const fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }

    /// What is wrong.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// The settings, if nothing is wrong with them.
    pub fn into_config(self) -> Result<Config, Problems> {
        match self.config {
            Some(config) if self.problems.is_empty() => Ok(config),
            Some(_) | None => Err(Problems(self.problems)),
        }
    }

    /// Whether no problem stands at this key or below it.
    pub fn is_sound(&self, path: &[&str]) -> bool {
        let key = path.join(".");
        !self.problems.iter().any(|problem| {
            problem.key.strip_prefix(&key).is_some_and(|below| below.is_empty() || below.starts_with('.'))
        })
    }

    /// Whether a file or the environment gave anything in this section, be it good or not.
    pub fn mentions(&self, section: &str) -> bool {
        self.sources.has(&[section]) || !self.is_sound(&[section])
    }

    /// A problem with the place where its key was given.
    pub fn problem(&self, path: &[&str], message: impl Into<String>) -> Problem {
        Problem { origin: self.sources.origin(path), key: path.join("."), message: message.into() }
    }

    /// The same for a message that starts with its key, as in `commands.test.executable: …`.
    pub fn problem_in(&self, text: &str) -> Problem {
        let (key, message) = text.split_once(": ").unwrap_or(("", text));
        self.problem(&key.split('.').collect::<Vec<_>>(), message)
    }
}

/// The entries (`providers.local`) that could not be read: what refers to them is not wrong for that.
pub(super) type Broken = BTreeSet<(String, String)>;

const PROVIDERS: &str = "providers";

/// The providers as they are written. They are read by themselves: what a section needs depends on its kind, and
/// every problem of it is to be found, not the first.
#[derive(Deserialize)]
struct ProviderSections {
    #[serde(default)]
    providers: BTreeMap<String, ProviderSection>,
}

/// The merged settings, each value knowing where it comes from.
pub(super) struct Sources {
    figment: Figment,
    merged: Value,
    file: Option<PathBuf>,
}

const FILE: &str = "file";
const ENVIRONMENT: &str = "environment";

impl Sources {
    fn read(file: Option<&Path>, env: &Env, problems: &mut Vec<Problem>) -> Self {
        let mut figment = Figment::new();
        if let Some(path) = file {
            match read_file(path) {
                Ok(values) => figment = figment.merge(Source { name: FILE, values }),
                Err(message) => {
                    problems.push(Problem { origin: Origin::File(path.to_owned()), key: String::new(), message });
                }
            }
        }
        figment = figment.merge(Source { name: ENVIRONMENT, values: read_environment(env, problems) });
        let merged = match figment.data() {
            Ok(mut profiles) => profiles.remove(&Profile::Default).unwrap_or_default(),
            Err(error) => {
                problems.push(Problem { origin: Origin::BuiltIn, key: String::new(), message: error.to_string() });
                Dict::new()
            }
        };
        Self { figment, merged: Value::from(merged), file: file.map(Path::to_owned) }
    }

    /// Every key that was given, dotted; those of sections too.
    fn given(&self) -> BTreeSet<String> {
        let mut given = BTreeSet::new();
        let mut open = vec![(String::new(), &self.merged)];
        while let Some((path, value)) = open.pop() {
            let Value::Dict(_, dict) = value else { continue };
            for (key, value) in dict {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                given.insert(path.clone());
                open.push((path, value));
            }
        }
        given
    }

    /// Whether a key was given.
    pub(super) fn has(&self, path: &[&str]) -> bool {
        find(&self.merged, path).1 == path.len()
    }

    /// Where a key was given; for a key that was not, where the section that lacks it was.
    pub(super) fn origin(&self, path: &[&str]) -> Origin {
        let (value, depth) = find(&self.merged, path);
        let source = self.figment.get_metadata(value.tag()).map(|metadata| metadata.name.as_ref());
        match (source, &self.file) {
            (Some(ENVIRONMENT), _) => {
                let given: Vec<_> = path.iter().take(depth).map(|key| key.to_ascii_uppercase()).collect();
                Origin::Environment(format!("{PREFIX}{}", given.join(SEPARATOR)))
            }
            (Some(FILE), Some(file)) => Origin::File(file.clone()),
            // The root, and what only the defaults have.
            (Some(_) | None, Some(file)) if depth == 0 => Origin::File(file.clone()),
            (Some(_) | None, _) => Origin::BuiltIn,
        }
    }

    /// Does something while a section is not there.
    fn without<T>(&mut self, section: &str, work: impl FnOnce(&mut Self) -> T) -> T {
        let aside = match &mut self.merged {
            Value::Dict(_, dict) => dict.remove(section),
            Value::String(..) | Value::Char(..) | Value::Bool(..) | Value::Num(..) | Value::Empty(..) => None,
            Value::Array(..) => None,
        };
        let done = work(self);
        if let (Value::Dict(_, dict), Some(aside)) = (&mut self.merged, aside) {
            dict.insert(section.to_owned(), aside);
        }
        done
    }

    /// Reads settings. What does not fit is noted and taken out, until the rest fits.
    fn fit<T: DeserializeOwned>(&mut self, problems: &mut Vec<Problem>, broken: &mut Broken) -> Option<T> {
        let mut noted = BTreeSet::new();
        let mut taken_out: BTreeMap<Vec<String>, usize> = BTreeMap::new();
        loop {
            let error = match self.merged.deserialize::<T>() {
                Ok(read) => return Some(read),
                Err(error) => error,
            };
            let path = error.path;
            let borrowed: Vec<_> = path.iter().map(String::as_str).collect();
            let mut place = path.clone();
            if let Kind::MissingField(field) = &error.kind {
                place.push(field.clone().into_owned());
                if let [section, name, ..] = borrowed.as_slice() {
                    broken.insert(((*section).to_owned(), (*name).to_owned()));
                }
            } else if matches!(error.kind, Kind::InvalidType(..)) && self.read_text_as_value(&borrowed) {
                continue;
            }
            // An element of a list: those before it that did not fit are not there any more.
            if let Some((last, list)) = path.split_last()
                && let Ok(index) = last.parse::<usize>()
            {
                let gone = taken_out.entry(list.to_vec()).or_default();
                if let Some(shown) = place.last_mut() {
                    *shown = (index + *gone).to_string();
                }
                *gone += 1;
            }
            if !noted.contains(&place) {
                problems.push(Problem {
                    origin: self.origin(&borrowed),
                    key: place.join("."),
                    message: describe(&error.kind, &place, find(&self.merged, &borrowed).0.as_str()),
                });
                noted.insert(place);
            }
            if !remove(&mut self.merged, &borrowed) {
                return None;
            }
        }
    }

    /// Variables are text. One that has to be something else is read as a value (`8080`, `true`, `[a, b]`).
    fn read_text_as_value(&mut self, path: &[&str]) -> bool {
        if !matches!(self.origin(path), Origin::Environment(_)) {
            return false;
        }
        let Some(slot) = find_mut(&mut self.merged, path) else { return false };
        let Value::String(tag, text) = &*slot else { return false };
        let Ok(value) = text.parse::<Value>();
        *slot = match value {
            Value::Num(_, number) => Value::Num(*tag, number),
            Value::Bool(_, truth) => Value::Bool(*tag, truth),
            Value::Array(_, items) => Value::Array(*tag, items),
            Value::String(..) | Value::Char(..) | Value::Empty(..) | Value::Dict(..) => return false,
        };
        true
    }
}

struct Source {
    name: &'static str,
    values: Dict,
}

impl Provider for Source {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.name)
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Map::from([(Profile::Default, self.values.clone())]))
    }
}

fn read_file(path: &Path) -> Result<Dict, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"))?;
    Toml::from_str::<Dict>(&text).map_err(|error| format!("is not valid TOML: {}", error.to_string().trim_end()))
}

fn read_environment(env: &Env, problems: &mut Vec<Problem>) -> Dict {
    let mut root = Dict::new();
    for (name, path, value) in env.settings() {
        match value.to_str() {
            Some(text) => insert(&mut root, &path, text),
            None => problems.push(Problem {
                origin: Origin::Environment(name.to_owned()),
                key: path.join("."),
                message: "is not valid UTF-8".to_owned(),
            }),
        }
    }
    root
}

fn insert(dict: &mut Dict, path: &[String], text: &str) {
    match path {
        [] => {}
        [key] => {
            dict.insert(key.clone(), Value::from(text));
        }
        [key, rest @ ..] => {
            let slot = dict.entry(key.clone()).or_insert_with(|| Value::from(Dict::new()));
            if !matches!(slot, Value::Dict(..)) {
                *slot = Value::from(Dict::new());
            }
            if let Value::Dict(_, inner) = slot {
                insert(inner, rest, text);
            }
        }
    }
}

/// The deepest value on a path, and how many keys lead to it.
fn find<'v>(root: &'v Value, path: &[&str]) -> (&'v Value, usize) {
    let (mut value, mut depth) = (root, 0);
    for key in path {
        let next = match value {
            Value::Dict(_, dict) => dict.get(*key),
            Value::Array(_, items) => key.parse::<usize>().ok().and_then(|index| items.get(index)),
            Value::String(..) | Value::Char(..) | Value::Bool(..) | Value::Num(..) | Value::Empty(..) => None,
        };
        let Some(next) = next else { break };
        (value, depth) = (next, depth + 1);
    }
    (value, depth)
}

fn find_mut<'v>(root: &'v mut Value, path: &[&str]) -> Option<&'v mut Value> {
    path.iter().try_fold(root, |value, key| match value {
        Value::Dict(_, dict) => dict.get_mut(*key),
        Value::Array(_, items) => key.parse::<usize>().ok().and_then(|index| items.get_mut(index)),
        Value::String(..) | Value::Char(..) | Value::Bool(..) | Value::Num(..) | Value::Empty(..) => None,
    })
}

fn remove(root: &mut Value, path: &[&str]) -> bool {
    let Some((last, parent)) = path.split_last() else { return false };
    match find_mut(root, parent) {
        Some(Value::Dict(_, dict)) => dict.remove(*last).is_some(),
        Some(Value::Array(_, items)) => match last.parse::<usize>() {
            Ok(index) if index < items.len() => {
                items.remove(index);
                true
            }
            Ok(_) | Err(_) => false,
        },
        Some(Value::String(..) | Value::Char(..) | Value::Bool(..) | Value::Num(..) | Value::Empty(..)) | None => false,
    }
}

fn describe(kind: &Kind, place: &[String], given: Option<&str>) -> String {
    let key = place.last().map_or("", String::as_str);
    match kind {
        Kind::UnknownField(name, known) => format!("unknown key; {}", meant(name, known.iter().copied())),
        Kind::MissingField(_) => "is required and missing".to_owned(),
        Kind::UnknownVariant(value, known) => {
            format!("`{value}` is not allowed; expected one of {}", known.join(", "))
        }
        Kind::InvalidType(found, expected) | Kind::InvalidValue(found, expected) => {
            format!("expected {}, found {}", expectation(expected), finding(found))
        }
        Kind::Message(message) if key == "bind" => {
            let given = given.map(|given| format!("`{}`: ", shown(given, MAX_SHOWN))).unwrap_or_default();
            format!("{given}{message}; expected ADDRESS:PORT such as 127.0.0.1:8080")
        }
        Kind::Message(message) => message.clone(),
        Kind::InvalidLength(..)
        | Kind::DuplicateField(_)
        | Kind::ISizeOutOfRange(_)
        | Kind::USizeOutOfRange(_)
        | Kind::Unsupported(_)
        | Kind::UnsupportedKey(..) => kind.to_string(),
    }
}

fn expectation(expected: &str) -> String {
    match expected {
        "u16" => format!("a whole number from 0 to {}", u16::MAX),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => "a whole number, zero or more".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a section".to_owned(),
        other if other.starts_with("struct ") => "a section".to_owned(),
        other => other.to_owned(),
    }
}

fn finding(found: &Actual) -> String {
    match found {
        Actual::Bool(value) => value.to_string(),
        Actual::Unsigned(value) => value.to_string(),
        Actual::Signed(value) => value.to_string(),
        Actual::Float(value) => value.to_string(),
        Actual::Char(value) => format!("the text {:?}", value.to_string()),
        Actual::Str(value) => format!("the text {value:?}"),
        Actual::Seq => "a list".to_owned(),
        Actual::Map => "a section".to_owned(),
        Actual::Bytes(_)
        | Actual::Unit
        | Actual::Option
        | Actual::NewtypeStruct
        | Actual::Enum
        | Actual::UnitVariant
        | Actual::NewtypeVariant
        | Actual::TupleVariant
        | Actual::StructVariant
        | Actual::Other(_) => found.to_string(),
    }
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
