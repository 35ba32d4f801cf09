//! The nesting of operators in operators, and of both in the phases of steps.
//!
//! Events of a thread nest. The self time of an operator is its duration minus that of the operators directly within it, so
//! that the self times of a thread add up to the time in which it ran operators. Work of another thread (the engine's, in a
//! backward on CUDA) belongs to the step and phase in which it started. Threads of loader workers are separate.

use std::cmp::Reverse;
use std::collections::HashSet;

use super::composition::Phase;
use super::error::ProfileError;
use super::trace_file::{Operator, Profile};

/// The position of an operator in the nesting; one for each of the profile's operators.
#[derive(Debug, Clone, Copy)]
pub(super) struct OperatorContext {
    /// The enclosing operator or node, as an index into the profile's operators.
    pub(super) parent: Option<u32>,
    /// Self time in nanoseconds.
    pub(super) self_time: i64,
    /// Whether it is a node of the autograd graph instead of an operator.
    pub(super) node: bool,
    /// Whether the program or a node called it, instead of another operator.
    pub(super) called: bool,
    /// Whether it computes: it calls no other operator that does, or most of its time is its own.
    pub(super) works: bool,
    /// The step in which it started.
    pub(super) step: Option<u32>,
    /// The last step that started before it, whether or not it had ended.
    pub(super) cycle: Option<u32>,
    /// The phase of the step in which it started; the rest outside of steps.
    pub(super) phase: Phase,
    /// Whether a loader's worker ran it.
    pub(super) worker: bool,
}

/// A step of the training.
#[derive(Debug)]
pub(super) struct TimedStep {
    pub(super) thread: i64,
    pub(super) start: i64,
    pub(super) end: i64,
    /// The named phases, in order, disjoint.
    pub(super) phases: Vec<(Phase, i64, i64)>,
}

impl TimedStep {
    pub(super) fn length(&self) -> i64 {
        self.end - self.start
    }

    fn phase_at(&self, at: i64) -> Phase {
        let after = self.phases.partition_point(|&(_, start, _)| start <= at);
        match after.checked_sub(1).map(|index| self.phases[index]) {
            Some((phase, _, end)) if at < end => phase,
            _ => Phase::Rest,
        }
    }
}

#[derive(Debug)]
pub(super) struct Timeline {
    pub(super) steps: Vec<TimedStep>,
    pub(super) contexts: Vec<OperatorContext>,
}

/// The range name of loader workers.
pub(super) const LOAD: &str = "load";
/// The range name of tokenizing.
pub(super) const TOKENIZE: &str = "tokenize";

impl Timeline {
    pub(super) fn new(profile: &Profile) -> Result<Self, ProfileError> {
        let steps = steps(profile);
        if steps.is_empty() {
            return Err(ProfileError::NoSteps { operators: profile.operators.len() });
        }
        let workers: HashSet<i64> = profile
            .ranges
            .iter()
            .filter(|range| [LOAD, TOKENIZE].contains(&profile.range_name(range)))
            .map(|range| range.thread)
            .filter(|thread| steps.iter().all(|step| step.thread != *thread))
            .collect();
        let mut contexts: Vec<OperatorContext> = profile
            .operators
            .iter()
            .map(|operator| {
                let cycle = steps.partition_point(|step| step.start <= operator.start).checked_sub(1);
                let inside = cycle.filter(|&index| operator.start < steps[index].end);
                OperatorContext {
                    parent: None,
                    self_time: operator.end - operator.start,
                    node: is_node(profile.operator_name(operator)),
                    called: false,
                    works: false,
                    step: inside.map(|index| index as u32),
                    cycle: cycle.map(|index| index as u32),
                    phase: inside.map_or(Phase::Rest, |index| steps[index].phase_at(operator.start)),
                    worker: workers.contains(&operator.thread),
                }
            })
            .collect();
        nest(profile, &mut contexts);
        Ok(Self { steps, contexts })
    }

    /// Returns the index of the step at a moment.
    pub(super) fn step_at(&self, at: i64) -> Option<usize> {
        let index = self.steps.partition_point(|step| step.start <= at).checked_sub(1)?;
        (at < self.steps[index].end).then_some(index)
    }
}

fn steps(profile: &Profile) -> Vec<TimedStep> {
    let mut ranges: Vec<_> = profile.ranges.iter().collect();
    ranges.sort_by_key(|range| (range.start, Reverse(range.end)));
    let mut steps: Vec<TimedStep> = Vec::new();
    for range in &ranges {
        let inner = steps.last().is_some_and(|step| range.start < step.end);
        if profile.range_name(range) == "step" && !inner {
            let (thread, start, end) = (range.thread, range.start, range.end);
            steps.push(TimedStep { thread, start, end, phases: Vec::new() });
        }
    }
    for range in &ranges {
        let (Some(phase), Some(index)) = (
            Phase::named(profile.range_name(range)),
            steps.partition_point(|step| step.start <= range.start).checked_sub(1),
        ) else {
            continue;
        };
        let step = &mut steps[index];
        let inner = step.phases.last().is_some_and(|&(_, _, end)| range.start < end);
        if range.thread == step.thread && range.end <= step.end && !inner {
            step.phases.push((phase, range.start, range.end));
        }
    }
    steps
}

