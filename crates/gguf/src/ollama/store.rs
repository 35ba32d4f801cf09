//! Ollama's store of models: manifests under names, and files under their digests.
//!
//! ```text
//! manifests/registry.ollama.ai/library/llama3.2/1b     JSON: layers with a type and a digest
//! blobs/sha256-74701a8c…                               the GGUF file, a layer of the type application/vnd.ollama.image.model
//! ```
//!
//! The store is `OLLAMA_MODELS`, else `.ollama/models` in the user's folder, else `/usr/share/ollama/.ollama/models`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Result, file_error};
use crate::json;

/// The beginning of a name in the store.
pub const PREFIX: &str = "ollama:";
const MODEL: &str = "application/vnd.ollama.image.model";
const ADAPTER: &str = "application/vnd.ollama.image.adapter";

/// Returns the GGUF file of a name such as `ollama:llama3.2:1b` or of a manifest's path; `None` for another name.
///
/// # Errors
/// No such model in the store; a model with an adapter, or without a GGUF file; a file that is missing.
pub fn find(name: &str) -> Result<Option<PathBuf>> {
    let Some(model) = name.strip_prefix(PREFIX) else {
        let path = Path::new(name);
        let is_manifest = path.is_file() && path.ancestors().any(|folder| folder.ends_with("manifests"));
        return if is_manifest { of_manifest(path).map(Some) } else { Ok(None) };
    };
    let stores = stores();
    let manifest = stores.iter().map(|store| store.join("manifests").join(manifest_path(model)));
    match manifest.clone().find(|manifest| manifest.is_file()) {
        Some(manifest) => of_manifest(&manifest).map(Some),
        None => {
            let shown: Vec<String> = manifest.map(|path| path.display().to_string()).collect();
            let reason = format!(
                "Ollama's store has no such model (no {}); `ollama pull {model}` gets it",
                shown.join(", no ")
            );
            Err(file_error(Path::new(name), reason))
        }
    }
}

/// The folders that may be the store, the first one first.
fn stores() -> Vec<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    match set("OLLAMA_MODELS") {
        Some(store) => vec![store],
        None => {
            let of_user = set("HOME").map(|home| home.join(".ollama/models"));
            of_user.into_iter().chain([PathBuf::from("/usr/share/ollama/.ollama/models")]).collect()
        }
    }
}

/// The manifest of `[HOST/][NAMESPACE/]MODEL[:TAG]`, relative to the folder of manifests.
fn manifest_path(model: &str) -> PathBuf {
    let (path, tag) = match model.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, tag),
        _ => (model, "latest"),
    };
    let parts: Vec<&str> =
        path.split('/').filter(|part| !part.is_empty() && !part.starts_with("..")).collect();
    let (host, namespace) = match parts.len() {
        0 | 1 => (Some("registry.ollama.ai"), Some("library")),
        2 => (Some("registry.ollama.ai"), None),
        _ => (None, None),
    };
    let tag = tag.trim_start_matches('.');
    host.into_iter().chain(namespace).chain(parts).chain([tag]).collect()
}

/// The model's file of a manifest.
fn of_manifest(manifest: &Path) -> Result<PathBuf> {
    let fields = json::read(manifest)?;
    let layers = fields.get("layers").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let digest = |kind: &str| {
        let layer = layers.iter().find(|layer| layer["mediaType"] == kind)?;
        layer["digest"]
            .as_str()
            .filter(|digest| digest.bytes().all(|byte| byte == b':' || byte.is_ascii_alphanumeric()))
    };
    if digest(ADAPTER).is_some() {
        let reason = "the model has an adapter of its own, which is not merged; give the base's name, and the adapter with --adapter";
        return Err(file_error(manifest, reason));
    }
    let digest = digest(MODEL).ok_or_else(|| {
        file_error(manifest, "not a manifest of a model in one GGUF file; give another model")
    })?;
    let store = manifest.ancestors().find(|folder| folder.ends_with("manifests")).and_then(Path::parent);
    let blob = store.unwrap_or(Path::new("")).join("blobs").join(digest.replace(':', "-"));
    if !blob.is_file() {
        return Err(file_error(
            manifest,
            format!("{} is missing; `ollama pull` the model again", blob.display()),
        ));
    }
    Ok(blob)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_manifests() {
        for (name, path) in [
            ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
            ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
            ("user/model:q8", "registry.ollama.ai/user/model/q8"),
            ("hf.co/owner/model-GGUF:Q4_K_M", "hf.co/owner/model-GGUF/Q4_K_M"),
            ("../../x", "registry.ollama.ai/library/x/latest"),
        ] {
            assert_eq!(manifest_path(name), Path::new(path), "{name}");
        }
    }

    #[test]
    fn a_manifest_leads_to_the_models_file() {
        let store = tempfile::tempdir().unwrap();
        let manifest = store.path().join("manifests/registry.ollama.ai/library/m/1b");
        std::fs::create_dir_all(manifest.parent().unwrap()).unwrap();
        let write = |layers: Value| {
            std::fs::write(
                &manifest,
                serde_json::json!({ "schemaVersion": 2, "layers": layers }).to_string(),
            )
            .unwrap();
        };
        let layer = |kind: &str| serde_json::json!({ "mediaType": kind, "digest": "sha256:0a1b" });
        let found = || find(&manifest.display().to_string());
        write(serde_json::json!([layer(MODEL), layer("application/vnd.ollama.image.template")]));
        assert!(
            found()
                .unwrap_err()
                .to_string()
                .contains("blobs/sha256-0a1b is missing; `ollama pull` the model again")
        );
        std::fs::create_dir(store.path().join("blobs")).unwrap();
        std::fs::write(store.path().join("blobs/sha256-0a1b"), "GGUF").unwrap();
        assert_eq!(found().unwrap(), Some(store.path().join("blobs/sha256-0a1b")));
        write(serde_json::json!([layer(MODEL), layer(ADAPTER)]));
        assert!(found().unwrap_err().to_string().contains("an adapter of its own"));
        assert_eq!(find("owner/name").unwrap(), None);
    }
}
