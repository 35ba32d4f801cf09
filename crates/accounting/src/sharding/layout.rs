//! The regions of parameters that are divided together.

use super::{ALIGNMENT, BUCKET_BYTES, LayerPosition, Parameter, Region};
use crate::exact::{positive, product, sum};
use crate::lora::LowRank;
use crate::memory::recipe::Recipe;
use crate::memory::zero::ZeroStage;
use crate::model::{AttentionKind, Decoder};
use crate::offload;
use crate::parameters::ParameterTensor;
use crate::{Dtype, Error};

/// How a model's parameters are divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The model states that are divided.
    pub stage: ZeroStage,
    /// Number of ranks that divide one replica.
    pub ranks: u64,
    /// Number of replicas (hybrid sharding).
    pub replicas: u64,
    /// All regions, in the order of forward; those that are gathered come last.
    pub regions: Vec<Region>,
}

/// Elements of a parameter, and its position in the model.
type Placed = (u64, LayerPosition);

/// Dtypes of weights and of gradients, if any.
type Formats = (Dtype, Option<Dtype>);

impl Layout {
    /// Divides a decoder that is trained as a whole, in buckets of [`BUCKET_BYTES`].
    ///
    /// # Errors
    /// No ranks; counts beyond 64 bits.
    pub fn of_decoder(model: &Decoder, recipe: &Recipe, stage: ZeroStage, ranks: u64) -> Result<Self, Error> {
        Self::of_decoder_in(model, recipe, stage, ranks, BUCKET_BYTES)
    }

    /// Divides a decoder that is trained as a whole, in buckets of `bucket_bytes` at least.
    ///
    /// # Errors
    /// As [`Layout::of_decoder`].
    pub fn of_decoder_in(
        model: &Decoder,
        recipe: &Recipe,
        stage: ZeroStage,
        ranks: u64,
        bucket_bytes: u64,
    ) -> Result<Self, Error> {
        let formats = (recipe.parameters, Some(recipe.gradients));
        let block = elements(model.block_tensors()?)?;
        let at = |tensors: Vec<ParameterTensor>, position: LayerPosition| -> Result<Vec<Placed>, Error> {
            Ok(elements(tensors)?.into_iter().map(|elements| (elements, position)).collect())
        };
        let before = at(model.tensors_before_blocks(), LayerPosition::Before)?;
        let after = at(model.tensors_after_blocks(), LayerPosition::After)?;
        if stage == ZeroStage::Three {
            let outside = [before, after].concat();
            let regions = buckets(&outside, formats, bucket_bytes)?;
            return Self::new(stage, ranks, regions)?.with_layers(model, &[(&block, formats)]);
        }
        let blocks = (0..model.layers)
            .flat_map(|layer| block.iter().map(move |&elements| (elements, LayerPosition::Layer(layer))));
        let all: Vec<Placed> = before.into_iter().chain(blocks).chain(after).collect();
        Self::new(stage, ranks, buckets(&all, formats, bucket_bytes)?)
    }

    /// Divides adapters, which are in fp32, and in stage 3 the frozen layers with them, whose weights are in `base`. Frozen weights outside
    /// of the layers are whole on each rank, and no region.
    ///
    /// # Errors
    /// No ranks; adapters that [`LowRank`] refuses; counts beyond 64 bits.
    pub fn of_adapters(
        model: &Decoder,
        lora: &LowRank,
        base: Dtype,
        stage: ZeroStage,
        ranks: u64,
    ) -> Result<Self, Error> {
        let (frozen, adapters) =
            (elements(model.block_tensors()?)?, lora.tensors(model, AttentionKind::Full)?);
        let trained = (LowRank::WIDE, Some(LowRank::WIDE));
        if stage == ZeroStage::Three {
            let layer: [(&[u64], Formats); 2] = [(&frozen, (base, None)), (&adapters, trained)];
            return Self::new(stage, ranks, Vec::new())?.with_layers(model, &layer);
        }
        let of_layer = |layer| adapters.iter().map(move |&elements| (elements, LayerPosition::Layer(layer)));
        let all: Vec<Placed> = (0..model.layers).flat_map(of_layer).collect();
        let mut regions = buckets(&all, trained, BUCKET_BYTES)?;
        for layer in 0..model.layers {
            let placed: Vec<Placed> =
                frozen.iter().map(|&elements| (elements, LayerPosition::Layer(layer))).collect();
            regions.push(region(&placed, (base, None), ALIGNMENT, None)?);
        }
        Self::new(stage, ranks, regions)
    }