/// Computes parents, self times, and which operators compute, thread by thread.
fn nest(profile: &Profile, contexts: &mut [OperatorContext]) {
    let operators = &profile.operators;
    let mut order: Vec<u32> = (0..operators.len() as u32).collect();
    // Kineto writes an operator before those that it calls; the stable sort keeps this for equal times.
    order.sort_by_key(|&index| {
        let operator = &operators[index as usize];
        (operator.thread, operator.start, Reverse(operator.end))
    });
    let mut open: Vec<u32> = Vec::new();
    for &index in &order {
        let operator = &operators[index as usize];
        while open.last().is_some_and(|&top| {
            let top = &operators[top as usize];
            top.thread != operator.thread || top.end <= operator.start
        }) {
            open.pop();
        }
        let parent = open.last().copied();
        let around = parent.map(|parent| contexts[parent as usize]);
        if let Some(parent) = parent {
            let inside = operator.end.min(operators[parent as usize].end) - operator.start;
            contexts[parent as usize].self_time = (contexts[parent as usize].self_time - inside).max(0);
        }
        let context = &mut contexts[index as usize];
        context.parent = parent;
        context.called = !context.node && around.is_none_or(|around| around.node);
        open.push(index);
    }
    // From the inside out: an operator that calls one that computes does not compute itself, unless it spends most of its time
    // outside of its calls: `addmm` copies the bias first, attention fills its gradients.
    let mut calls_work = vec![false; contexts.len()];
    for &index in order.iter().rev() {
        let (name, index) = (profile.operator_name(&operators[index as usize]), index as usize);
        let computes = !contexts[index].node && !is_free(name);
        let self_time = contexts[index].self_time;
        let mostly_own =
            self_time >= LONGER_THAN_A_CALL && 2 * self_time >= operators[index].end - operators[index].start;
        contexts[index].works = computes && (!calls_work[index] || mostly_own);
        let calls = calls_work[index] || computes && !of_numbers(&operators[index]);
        if let Some(parent) = contexts[index].parent.filter(|_| calls) {
            calls_work[parent as usize] = true;
        }
    }
}

/// Nanoseconds that a call without work of its own never takes.
const LONGER_THAN_A_CALL: i64 = 20_000;

/// Whether an operator has inputs, and all of them are single numbers: converting the 0.1 of x · 0.1 does not mean that the
/// product does not compute.
fn of_numbers(operator: &Operator) -> bool {
    let shapes = || operator.inputs.iter().flat_map(|input| input.dims.shapes());
    !operator.inputs.is_empty() && shapes().all(|shape| shape.is_empty())
}

/// Whether a name is that of a node of the autograd graph: `MmBackward0`, `torch::autograd::AccumulateGrad`, or the engine's
/// own frame around a node.
fn is_node(name: &str) -> bool {
    !name.contains("::") || name.starts_with("autograd::") || name.starts_with("torch::autograd::")
}

/// Whether an operator only creates a view or reserves memory.
fn is_free(name: &str) -> bool {
    const FREE: &[&str] = &[
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "as_strided_",
        "broadcast_tensors",
        "chunk",
        "contiguous",
        "detach",
        "detach_",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "expand_as",
        "flatten",
        "lift_fresh",
        "movedim",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "permute",
        "requires_grad_",
        "reshape",
        "resize_",
        "resolve_conj",
        "resolve_neg",
        "result_type",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "squeeze_",
        "swapaxes",
        "t",
        "to",
        "transpose",
        "transpose_",
        "unbind",
        "unflatten",
        "unsafe_chunk",
        "unsafe_split",
        "unsqueeze",
        "unsqueeze_",
        "view",
        "view_as",
    ];
    name.strip_prefix("aten::").is_some_and(|name| FREE.binary_search(&name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_and_views_are_recognised_by_name() {
        for name in
            ["MmBackward0", "torch::autograd::AccumulateGrad", "autograd::engine::evaluate_function: X"]
        {
            assert!(is_node(name), "{name}");
        }
        assert!(!is_node("aten::mm") && !is_node("c10d::allreduce_"));
        for name in ["aten::_reshape_alias", "aten::t", "aten::view", "aten::view_as"] {
            assert!(is_free(name), "{name}");
        }
        assert!(!is_free("aten::mm") && !is_free("aten::copy_") && !is_free("t"));
    }
}
