//! The folder of another model than that which learns: a teacher, or a reference.

use anyhow::anyhow;
use frugal::companion_files::tokenizer_of;
use frugal::dataloading::Tokenizer;
use frugal::models::hugging_face::Folder;
use frugal::recipe::{Role, check_tokens};

use crate::flags::hub::HubArgs;
use crate::run::job::Job;

/// Opens it, without reading its weights.
///
/// # Errors
/// No such folder; a model of other tokens than `own`, or of a shorter context than `longest` positions.
pub(super) fn open(
    job: &Job<'_>,
    role: Role,
    name: &str,
    own: &Tokenizer,
    longest: usize,
) -> anyhow::Result<Folder> {
    let (config, role_name) = (job.config(), role.name());
    let key = match role {
        Role::Teacher => "objective.teacher",
        Role::Reference => "objective.reference_model",
    };
    let hub = HubArgs { revision: None, offline: config.model.offline, untied: false };
    let folder = job.common.in_turn(&format!("the {role_name}"), || hub.open(name)).map_err(|error| {
        // The advice is of a model.
        anyhow!("the {role_name}: {}", format!("{error:#}").replace("model.name", key))
    })?;
    let own_name = config.model.name.clone().unwrap_or_default();
    check_tokens(role, (own, &own_name), (&tokenizer_of(folder.path())?, name), &folder, longest)?;
    Ok(folder)
}