    fn new(stage: ZeroStage, ranks: u64, regions: Vec<Region>) -> Result<Self, Error> {
        Ok(Self { stage, ranks: positive("the number of ranks", ranks)?, replicas: 1, regions })
    }

    /// Makes it the division of each of `replicas`, which have as many ranks each.
    ///
    /// # Errors
    /// No replicas.
    pub fn with_replicas(self, replicas: u64) -> Result<Self, Error> {
        Ok(Self { replicas: positive("the number of replicas", replicas)?, ..self })
    }

    /// Places trained parameters at multiples of so many elements where that is more than [`ALIGNMENT`], as state in blocks needs.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub(crate) fn aligned(mut self, alignment: u64) -> Result<Self, Error> {
        if alignment <= ALIGNMENT {
            return Ok(self);
        }
        for one in self.regions.iter_mut().filter(|one| one.layer.is_none() && one.gradients.is_some()) {
            let placed: Vec<Placed> = one
                .parameters
                .iter()
                .map(|parameter| (parameter.range.end - parameter.range.start, parameter.position))
                .collect();
            *one = region(&placed, (one.dtype, one.gradients), alignment, None)?;
        }
        Ok(self)
    }

    /// Whether there is one rank in all.
    pub(super) fn is_alone(&self) -> bool {
        self.ranks == 1 && self.replicas == 1
    }

    /// Adds the model's layers, whose weights are divided: each a region for each of `parts`.
    fn with_layers(mut self, model: &Decoder, parts: &[(&[u64], Formats)]) -> Result<Self, Error> {
        for layer in 0..model.layers {
            for (elements, formats) in parts {
                let placed: Vec<Placed> =
                    elements.iter().map(|&elements| (elements, LayerPosition::Layer(layer))).collect();
                let alignment = offload::ALIGNMENT * 8 / formats.0.storage_bits();
                self.regions.push(region(&placed, *formats, alignment, Some(layer))?);
            }
        }
        Ok(self)
    }
}

fn elements(tensors: Vec<ParameterTensor>) -> Result<Vec<u64>, Error> {
    tensors.iter().map(ParameterTensor::elements).collect()
}

/// Places parameters one after the other, each at a multiple of `alignment` elements.
pub(super) fn region(
    placed: &[Placed],
    (dtype, gradients): Formats,
    alignment: u64,
    layer: Option<u64>,
) -> Result<Region, Error> {
    const WHAT: &str = "elements of a region";
    let (mut parameters, mut elements) = (Vec::new(), 0);
    for &(count, position) in placed {
        let end = sum(WHAT, [elements, count])?;
        parameters.push(Parameter { range: elements..end, position });
        elements = product(WHAT, &[end.div_ceil(alignment), alignment])?;
    }
    Ok(Region { parameters, elements, dtype, gradients, layer })
}

/// Divides parameters into buckets of whole ones.
pub(super) fn buckets(placed: &[Placed], formats: Formats, bucket_bytes: u64) -> Result<Vec<Region>, Error> {
    let (mut regions, mut bucket, mut bytes) = (Vec::new(), Vec::new(), 0);
    for &(elements, position) in placed {
        bucket.push((elements, position));
        bytes += formats.0.bytes(elements)?;
        if bytes >= bucket_bytes {
            regions.push(region(&bucket, formats, ALIGNMENT, None)?);
            (bucket, bytes) = (Vec::new(), 0);
        }
    }
    if !bucket.is_empty() {
        regions.push(region(&bucket, formats, ALIGNMENT, None)?);
    }
    Ok(regions)
}
