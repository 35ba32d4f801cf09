//! Gated DeltaNet in place of a block's attention, as `models` runs it.
//!
//! With n tokens, C channels of the convolution, values of width E in all value heads H:
//!
//! ```text
//! forward    q·k·v [n, C], z [n, E], b, a [n, H] · decays and rates in fp32 · convolution [n, C] · delta rule [n, E]
//!            norm by head [n, E] · SiLU(z) ⊙ norm [n, E] · output
//! backward   output · SiLU ⊙ · norm · delta rule · convolution · a, b, z, q·k·v
//! ```
//!
//! From forward to backward it keeps the convolution's input and result, z, the norm's output, some numbers for each head and, where the output's
//! projection learns, its input. The gradient of z waits until the delta rule and the convolution have run backward.

use decoder::LinearSizes;

use super::delta_rule::DeltaRule;
use super::{Block, BlockOptions, Recorded};
use crate::exact::product;
use crate::lora::Projection;
use crate::memory::Item;
use crate::passes::PeakTracker;
use crate::{Error, exact};

const WHAT: &str = "bytes of linear attention";

/// Bytes of its tensors.
pub(super) struct DeltaNet {
    /// `[n, C]`; in fp32 where it is cast, and with the tokens before each row.
    channels: u64,
    wide_channels: u64,
    padded: u64,
    /// `[n, E]`.
    values: u64,
    /// `[n, H]` in the dtype of products and in fp32.
    heads: u64,
    wide_heads: u64,
    rule: DeltaRule,
    /// Gradients of the convolution, the decays and the norm, as far as they are counted.
    gradients: u64,
    is_narrow: bool,
}

impl DeltaNet {
    pub(super) fn new(linear: &LinearSizes, options: &BlockOptions<'_>) -> Result<Self, Error> {
        let BlockOptions { tokens, rows, recipe, gradients, trained, .. } = *options;
        if recipe.casts {
            return Err(Error::Shape {
                what: "linear attention in mixed precision is not modelled".into(),
                remedy: "take bfloat16, or measure a step instead".into(),
            });
        }
        let c = recipe.compute.storage_bits() / 8;
        let size = |size: Option<u64>| exact::product(WHAT, &[size.unwrap_or(u64::MAX)]);
        let (channels, values) = (size(linear.channels())?, size(linear.values())?);
        let activation = |width: u64, bytes: u64| product(WHAT, &[tokens, width, bytes]);
        let before = product(WHAT, &[rows, linear.window - 1, channels, 4])?;
        let wide = activation(channels, 4)?;
        let own = [product(WHAT, &[channels, linear.window])?, 2 * linear.value_heads, linear.value];
        let is_trained = gradients && matches!(trained, super::Trained::Everything);
        Ok(Self {
            channels: activation(channels, c)?,
            wide_channels: wide,
            padded: exact::sum(WHAT, [wide, before])?,
            values: activation(values, c)?,
            heads: activation(linear.value_heads, c)?,
            wide_heads: activation(linear.value_heads, 4)?,
            rule: DeltaRule::new(linear, options.work(), c)?,
            gradients: if is_trained { recipe.gradients.bytes(exact::sum(WHAT, own)?)? } else { 0 },
            is_narrow: c < 4,
        })
    }

    /// Numbers of the decays and rates that are kept.
    fn kept_heads(&self, everything: bool) -> u64 {
        (if everything { 4 } else { 3 }) * self.wide_heads
    }

    /// Its results of products: q·k·v, z, b and a.
    pub(super) fn products(&self) -> u64 {
        self.channels + self.values + 2 * self.heads
    }
}

impl Block {
    /// Lists what linear attention keeps.
    pub(super) fn kept_of_linear(&self, linear: &DeltaNet, recorded: &Recorded) -> Vec<Item> {
        let mut items = Vec::new();
        let mut keep = |condition: bool, name, bytes| {
            if condition {
                items.push(Item { name, bytes });
            }
        };
        keep(recorded.attention, "convolution's input", linear.channels);
        keep(recorded.attention, "query, key, value", linear.channels);
        keep(recorded.attention, "decays and rates", linear.kept_heads(self.everything));
        keep(recorded.attention, "states", linear.rule.kept());
        keep(recorded.attention, "gate", linear.values);
        keep(recorded.attention && !self.keeps_output, "delta rule's result", linear.values);
        keep(recorded.attention, "norm of the delta rule's result", linear.values);
        keep(recorded.attention, "norm statistics", linear.wide_heads);
        keep(self.learns(&[Projection::LinearOutput]), "attention output", linear.values);
        items
    }

