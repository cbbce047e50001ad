//! JSON Schemas of tool arguments: compiled once, under limits, with messages a model can act on.

use std::collections::HashMap;

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::paths::{Location, LocationSegment};
use jsonschema::{Draft, PatternOptions, Retrieve, Uri, ValidationError, Validator};
use serde_json::{Map, Value};

use crate::domain::text::{nearest, shown};

/// Most levels of nesting of a schema and of arguments.
const MAX_DEPTH: usize = 64;
/// Most values in a schema.
const MAX_SCHEMA_NODES: usize = 5_000;
/// Most values in a schema after every reference is replaced by what it refers to.
const MAX_EXPANDED_NODES: u64 = 100_000;
/// Most visits of a recursive definition to find out what is wrong.
const MAX_VISITS: u64 = 100_000;
/// Longest chain of references.
const MAX_REFERENCE_CHAIN: usize = 64;
/// Most values in the arguments of one call.
const MAX_ARGUMENT_NODES: usize = 100_000;
/// Largest compiled form of one regular expression, in bytes.
const MAX_PATTERN_BYTES: usize = 64 * 1024;
/// Most errors told of one call.
const MAX_ERRORS: usize = 8;
/// Most errors looked at to find different ones.
const MAX_VISITED_ERRORS: usize = 64;
/// Most Unicode scalar values shown of a value or a name a model sent.
const MAX_SHOWN: usize = 60;

/// The compiled schema of a tool's arguments: JSON Schema 2020-12, whatever `$schema` says.
#[derive(Debug)]
pub struct ArgumentSchema {
    source: Value,
    validator: Validator,
    recursions: u64,
}

/// A schema cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// Arguments are always an object.
    #[error("the schema must be an object with `\"type\": \"object\"` at its top level, but has {found}")]
    NotObject {
        /// What stands there.
        found: String,
    },
    /// It would be too slow to check.
    #[error(
        "the schema is too large: at most {MAX_DEPTH} levels and {MAX_SCHEMA_NODES} values, and {MAX_EXPANDED_NODES} with references \
         replaced by their targets, are allowed"
    )]
    TooLarge,
    /// It is not a valid schema, refers to what does not exist or is not in it, or has a regular expression that
    /// the linear engine cannot run.
    #[error("the schema is invalid at `{path}`: {reason}")]
    Invalid {
        /// JSON path inside the schema.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

/// Refuses to fetch anything: a `$ref` can name a URL or a file of the server.
struct NoRetrieval;

impl Retrieve for NoRetrieval {
    fn retrieve(&self, uri: &Uri<String>) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Err(format!("`{uri}` is outside of the schema; only references into the schema itself (`#/$defs/…`) work")
            .into())
    }
}

impl ArgumentSchema {
    /// Compiles a schema. Regular expressions run on a linear engine: look-around and back-references are refused.
    pub fn compile(schema: &Value) -> Result<Self, SchemaError> {
        match schema.get("type") {
            Some(Value::String(kind)) if kind == "object" => {}
            Some(other) => return Err(SchemaError::NotObject { found: format!("`\"type\": {other}`") }),
            None if schema.is_object() => return Err(SchemaError::NotObject { found: "no `type`".to_owned() }),
            None => return Err(SchemaError::NotObject { found: describe(schema) }),
        }
        if !fits(schema, MAX_DEPTH, &mut MAX_SCHEMA_NODES.clone()) {
            return Err(SchemaError::TooLarge);
        }
        let size = size_of(schema, schema, 0, &mut HashMap::new());
        if size.values > MAX_EXPANDED_NODES {
            return Err(SchemaError::TooLarge);
        }
        let validator = jsonschema::options()
            .with_draft(Draft::Draft202012)
            .with_retriever(NoRetrieval)
            .with_pattern_options(
                PatternOptions::regex().size_limit(MAX_PATTERN_BYTES).dfa_size_limit(MAX_PATTERN_BYTES),
            )
            .build(schema)
            .map_err(|error| SchemaError::Invalid {
                path: json_path(error.instance_path()),
                reason: error.to_string(),
            })?;
        Ok(Self { source: schema.clone(), validator, recursions: size.recursions })
    }

