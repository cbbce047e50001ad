//! The pattern of a search: a regular expression whose work between two looks at the clock is bounded.

use regex_automata::meta::{BuildError, Cache, Config, Regex};
use regex_automata::nfa::thompson::{self, NFA, WhichCaptures};
use regex_automata::util::syntax;
use regex_automata::{Input, Match};

use super::line::{MAX_WINDOW, Piece};

/// Largest compiled regular expression, in bytes: a dozen words of Unicode classes, or ten thousand bytes.
const MAX_COMPILED: usize = 256 * 1024;

/// Most bytes of the states that a search keeps to be faster, for each of the two directions.
const MAX_CACHE: usize = 256 * 1024;

/// Most states times bytes of one look into a line. The engine does no more than this many steps, however the pattern
/// is written, so this is what bounds the time between two looks at the clock: some hundredths of a second.
const MAX_STEPS: usize = 8 * 1024 * 1024;

/// Shortest part of a line that is searched at once, in bytes.
const MIN_WINDOW: usize = 1_024;

/// A compiled regular expression and the room it works in.
pub(super) struct Pattern {
    regex: Regex,
    cache: Cache,
    window: usize,
}

impl Pattern {
    /// Compiles a pattern; the error says what is wrong with it.
    pub(super) fn new(source: &str, ignore_case: bool) -> Result<Self, String> {
        // Any bytes are text here: files are not always UTF-8.
        let syntax = syntax::Config::new().utf8(false).case_insensitive(ignore_case);
        let config = Config::new()
            .utf8_empty(false)
            .nfa_size_limit(Some(MAX_COMPILED))
            .onepass_size_limit(Some(MAX_CACHE))
            .hybrid_cache_capacity(MAX_CACHE);
        let regex = Regex::builder().configure(config).syntax(syntax).build(source).map_err(|error| refusal(&error))?;
        let config = thompson::Config::new()
            .utf8(false)
            .nfa_size_limit(Some(MAX_COMPILED))
            .which_captures(WhichCaptures::Implicit);
        let nfa = NFA::compiler()
            .configure(config)
            .syntax(syntax)
            .build(source)
            .map_err(|error| format!("it cannot be compiled: {error}"))?;
        let window = (MAX_STEPS / nfa.states().len().max(1)).clamp(MIN_WINDOW, MAX_WINDOW);
        let cache = regex.create_cache();
        Ok(Self { regex, cache, window })
    }

    /// How many bytes of a line are searched at once.
    pub(super) const fn window(&self) -> usize {
        self.window
    }

    /// The first match in the span of a piece.
    pub(super) fn find(&mut self, piece: &Piece<'_>) -> Option<Match> {
        self.regex.search_with(&mut self.cache, &Input::new(piece.text).range(piece.span.clone()))
    }
}

fn refusal(error: &BuildError) -> String {
    if error.size_limit().is_some() {
        return format!("compiled it is larger than {} KiB; use fewer or smaller repetitions", MAX_COMPILED / 1024);
    }
    error.syntax_error().map_or_else(|| error.to_string(), ToString::to_string)
}
