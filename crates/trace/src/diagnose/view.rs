//! The detectors' view of a trace.

use std::collections::BTreeMap;

use super::TrainingFacts;
use crate::composition::{Composition, Phase, median, seconds};
use crate::timeline::{OperatorContext, Timeline};
use crate::trace_file::{Operator, Profile};

pub(super) struct View<'a> {
    pub(super) profile: &'a Profile,
    pub(super) timeline: &'a Timeline,
    pub(super) composition: &'a Composition,
    pub(super) facts: &'a TrainingFacts,
}

/// An operator with its context.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) index: usize,
    pub(super) name: &'a str,
    pub(super) operator: &'a Operator,
    pub(super) context: &'a OperatorContext,
}

impl<'a> Seen<'a> {
    /// The shape of an input; empty without one.
    pub(super) fn shape(&self, input: usize) -> &'a [i64] {
        self.operator.inputs.get(input).map_or(&[], |input| input.dims.shape())
    }

    pub(super) fn seconds(&self) -> f64 {
        seconds(self.operator.end - self.operator.start)
    }
}

impl<'a> View<'a> {
    fn at(&self, index: usize) -> Seen<'a> {
        let operator = &self.profile.operators[index];
        let context = &self.timeline.contexts[index];
        Seen { index, name: self.profile.operator_name(operator), operator, context }
    }

    /// Everything that the training ran, also between steps, without loader workers.
    pub(super) fn all(&self) -> impl Iterator<Item = Seen<'a>> {
        (0..self.profile.operators.len()).map(|index| self.at(index)).filter(|seen| !seen.context.worker)
    }

    /// Everything that ran within steps, with the step.
    pub(super) fn in_steps(&self) -> impl Iterator<Item = (usize, Seen<'a>)> {
        self.all().filter_map(|seen| Some((seen.context.step? as usize, seen)))
    }

    /// Everything that ran within the ranges of one part of the steps.
    pub(super) fn in_phase(&self, phase: Phase) -> impl Iterator<Item = (usize, Seen<'a>)> {
        self.in_steps().filter(move |(_, seen)| seen.context.phase == phase)
    }

    /// Returns the enclosing operator or node.
    pub(super) fn parent(&self, seen: &Seen<'_>) -> Option<Seen<'a>> {
        seen.context.parent.map(|parent| self.at(parent as usize))
    }

    /// Returns the operator that the program or a node called: this one, or one around it.
    pub(super) fn outermost(&self, seen: Seen<'a>) -> Seen<'a> {
        let mut outermost = seen;
        while let Some(around) = self.parent(&outermost).filter(|around| !around.context.node) {
            outermost = around;
        }
        outermost
    }

    /// Returns the dtype of an input, in Kineto's words.
    pub(super) fn kind(&self, seen: &Seen<'a>, input: usize) -> &'a str {
        seen.operator.inputs.get(input).map_or("", |input| self.profile.input_kind(input))
    }

    pub(super) fn tally(&self) -> Tally {
        let steps = self.timeline.steps.len();
        Tally {
            counts: vec![0.0; steps],
            seconds: vec![0.0; steps],
            step_seconds: self.composition.median.seconds,
            shapes: BTreeMap::new(),
        }
    }

    /// Returns the shapes of the parameters that got gradients, and their number in the median step. A gradient that
    /// accumulates over several backward passes counts once.
    pub(super) fn parameters(&self) -> (Vec<&'a [i64]>, f64) {
        let (mut shapes, mut nodes) = (Vec::new(), self.tally());
        let mut passes = vec![0.0_f64; self.timeline.steps.len()];
        for (step, seen) in self.in_steps() {
            if seen.name == "torch::autograd::AccumulateGrad" {
                shapes.push(seen.shape(0));
                nodes.add(step, 0.0);
            }
        }
        for (passes, step) in passes.iter_mut().zip(&self.timeline.steps) {
            *passes = step.phases.iter().filter(|(phase, ..)| *phase == Phase::Backward).count() as f64;
        }
        shapes.sort_unstable();
        shapes.dedup();
        (shapes, median(nodes.counts.iter().zip(passes).map(|(nodes, passes)| nodes / passes.max(1.0))))
    }
}

/// Counts and seconds by step, and the observed shapes.
pub(super) struct Tally {
    counts: Vec<f64>,
    seconds: Vec<f64>,
    step_seconds: f64,
    shapes: BTreeMap<String, usize>,
}

impl Tally {
    pub(super) fn add(&mut self, step: usize, seconds: f64) {
        self.counts[step] += 1.0;
        self.seconds[step] += seconds;
    }

    /// Adds time to the last count.
    pub(super) fn also(&mut self, step: usize, seconds: f64) {
        self.seconds[step] += seconds;
    }

    pub(super) fn saw(&mut self, what: String) {
        *self.shapes.entry(what).or_default() += 1;
    }

    /// The count in the median step.
    pub(super) fn count(&self) -> f64 {
        median(self.counts.iter().copied())
    }

    pub(super) fn seconds(&self) -> f64 {
        median(self.seconds.iter().copied())
    }

    /// The time as a share of the median step.
    pub(super) fn share(&self) -> f64 {
        if self.step_seconds > 0.0 { self.seconds() / self.step_seconds } else { 0.0 }
    }

    /// The most frequent observations, at most three.
    pub(super) fn shapes(&self) -> String {
        let mut shapes: Vec<_> = self.shapes.iter().collect();
        shapes.sort_by_key(|&(_, &count)| std::cmp::Reverse(count));
        let more = if shapes.len() > 3 { ", …" } else { "" };
        let named: Vec<&str> = shapes.iter().take(3).map(|(shape, _)| shape.as_str()).collect();
        named.join(", ") + more
    }
}

/// `1 × in a step`, `2.5 × in a step`.
pub(super) fn times(count: f64) -> String {
    format!("{count} × in a step")
}
