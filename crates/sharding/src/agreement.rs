//! What all ranks must have in common.

use runtime::collectives::Group as Ranks;
use tch::{Kind, Tensor};
use training::optimizer::{Group, Rule};

use crate::Result;
use crate::optimizer::Options;
use crate::shards::Shards;

/// Makes sure that all ranks have the same optimizer, parameters and values.
pub(crate) fn agree(rule: &dyn Rule, groups: &[Group], ranks: &Ranks, options: &Options) -> Result<()> {
    let mut fields = vec![
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("optimizer".to_owned(), format!("{rule:?}")),
        ("options".to_owned(), format!("{:?}", Options { order: Vec::new(), ..options.clone() })),
        ("order of parameters".to_owned(), options.order.join(" ")),
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
    Ok(ranks.agree(&fields)?)
}

/// Describes a tensor with these values: its dtype, shape and sum. Not a hash: equal bits give an equal sum, and a difference is what a
/// wrong seed or checkpoint makes.
pub(crate) fn describe(tensor: &Tensor, values: &Tensor) -> Result<String> {
    let sum = values.f_sum(Kind::Double)?.f_double_value(&[])?;
    Ok(format!("{:?} {:?}, sum {:016x}", tensor.kind(), tensor.size(), sum.to_bits()))
}
