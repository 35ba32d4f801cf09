//! The teacher of a distillation: its folder, which is checked against the student's before a weight is read.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::bail;
use frugal::Config;
use frugal::companion_files::CompanionFiles;
use frugal::config::TeacherPlace;
use frugal::dataloading::Tokenizer;
use frugal::models::hugging_face::Folder;
use frugal::planning::{TeacherShape, WeightFormat};
use frugal::recipe::{Role, Teacher};
use frugal::run_folder::{RunRecord, SplitRecord};
use frugal::training::distillation::write_top_k;
use frugal::training::masked_rows::{MaskedBatches, TopKFile, TopKHeader};
use sha2::{Digest, Sha256};
use tch::Device;

use super::other_model;
use crate::common_flags::Common;
use crate::output::figures::counted;
use crate::run::job::Job;

/// A teacher whose weights are not read yet.
pub(super) struct TeacherFolder {
    /// `None` where files of its answers are to be used without it.
    folder: Option<Folder>,
    name: String,
    /// SHA-256 of the student's tokens.
    tokenizer: String,
    /// Tokens of the student's head.
    vocabulary: i64,
}

/// The folder of a teacher's answers in that of a run.
const ANSWERS: &str = "teacher";

impl TeacherFolder {
    /// Opens the teacher's folder, if the objective has one.
    ///
    /// # Errors
    /// No such folder; a teacher of other tokens, or of a shorter context than `longest` positions.
    pub(super) fn open(
        job: &Job<'_>,
        (student, vocabulary): (&CompanionFiles, i64),
        longest: usize,
    ) -> anyhow::Result<Option<Self>> {
        let config = job.config();
        if config.objective.distillation()?.is_none() {
            return Ok(None);
        }
        let own = student.tokenizer()?;
        let tokenizer = digest_of_tokens(&own);
        let Some(name) = config.objective.teacher.clone() else {
            let name = "the teacher".to_owned();
            return Ok(Some(Self { folder: None, name, tokenizer, vocabulary }));
        };
        let folder = other_model::open(job, Role::Teacher, &name, &own, longest)?;
        Ok(Some(Self { folder: Some(folder), name, tokenizer, vocabulary }))
    }

    /// What a plan counts of it.
    ///
    /// # Errors
    /// Weights of several dtypes.
    pub(super) fn shape(&self, config: &Config) -> anyhow::Result<Option<TeacherShape>> {
        let Some(folder) = self.folder.as_ref().filter(|_| config.objective.teacher_top_k.is_none()) else {
            return Ok(None);
        };
        let format = WeightFormat::of(folder, Teacher::kind(config, folder)?)?;
        Ok(Some(TeacherShape { config: Box::new(folder.config().clone()), format }))
    }

    /// Describes its files, whose digests a resume compares with those of `out`.
    ///
    /// # Errors
    /// A training that is continued with another teacher.
    pub(super) fn record(&self, out: &Path, resumes: bool) -> anyhow::Result<SplitRecord> {
        let record = SplitRecord::of(&self.files()?, 0)?;
        let earlier = if resumes { RunRecord::read(out)? } else { None };
        if let Some(earlier) = earlier.map(|earlier| earlier.teacher).filter(|own| !own.files.is_empty()) {
            let digests = |of: &SplitRecord| -> Vec<_> {
                of.files.iter().map(|file| (file.bytes, file.sha256.clone())).collect()
            };
            if digests(&earlier) != digests(&record) {
                bail!(
                    "the weights of the teacher {} are not those that the run in {} has learned from (SHA-256); give its teacher as \
                     --teacher, or start a new run",
                    self.name,
                    out.display()
                );
            }
        }
        Ok(record)
    }