    /// Checks arguments. The error lists what is wrong, one line each, with its JSON path.
    pub fn check(&self, arguments: &Map<String, Value>) -> Result<(), String> {
        let instance = Value::Object(arguments.clone());
        if !fits(&instance, MAX_DEPTH, &mut MAX_ARGUMENT_NODES.clone()) {
            return Err(format!(
                "$: at most {MAX_DEPTH} levels and {MAX_ARGUMENT_NODES} values are allowed; send less or less nested data"
            ));
        }
        if self.validator.is_valid(&instance) {
            return Ok(());
        }
        // Listing errors does not remember what it has visited: each level may visit the next once per reference.
        if self.recursions.saturating_pow(depth(&instance)) > MAX_VISITS {
            return Err("$: this does not fit the schema; it is nested too deep to say where".to_owned());
        }
        let mut lines: Vec<String> = Vec::new();
        for error in self.validator.iter_errors(&instance).take(MAX_VISITED_ERRORS) {
            let line = format!("{}: {}", json_path(error.instance_path()), self.explain(&error, 0));
            if lines.len() == MAX_ERRORS {
                lines.push("… and more".to_owned());
                break;
            }
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        Err(lines.join("\n"))
    }

    /// One error in words; the path stands before it.
    fn explain(&self, error: &ValidationError<'_>, level: usize) -> String {
        let got = || describe(error.instance());
        match error.kind() {
            ValidationErrorKind::Type { kind } => format!("expected {}, got {}", types(kind), got()),
            ValidationErrorKind::Required { property } => {
                format!("the property {property} is required and missing; {}", self.allowed(error))
            }
            ValidationErrorKind::AdditionalProperties { unexpected }
            | ValidationErrorKind::UnevaluatedProperties { unexpected } => self.unknown(error, unexpected),
            ValidationErrorKind::Enum { options } => {
                let options: Vec<&Value> = options.as_array().map(|all| all.iter().collect()).unwrap_or_default();
                let listed = options.iter().take(30).map(|option| shorten(&option.to_string())).collect::<Vec<_>>();
                let more = if options.len() > 30 { ", …" } else { "" };
                format!("expected one of {}{more}, got {}", listed.join(", "), got())
            }
            ValidationErrorKind::Constant { expected_value } => {
                format!("expected {}, got {}", shorten(&expected_value.to_string()), got())
            }
            ValidationErrorKind::FalseSchema => "nothing is allowed here; leave it out".to_owned(),
            ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context } if level < 2 => {
                let mut text = format!("got {}, which fits none of the {} allowed forms", got(), context.len());
                for (index, form) in context.iter().take(4).enumerate() {
                    let Some(first) = form.first() else { continue };
                    let path = json_path(first.instance_path());
                    text.push_str(&format!("; form {}: {path}: {}", index + 1, self.explain(first, level + 1)));
                }
                text
            }
            _ => format!("{}; got {}", error.masked_with("the value"), got()),
        }
    }

    fn unknown(&self, error: &ValidationError<'_>, unexpected: &[String]) -> String {
        let names = self.properties(error);
        let listed: Vec<String> = unexpected
            .iter()
            .take(MAX_ERRORS)
            .map(|name| match nearest(name, names.iter().map(String::as_str)) {
                Some(near) => format!("`{}` (did you mean `{near}`?)", shorten(name)),
                None => format!("`{}`", shorten(name)),
            })
            .collect();
        let more = if unexpected.len() > MAX_ERRORS { ", …" } else { "" };
        format!("unknown property {}{more}; {}", listed.join(", "), self.allowed(error))
    }

    fn allowed(&self, error: &ValidationError<'_>) -> String {
        let names = self.properties(error);
        if names.is_empty() { "no properties are allowed".to_owned() } else { format!("allowed: {}", names.join(", ")) }
    }

    /// The names of the `properties` beside the keyword that failed.
    fn properties(&self, error: &ValidationError<'_>) -> Vec<String> {
        let keyword = error.schema_path().as_str();
        let parent = keyword.rsplit_once('/').map_or("", |(parent, _)| parent);
        let properties = self.source.pointer(parent).and_then(|schema| schema.get("properties"));
        properties.and_then(Value::as_object).map(|map| map.keys().cloned().collect()).unwrap_or_default()
    }
}

