//! The backend's own reductions against those in order.
#![allow(clippy::print_stdout, reason = "the results of a rank, which the test reads")]

use runtime::collectives::Group as Ranks;
use serde::{Deserialize, Serialize};
use sharding::{Reduction, ShardedOptimizer, ShardingConfig, Stage};
use tch::{Device, Kind, Tensor};
use training::optimizer::{Group, Optimizer, Sgd, StepSettings};
use training::scaler::NoScaler;

use crate::trainings::{self, Place};

const ROUNDS: usize = 3;
/// Of two parameters: less than a block, and several, none a multiple of the ranks.
const SIZES: [i64; 2] = [37, 9001];

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Case {
    replicas: usize,
    stage_two: bool,
    native: bool,
    place: Place,
}

/// The gradients of a micro-batch, between ±1, for parameter `index`.
fn gradient(index: usize, micro_batch: usize) -> Vec<f32> {
    let of = |at: i64| ((at as f64 + 1.7 * micro_batch as f64) * (12.9898 + index as f64)).sin() as f32;
    (0..SIZES[index]).map(of).collect()
}

impl Case {
    /// Steps weights of 0 by minus their gradients' sums, and prints them.
    fn run(&self, ranks: &Ranks, number: usize) -> training::Result<()> {
        let weights =
            SIZES.map(|size| Tensor::zeros([size], (Kind::Float, Device::Cpu)).set_requires_grad(true));
        let named =
            weights.iter().enumerate().map(|(index, weight)| (format!("w{index}"), weight.shallow_clone()));
        let groups = vec![Group::new(named, 1.0)];
        let options = ShardingConfig {
            stage: if self.stage_two { Stage::Two } else { Stage::One },
            reduction: if self.native { Reduction::Native } else { Reduction::Ordered },
            bucket_bytes: 1,
            ..ShardingConfig::default()
        };
        let mesh = trainings::mesh(ranks, self.replicas, self.place)?;
        let mut optimizer = ShardedOptimizer::new(Sgd, groups, mesh, options)?;
        optimizer.begin(StepSettings::default())?;
        for round in 0..ROUNDS {
            let mut loss = Tensor::zeros([], (Kind::Float, Device::Cpu));
            for (index, weight) in weights.iter().enumerate() {
                let gradient = Tensor::from_slice(&gradient(index, round * ranks.size() + ranks.rank()));
                loss += (weight * gradient).sum(Kind::Float);
            }
            runtime::autograd::backward(&[&loss])?;
            optimizer.reduce()?;
        }
        let decision = optimizer.unscale_and_clip(&mut NoScaler)?;
        optimizer.take_step(&decision)?;
        for weight in &weights {
            let values = Vec::<f32>::try_from(weight.detach())?;
            let bits: Vec<String> = values.iter().map(|value| format!("{:08x}", value.to_bits())).collect();
            println!("training {number}: {}", bits.join(" "));
        }
        ranks.barrier("end")?;
        Ok(())
    }
}

/// A rank's process runs this test alone.
#[test]
fn a_rank_that_reduces() {
    trainings::rank(|_: &Case| trainings::TIMEOUT, Case::run);
}

#[test]
fn native_reductions_differ_by_rounding_alone() {
    let mut runs = Vec::new();
    for (count, replicas) in [(2, 1), (3, 1), (4, 2), (2, 2)] {
        for (stage_two, native) in [(false, false), (false, true), (true, true)] {
            for place in [Place::Host, Place::StandIn] {
                runs.push((Case { replicas, stage_two, native, place }, count));
            }
        }
    }
    let printed = trainings::run("reduction::a_rank_that_reduces", &runs);
    for ((case, count), of_ranks) in runs.iter().zip(&printed) {
        assert!(of_ranks.iter().all(|lines| lines.len() == SIZES.len() && *lines == of_ranks[0]), "{case:?}");
        for (index, line) in of_ranks[0].iter().enumerate() {
            let found = line.split(' ').map(|bits| f32::from_bits(u32::from_str_radix(bits, 16).unwrap()));
            let terms: Vec<Vec<f32>> = (0..ROUNDS * count).map(|number| gradient(index, number)).collect();
            let mut differs = 0;
            for (at, found) in found.enumerate() {
                let term = |number: usize| terms[number][at];
                let in_order = (0..terms.len()).fold(-0.0f32, |sum, number| sum + term(number));
                let sum_of_sizes: f64 = (0..terms.len()).map(|number| f64::from(term(number).abs())).sum();
                // Each of the two orders rounds each of its additions.
                let bound = 2.0 * (terms.len() - 1) as f64 * 2f64.powi(-24) * sum_of_sizes;
                let difference = (f64::from(found) + f64::from(in_order)).abs();
                assert!(difference <= bound, "{case:?}, {count} ranks, w{index}[{at}]: {difference}");
                differs += usize::from(difference > 0.0);
            }
            assert!(case.native || differs == 0, "{case:?}, {count} ranks: {differs} differ");
            // Of two ranks, the rounds are added in another order.
            assert!(!case.native || index == 0 || differs > 0, "{case:?}, {count} ranks: as in order");
        }
    }
}
