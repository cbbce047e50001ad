//! Every reported case, at the boundary of the provider: each answer of the server is one attempt.

use std::sync::Arc;
use std::time::Duration;

use hames::domain::{
    Arguments, FinishReason, Message, ModelFailure, ModelTurn, OutcomeKind, ToolCall, ToolMessage, ToolSpec,
};
use hames::provider::conversation::Conversation;
use hames::provider::retry::{Decision, Policy};
use hames::time::{Clock, ManualClock};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::case::{self, Attempt, Case, CaseTool, Expect, ExpectUsage};
use super::{Streamed, chat_provider, request, request_check};
use crate::support::upstream::{Pace, Reply, Upstream};

/// No case takes longer unless it hangs.
const PATIENCE: Duration = Duration::from_secs(15);

#[tokio::test]
async fn every_case_as_it_was_sent() {
    run_all(Pace::Whole).await;
}

#[tokio::test]
async fn every_case_one_byte_at_a_time() {
    run_all(Pace::Bytes).await;
}

async fn run_all(pace: Pace) {
    let cases = case::all();
    assert_eq!(cases.len(), 36);
    let mut wrong = Vec::new();
    for case in &cases {
        let told = |problem| format!("{} ({}; {}; {}): {problem}", case.id, case.kind, case.title, case.source);
        wrong.extend(play(case, pace).await.into_iter().map(told));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Plays a case and tells what is not as it should be.
async fn play(case: &Case, pace: Pace) -> Vec<String> {
    // On a whole second, since dates in headers have no parts of one.
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new("2026-01-05T10:00:00Z".parse().unwrap()));
    let replies = case.upstream.iter().cloned().map(|mut response| {
        response.pace = pace;
        Reply::Response(response)
    });
    let upstream = Upstream::start_at(replies.collect(), Arc::clone(&clock)).await;
    let provider = chat_provider(upstream.base_url(), &json!({"reasoning_field": case.run.reasoning_field}), &clock);
    let tools: Vec<ToolSpec> = case.run.tools.iter().map(spec).collect();
    let mut messages = vec![Arc::new(Message::user(case.run.input.as_str()))];
    let mut wrong = Vec::new();
    let mut whole = Whole::default();
    if case.attempts.len() != case.upstream.len() {
        wrong.push(format!("{} attempts for {} answers", case.attempts.len(), case.upstream.len()));
    }
    for (number, response) in (1..).zip(&case.upstream) {
        let mut ask = request(messages.clone(), tools.clone());
        ask.step = number;
        let mut streamed = Streamed::default();
        let limit = case.expect.max_wall_ms.map_or(PATIENCE, Duration::from_millis);
        let Ok(result) = timeout(limit, provider.call(&ask, &mut Conversation::default(), &mut streamed)).await else {
            wrong.push(format!("attempt {number} hangs"));
            break;
        };
        match case.attempts.get(usize::try_from(number).unwrap() - 1) {
            Some(expected) => wrong.extend(differences(expected, &result, &streamed)),
            None => wrong.push(format!("attempt {number} to {}: {}", response.status, shown(&result))),
        }
        whole.add(&result, &streamed, &case.run.tools);
        if let Ok(turn) = result {
            messages.push(Arc::new(Message::Assistant(turn.clone().into_message())));
            messages.extend(turn.tool_calls.iter().map(|call| Arc::new(answer(call, &case.run.tools))));
        }
    }
    let bodies: Vec<Value> = upstream.requests().into_iter().map(|request| request.body).collect();
    wrong.extend(request_check::failed(&case.requests, &bodies));
    wrong.extend(upstream.take_rejections());
    wrong.extend(whole.contradictions(&case.expect, bodies.len()));
    wrong
}

/// What the attempts of a case come to together.
#[derive(Debug, Default)]
struct Whole {
    executed: Vec<Value>,
    usage: Option<ExpectUsage>,
    reasoning: String,
    text: String,
    first_delay: Option<Duration>,
    last: Option<Result<ModelTurn, ModelFailure>>,
}

impl Whole {
    fn add(&mut self, result: &Result<ModelTurn, ModelFailure>, streamed: &Streamed, tools: &[CaseTool]) {
        self.reasoning.push_str(&streamed.reasoning);
        self.text.clone_from(&streamed.text);
        match result {
            Ok(turn) => {
                if let Some(usage) = turn.usage {
                    let sum = self.usage.get_or_insert(ExpectUsage { input_tokens: 0, output_tokens: 0 });
                    sum.input_tokens += usage.input_tokens;
                    sum.output_tokens += usage.output_tokens;
                }
                let runs = |call: &&ToolCall| {
                    turn.finish != FinishReason::Length
                        && matches!(call.arguments, Arguments::Object(_))
                        && tools.iter().any(|tool| tool.name == call.name)
                };
                let calls = turn.tool_calls.iter().filter(runs);
                self.executed.extend(calls.map(|call| json!({"name": call.name, "arguments": call.arguments})));
            }
            Err(failure) => {
                let decision = Policy::default().next(failure, 1, Duration::from_secs(300), 0.0);
                self.first_delay = self.first_delay.or(match decision {
                    Decision::Retry { delay } => Some(delay),
                    Decision::GiveUp => None,
                });
            }
        }
        self.last = Some(result.clone());
    }

    /// Where this does not agree with what the report demands of a run.
    fn contradictions(&self, expect: &Expect, model_calls: usize) -> Vec<String> {
        let (status, answer, error) = match &self.last {
            Some(Ok(turn)) => ("completed", Some(turn.text()), None),
            Some(Err(failure)) => ("model_error", None, Some(failure.message.as_str())),
            None => ("none", None, None),
        };
        let is_status = expect.status == status || expect.status_any.iter().any(|other| other == status);
        let is_answer = expect.answer == answer || answer.is_some_and(|answer| expect.answer_any.contains(&answer));
        let is_executed = expect.tool_calls == self.executed || expect.tool_calls_any.contains(&self.executed);
        let must_not =
            expect.must_not_execute.iter().any(|name| self.executed.iter().any(|call| call["name"] == **name));
        let finish = self.last.as_ref().and_then(|last| last.as_ref().ok()).map(|turn| turn.finish);
        let holds = [
            ("status", is_status),
            ("answer", is_answer),
            ("tool_calls", is_executed && !must_not),
            ("usage", expect.usage.is_none() || expect.usage == self.usage),
            ("partial_answer", expect.partial_answer.as_ref().is_none_or(|partial| *partial == self.text)),
            ("finish", expect.finish.is_none() || expect.finish == finish),
            (
                "error",
                expect.error_contains.as_ref().is_none_or(|part| error.is_some_and(|error| error.contains(part))),
            ),
            ("reasoning", expect.reasoning.as_ref().is_none_or(|reasoning| *reasoning == self.reasoning)),
            ("model_calls", expect.model_calls.is_none_or(|calls| (calls.min..=calls.max).contains(&model_calls))),
            (
                "retry_delay",
                expect.min_retry_delay_ms.is_none_or(|least| self.first_delay >= Some(Duration::from_millis(least))),
            ),
        ];
        holds
            .iter()
            .filter(|(_, holds)| !holds)
            .map(|(what, _)| format!("{what} contradicts the report: {self:?}"))
            .collect()
    }
}

fn differences(expected: &Attempt, result: &Result<ModelTurn, ModelFailure>, streamed: &Streamed) -> Option<String> {
    match (expected, result) {
        (Attempt::Turn { turn: expected }, Ok(turn)) => {
            let calls = turn.tool_calls.iter().map(|call| (call.name.clone(), call.arguments.canonical()));
            let live = streamed.calls.values().map(|(name, raw)| (name.clone(), Arguments::parse(raw).canonical()));
            let same_calls = calls.eq(live);
            (expected != turn || streamed.text != turn.text() || !same_calls)
                .then(|| format!("a turn other than expected: {} from {streamed:?}", shown(result)))
        }
        (Attempt::Failure { failure, message_contains, retry_after_ms, text, reasoning }, Err(got)) => {
            let same = got.class == *failure
                && got.message.contains(message_contains)
                && got.retry_after == retry_after_ms.map(Duration::from_millis)
                && (&streamed.text, &streamed.reasoning) == (text, reasoning);
            (!same).then(|| format!("a failure other than expected: {got:?} after {streamed:?}"))
        }
        (Attempt::Turn { .. }, Err(_)) | (Attempt::Failure { .. }, Ok(_)) => {
            Some(format!("expected {expected:?}, got {}", shown(result)))
        }
    }
}

fn shown(result: &Result<ModelTurn, ModelFailure>) -> String {
    match result {
        Ok(turn) => json!({ "turn": turn }).to_string(),
        Err(failure) => json!({
            "failure": failure.class, "message_contains": failure.message, "retry_after_ms": failure.retry_after.map(|wait| wait.as_millis()),
        })
        .to_string(),
    }
}

fn spec(tool: &CaseTool) -> ToolSpec {
    ToolSpec {
        name: tool.name.parse().unwrap(),
        description: tool.description.clone(),
        parameters: tool.parameters.clone(),
    }
}

fn answer(call: &ToolCall, tools: &[CaseTool]) -> Message {
    let tool = tools.iter().find(|tool| tool.name == call.name);
    let (content, outcome) = match (tool, &call.arguments) {
        (Some(tool), Arguments::Object(_)) => (tool.returns.clone(), OutcomeKind::Result),
        (Some(_), Arguments::Malformed(raw)) => (format!("not a JSON object: {raw}"), OutcomeKind::Error),
        (None, _) => (format!("no such tool: {}", call.name), OutcomeKind::Error),
    };
    Message::Tool(ToolMessage {
        call_id: call.id.clone(),
        name: call.name.clone(),
        content,
        outcome,
        is_error: hames::domain::ErrorMark,
    })
}
