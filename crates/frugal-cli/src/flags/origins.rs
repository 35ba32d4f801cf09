//! Where the values of a configuration come from.

use std::path::Path;
use std::sync::Arc;

use frugal::Config;
use frugal::config::origins::{Origins, values};
use frugal::config::{Given, Method};
use frugal::run_folder::RunRecord;
use serde_json::Value;

use crate::common_flags::Common;
use crate::flags::Flags;
use crate::flags::table::{COMMON, RESUME};

/// Where the values of a configuration come from: the file, `--set` or a flag; the others are defaults.
///
/// # Errors
/// A configuration that cannot be expressed.
pub(crate) fn origins(config: &Config, given: &Given) -> anyhow::Result<Origins> {
    let mut origins = given.origins().clone();
    let values = values(config)?;
    origins.retain(|key| values.iter().any(|(known, _)| known == key));
    // What follows from another value comes from where that does.
    let is_dora = config.method() == Some(Method::Dora);
    for (key, from, follows) in [
        ("adapter.base_model_name_or_path", "model.name", true),
        ("adapter.use_dora", "method", is_dora),
        ("method", "adapter.use_dora", is_dora),
    ] {
        if follows && !origins.has(key) && origins.has(from) {
            let origin = origins.get(from).to_owned();
            origins.set(key, &origin);
        }
    }
    Ok(origins)
}

/// Where the values of a resumed training come from: as before, but for those that `config.toml`, `--set` or a flag has changed since.
///
/// # Errors
/// A configuration that cannot be expressed.
pub(crate) fn origins_of_resume(
    config: &Config,
    record: Option<&RunRecord>,
    flags: &Flags<RESUME>,
    common: &Flags<COMMON>,
) -> anyhow::Result<Origins> {
    let before: Vec<(String, Value)> = match record {
        Some(record) => serde_json::from_value::<Config>(record.config.clone())
            .ok()
            .and_then(|config| values(&config).ok())
            .unwrap_or_default(),
        None => Vec::new(),
    };
    let mut origins = record.map(|record| record.origins.clone()).unwrap_or_default();
    for (key, value) in values(config)? {
        let is_new = !before.contains(&(key.clone(), value));
        if let Some(flag) = flags.flag_for(&key).or_else(|| common.flag_for(&key)) {
            origins.set(&key, flag);
        } else if flags.assigned_keys().any(|assigned| assigned == key) {
            origins.set(&key, "--set");
        } else if key == "method"
            && record.is_some()
            && !origins.has(&key)
            && config.method() != Some(Method::default())
        {
            // Earlier versions wrote none.
            origins.set(&key, "config.toml");
        } else if is_new && record.is_some() {
            origins.set(&key, "config.toml, edited");
        }
    }
    Ok(origins)
}

/// The common flags of a training with the origins of its configuration, and the record that lies beside the file it was read from.
///
/// # Errors
/// As [`origins`].
pub(crate) fn with_origins(
    common: &Common,
    (config, given): (&Config, &Given),
    file: Option<&Path>,
) -> anyhow::Result<Common> {
    let origins = origins(config, given)?;
    let folder = file.and_then(Path::parent);
    // A `run.json` of another program is ignored.
    let earlier = folder.and_then(|folder| RunRecord::read(folder).ok().flatten()).map(Arc::new);
    let mut asked = origins.clone();
    asked.retain(|key| given.of_training() != Some(origins.get(key)));
    Ok(Common { origins, asked, earlier, ..common.clone() })
}
