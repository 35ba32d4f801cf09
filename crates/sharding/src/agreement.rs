//! Checks that all ranks have the same model and settings.

use runtime::collectives;
use tch::{Device, Kind, Tensor};
use training::optimizer::{Group, Rule};

use crate::Result;
use crate::mesh::Mesh;
use crate::optimizer::ShardingConfig;
use crate::shards::Shards;

/// Makes sure that all ranks have the same optimizer, parameters and values.
pub(crate) fn agree(rule: &dyn Rule, groups: &[Group], mesh: &Mesh, options: &ShardingConfig) -> Result<()> {
    let parts = mesh.sequence().map_or(1, collectives::Group::size);
    let mut fields = vec![
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("optimizer".to_owned(), format!("{rule:?}")),
        ("options".to_owned(), format!("{:?}", ShardingConfig { order: Vec::new(), ..options.clone() })),
        ("order of parameters".to_owned(), options.order.join(" ")),
        ("replicas".to_owned(), mesh.replicas().to_string()),
        ("ranks that divide a row".to_owned(), parts.to_string()),
        ("threads".to_owned(), tch::get_num_threads().to_string()),
    ];
    for group in groups {
        let Group { name, lr, weight_decay, frozen, .. } = group;
        fields.push((
            format!("group {name}"),
            format!("lr {lr}, weight decay {weight_decay}, frozen {frozen}"),
        ));
        for (name, tensor) in &group.parameters {
            if options.shards.as_ref().map_or(Ok(false), |shards| shards.holds(tensor))? {
                continue;
            }
            fields.push((format!("parameter {name}"), describe(tensor, &tensor.f_detach()?)?));
        }
    }
    fields.extend(options.shards.iter().flat_map(Shards::descriptions));
    let fields: Vec<(&str, &str)> =
        fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    Ok(mesh.control().agree(&fields)?)
}

/// Describes a tensor with these values: its dtype, shape and sum. Not a hash: equal bits give an equal sum, and a difference is what a
/// wrong seed or checkpoint makes.
pub(crate) fn describe(tensor: &Tensor, values: &Tensor) -> Result<String> {
    Ok(format!("{:?} {:?}, sum {:016x}", tensor.kind(), tensor.size(), sum(values)?.to_bits()))
}

/// Returns the sum of a contiguous tensor, piece by piece, because libtorch's CPU copies what it sums in another dtype. A GPU is waited for
/// once for each piece.
fn sum(values: &Tensor) -> Result<f64> {
    let flat = values.f_reshape([-1])?;
    let longest: i64 = if flat.device() == Device::Cpu { 1 << 16 } else { 1 << 26 };
    let (elements, mut sum) = (flat.numel() as i64, 0.0);
    for start in (0..elements).step_by(longest as usize) {
        let piece = flat.f_narrow(0, start, longest.min(elements - start))?;
        sum += piece.f_sum(Kind::Double)?.f_double_value(&[])?;
    }
    Ok(sum)
}