    /// Runs from the projections of the attention's input to that of its output.
    pub(super) fn forward_linear(
        &self,
        linear: &DeltaNet,
        tracker: &mut PeakTracker,
        record: bool,
        input: bool,
    ) {
        use Projection::{LinearDecay, LinearGate, LinearOutput, LinearQkv, LinearRate};
        let recorded = self.recorded(input);
        let keeps = record && recorded.attention;
        let before = tracker.live();
        let low: u64 = Projection::LINEAR.iter().map(|one| self.kept_by_adapter(*one)).sum();
        self.project_norm(tracker, &[LinearQkv, LinearGate, LinearRate, LinearDecay], record);
        // Decays and rates.
        tracker.make(4 * linear.wide_heads);
        tracker.free(2 * linear.heads);
        tracker.free(4 * linear.wide_heads - linear.kept_heads(self.everything));
        // The convolution: its input in fp32 with the tokens before, the sums, the result.
        tracker.touch(if linear.is_narrow { linear.wide_channels + linear.padded } else { 0 });
        tracker.make(linear.padded + linear.wide_channels);
        if linear.is_narrow {
            tracker.make(linear.channels);
            tracker.free(linear.wide_channels);
        }
        tracker.touch(if self.documents { linear.wide_channels } else { 0 });
        tracker.free(linear.padded);
        if !keeps {
            tracker.free(linear.channels);
        }
        linear.rule.forward(tracker, keeps);
        if !keeps {
            tracker.free(linear.channels + linear.kept_heads(self.everything));
        }
        // The norm, and SiLU(z) ⊙ norm.
        tracker.make(linear.values + linear.wide_heads);
        tracker.make(linear.values);
        if !keeps || self.keeps_output {
            tracker.free(linear.values);
        }
        if !keeps {
            tracker.free(2 * linear.values + linear.wide_heads);
        }
        self.project(tracker, LinearOutput, record);
        // What is left is what is kept, and the result.
        let kept: u64 = match record {
            true => self.kept_of_linear(linear, &recorded).iter().map(|item| item.bytes).sum::<u64>() + low,
            false => 0,
        };
        tracker.release_since(before);
        tracker.make(kept + self.operand);
    }

    /// Runs from the output's projection to those of the input.
    pub(super) fn backward_of_linear(&self, linear: &DeltaNet, tracker: &mut PeakTracker, input: bool) {
        use Projection::{LinearDecay, LinearGate, LinearOutput, LinearQkv, LinearRate};
        let recorded = self.recorded(input);
        if recorded.middle {
            self.project_branch_back(tracker, LinearOutput, recorded.attention);
        }
        if self.learns(&[LinearOutput]) {
            tracker.free(linear.values);
        }
        if !recorded.attention {
            return;
        }
        // Gradients of z and of the norm's output; z and the gradient of the product are freed.
        tracker.make(2 * linear.values);
        tracker.free(2 * linear.values);
        // The norm's, in place.
        tracker.make(linear.gradients);
        tracker.free(linear.values + linear.wide_heads);
        if !self.keeps_output {
            tracker.free(linear.values);
        }
        linear.rule.backward(tracker);
        tracker.make(2 * linear.wide_heads);
        // The gradient of the result, and q, k and v.
        tracker.free(linear.values + linear.channels);
        tracker.touch(linear.channels);
        // The convolution: sums again, the slope of SiLU, the gradients of the sums and of the input.
        let before = tracker.live();
        tracker.touch(if linear.is_narrow { linear.wide_channels + linear.padded } else { 0 });
        tracker.make(linear.padded + linear.wide_channels);
        tracker.touch(4 * linear.wide_channels);
        tracker.make(linear.wide_channels);
        tracker.free(linear.wide_channels);
        tracker.make(linear.padded);
        tracker.touch(if self.everything || self.documents { linear.wide_channels } else { 0 });
        tracker.make(if linear.is_narrow { linear.channels } else { 0 });
        tracker.release_since(before);
        // The gradient of the input replaces that of the result; the input is freed.
        tracker.free(linear.channels);
        tracker.touch(linear.wide_heads);
        tracker.free(linear.kept_heads(self.everything) + 2 * linear.wide_heads);
        tracker.make(2 * linear.heads);
        let gradients = [
            (LinearDecay, linear.heads),
            (LinearRate, linear.heads),
            (LinearGate, linear.values),
            (LinearQkv, linear.channels),
        ];
        self.project_norm_back(tracker, &gradients, recorded.input);
    }
}
