//! A download's bar on a terminal.

use std::sync::Arc;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use models::hub::Progress;

/// Returns a callback that shows a download on standard error if that is a terminal; for [`Hub::progress`](models::hub::Hub::progress).
pub(crate) fn terminal_bar() -> Arc<dyn Fn(Progress) + Send + Sync> {
    // Nothing is drawn before the first bytes, and nothing at all if everything is in the cache.
    let bar = styled(ProgressDrawTarget::stderr());
    Arc::new(move |progress| show(&bar, progress))
}

fn styled(target: ProgressDrawTarget) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{bar:12} {bytes}/{total_bytes} {bytes_per_sec} {eta} downloading")
            .expect("the template is a constant");
    ProgressBar::with_draw_target(None, target).with_style(style)
}

fn show(bar: &ProgressBar, progress: Progress) {
    if bar.is_finished() {
        // The same bar for another download.
        bar.reset();
    }
    bar.set_length(progress.total);
    bar.set_position(progress.bytes);
    if progress.bytes >= progress.total {
        bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_follows_one_download_after_another() {
        let bar = styled(ProgressDrawTarget::hidden());
        for total in [100, 30] {
            show(&bar, Progress { bytes: 10, total });
            assert_eq!((bar.position(), bar.length(), bar.is_finished()), (10, Some(total), false));
            show(&bar, Progress { bytes: total, total });
            assert_eq!((bar.position(), bar.is_finished()), (total, true));
        }
    }
}
