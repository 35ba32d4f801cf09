//! The folder of layers in files.

use std::path::Path;

use frugal::Config;
use frugal::config::{Dtype, OffloadTier};

use crate::common_flags::Common;

/// Says where layers go to files that are in memory themselves. Frozen layers as they are in the model's files stay there.
pub(crate) fn note_memory(common: &Common, config: &Config) {
    let Some(offload) = config.offload.as_ref().filter(|offload| offload.tier == OffloadTier::File) else {
        return;
    };
    let writes = config.adapter.is_none() || config.model.dtype == Some(Dtype::Nf4);
    let folder = offload.folder.clone().unwrap_or_else(std::env::temp_dir);
    if writes && is_in_memory(&folder) {
        let text = format!(
            "note: {} is in memory (tmpfs), where layers in files take what they save; give --set offload.folder=FOLDER, a folder on a disk",
            folder.display()
        );
        common.note(&text);
    }
}

#[cfg(target_os = "linux")]
fn is_in_memory(folder: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    rustix::fs::statfs(folder).is_ok_and(|found| found.f_type as u64 == TMPFS)
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_folder: &Path) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_memory_is_known() {
        assert!(is_in_memory(Path::new("/dev/shm")) || !Path::new("/dev/shm").exists());
        assert!(!is_in_memory(Path::new("/nowhere")));
    }
}