    /// The files of its weights.
    fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let path = Path::new(&self.name);
        if path.is_file() {
            return Ok(vec![path.to_owned()]);
        }
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let mut files: Vec<PathBuf> = std::fs::read_dir(folder.path())?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?;
        files.retain(|path| path.extension().is_some_and(|kind| kind == "safetensors" || kind == "gguf"));
        files.sort();
        Ok(files)
    }

    /// Reads its weights.
    ///
    /// # Errors
    /// Errors of the files; too little memory.
    pub(super) fn load(&self, config: &Config, device: Device) -> anyhow::Result<Teacher> {
        match &self.folder {
            Some(folder) => Ok(Teacher::open(config, folder, device)?),
            None => bail!(
                "`objective.teacher` is missing; give the teacher's folder, GGUF file or name as --teacher"
            ),
        }
    }

    /// Asks the teacher for its most probable tokens at every label of `all`, unless files of an earlier training have them.
    ///
    /// # Errors
    /// Files of other rows, tokens, teachers or options; a teacher that is not at hand; errors of its weights.
    pub(super) fn ask(
        &self,
        (common, config): (&Common, &Config),
        out: &Path,
        all: &[&MaskedBatches],
        device: Device,
    ) -> anyhow::Result<()> {
        let mut loaded: Option<Teacher> = None;
        for rows in all {
            let (path, header) = (self.path(config, out, rows), self.header(config, rows)?);
            let is_known = path.is_file();
            if common.on_every_rank(is_known, "known probabilities")? {
                TopKFile::open(&path, &header, rows.rows())?;
                continue;
            }
            let start = Instant::now();
            if !common.is_first() {
                continue;
            }
            let teacher = match loaded.take() {
                Some(teacher) => loaded.insert(teacher),
                None => loaded.insert(self.load(config, device)?),
            };
            let header =
                TopKHeader { vocabulary: header.vocabulary.min(teacher.model.vocabulary()), ..header };
            write_top_k(teacher.model.as_ref(), rows, &path, &header)?;
            common.note(&format!(
                "the teacher {} has read {} in {:.0} s: {}",
                self.name,
                counted(rows.examples() as u64, "row"),
                start.elapsed().as_secs_f64(),
                path.display()
            ));
        }
        // The other ranks wait for the files.
        common.on_every_rank(true, "probabilities")?;
        Ok(())
    }

    /// The batches with what the teacher has answered.
    ///
    /// # Errors
    /// As [`TeacherFolder::ask`].
    pub(super) fn answered(
        &self,
        config: &Config,
        out: &Path,
        rows: MaskedBatches,
    ) -> anyhow::Result<MaskedBatches> {
        let file = TopKFile::open(&self.path(config, out, &rows), &self.header(config, &rows)?, rows.rows())?;
        Ok(rows.with_top_k(file))
    }

    fn path(&self, config: &Config, out: &Path, rows: &MaskedBatches) -> PathBuf {
        let folder = config.objective.teacher_files.clone().unwrap_or_else(|| out.join(ANSWERS));
        folder.join(format!("{:016x}.top-k", rows.content()))
    }

    /// What a file has to be of.
    fn header(&self, config: &Config, rows: &MaskedBatches) -> anyhow::Result<TopKHeader> {
        let mut digests = String::new();
        for file in SplitRecord::of(&self.files()?, 0)?.files {
            digests += &file.sha256.unwrap_or_else(|| file.bytes.to_string());
        }
        Ok(TopKHeader {
            tokenizer: self.tokenizer.clone(),
            vocabulary: self.vocabulary,
            temperature: config.objective.temperature.unwrap_or(1.0),
            k: config.objective.teacher_top_k.unwrap_or(0),
            rows: format!("{:016x}", rows.content()),
            teacher: digests,
        })
    }

    /// Describes it.
    pub(super) fn text(&self, config: &Config) -> String {
        if let Some(k) = config.objective.teacher_top_k {
            return format!("the {k} most probable tokens of {} at each label are learned", self.name);
        }
        let place = match config.objective.teacher_place {
            TeacherPlace::Offloaded => "; its layers are loaded when they run",
            TeacherPlace::Auto | TeacherPlace::Device => "",
        };
        format!("the teacher is {}{place}", self.name)
    }
}

/// SHA-256 of the tokens of a tokenizer, in the order of their ids.
fn digest_of_tokens(tokenizer: &Tokenizer) -> String {
    let mut digest = Sha256::new();
    for id in 0..tokenizer.vocabulary() as u32 {
        digest.update(tokenizer.token(id).unwrap_or_default());
        digest.update([0]);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