/// Whether a value has at most `depth` levels; counts `nodes` down and fails when they are used up.
fn fits(value: &Value, depth: usize, nodes: &mut usize) -> bool {
    if depth == 0 || *nodes == 0 {
        return false;
    }
    *nodes -= 1;
    match value {
        Value::Array(items) => items.iter().all(|item| fits(item, depth - 1, nodes)),
        Value::Object(map) => map.values().all(|item| fits(item, depth - 1, nodes)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
}

/// How much work a schema can make.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Values, with every reference replaced by its target.
    values: u64,
    /// References back to a definition they stand in.
    recursions: u64,
}

impl Size {
    const ONE: Self = Self { values: 1, recursions: 0 };
    const BACK: Self = Self { values: 1, recursions: 1 };
    const ENDLESS: Self = Self { values: u64::MAX, recursions: u64::MAX };

    const fn plus(self, other: Self) -> Self {
        Self {
            values: self.values.saturating_add(other.values),
            recursions: self.recursions.saturating_add(other.recursions),
        }
    }
}

/// Sizes a schema. Definitions that refer to each other twice at every level double the work of a check with
/// every level, and the validator does not remember what it has checked.
fn size_of<'s>(root: &'s Value, value: &'s Value, chain: usize, known: &mut HashMap<&'s str, Size>) -> Size {
    if chain > MAX_REFERENCE_CHAIN {
        return Size::ENDLESS;
    }
    match value {
        Value::Array(items) => items.iter().fold(Size::ONE, |sum, item| sum.plus(size_of(root, item, chain, known))),
        Value::Object(map) => map.iter().fold(Size::ONE, |sum, (key, item)| match (key.as_str(), item) {
            ("$defs" | "definitions", _) => sum,
            ("$ref" | "$dynamicRef", Value::String(reference)) => sum.plus(match known.get(reference.as_str()) {
                Some(size) => *size,
                None => {
                    known.insert(reference, Size::BACK);
                    // What is not a pointer (an anchor, a name of its own) may be anything of the schema.
                    let pointer = reference.strip_prefix('#');
                    let target = pointer.and_then(|pointer| root.pointer(pointer)).unwrap_or(root);
                    let size = size_of(root, target, chain + 1, known);
                    known.insert(reference, size);
                    size
                }
            }),
            _ => sum.plus(size_of(root, item, chain, known)),
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Size::ONE,
    }
}

fn depth(value: &Value) -> u32 {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
    }
}

/// `$.flags[0]`, `$["odd name"]`.
fn json_path(location: &Location) -> String {
    let mut path = String::from("$");
    for segment in location.segments() {
        match segment {
            LocationSegment::Index(index) => path.push_str(&format!("[{index}]")),
            LocationSegment::Property(name) => {
                let plain = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '$')
                    && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '$');
                if plain && name.len() <= MAX_SHOWN {
                    path.push('.');
                    path.push_str(&name);
                } else {
                    path.push_str(&format!("[{:?}]", shorten(&name)));
                }
            }
        }
    }
    path
}

fn types(kind: &TypeKind) -> String {
    match kind {
        TypeKind::Single(one) => one.to_string(),
        TypeKind::Multiple(several) => several.iter().map(|one| one.to_string()).collect::<Vec<_>>().join(" or "),
    }
}

/// A value in words: its type, and the value itself where it is short.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => format!("boolean {value}"),
        Value::Number(number) if number.is_f64() => format!("number {number}"),
        Value::Number(number) => format!("integer {number}"),
        Value::String(text) => format!("string {}", Value::from(shorten(text))),
        Value::Array(items) => format!("an array of {} items", items.len()),
        Value::Object(map) => {
            let names: Vec<String> = map.keys().take(MAX_ERRORS).map(|name| shorten(name)).collect();
            let more = if map.len() > names.len() { ", …" } else { "" };
            format!("an object with the properties [{}{more}]", names.join(", "))
        }
    }
}

fn shorten(text: &str) -> String {
    shown(text, MAX_SHOWN)
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
