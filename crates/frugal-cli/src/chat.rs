//! `frugal chat`: a conversation in the terminal.

mod session;

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use clap::Args;
use frugal::companion_files::{CompanionFiles, turn_end};
use frugal::config::Dtype;
use frugal::models::hugging_face::Folder;
use frugal::training::interrupt;
use models::generation::GenerationConfig;
use serde_json::json;

use super::output::{print_line, show};
use crate::common_flags::Common;
use crate::flags::hub::HubArgs;
use crate::flags::model::with_adapter;
use crate::flags::sampling::SamplingArgs;
use crate::folder::run_model::{Target, WhichArgs};
use crate::output::shell_command::shell_word;
use session::Session;

#[derive(Args)]
#[command(after_help = "\
A line is a turn; /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer.

Examples:
  frugal chat run                                   # the model of a fine-tuning
  frugal chat Qwen/Qwen2.5-0.5B-Instruct --system \"Answer in one sentence.\"
  printf 'Hello\\nAnd again\\n' | frugal chat run --quiet")]
pub(crate) struct Chat {
    /// A run's output folder, a model's folder, GGUF file or name on the hub, or an adapter's folder
    #[arg(value_name = "FOLDER_OR_MODEL")]
    target: String,
    #[command(flatten)]
    hub: HubArgs,
    /// An adapter's folder
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    which: WhichArgs,
    /// Dtype of the weights [default: that of the files]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// A message to the model before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// A Jinja file with the chat template [default: the model's own]
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Maximum number of tokens of an answer
    #[arg(long, default_value_t = 512)]
    max_new_tokens: usize,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(crate) fn run(common: &Common, arguments: &Chat) -> anyhow::Result<()> {
    let device = common.device()?;
    let mut target = Target::find(&arguments.target, arguments.which)?;
    target.note(common);
    target.take_adapter(arguments.adapter.as_deref());
    let folder = target.open(&arguments.hub)?;
    target.note_other_base(common, &folder, arguments.dtype);
    let Target { model, adapter, data, .. } = target;
    let mut data = data.unwrap_or_default();
    data.chat_template = arguments.chat_template.clone().or(data.chat_template);
    let companions = CompanionFiles::of(&folder, adapter.as_deref(), &data)?;
    let tokenizer = companions.tokenizer()?;
    let Some(template) = companions.chat_template(&data)? else {
        let flag = adapter.map_or_else(String::new, |adapter| {
            format!(" --adapter {}", shell_word(&adapter.display().to_string()))
        });
        let name = shell_word(&model);
        bail!(
            "{model} has no chat template, so it was not made for conversations; continue a text with `frugal generate --model \
             {name}{flag} --prompt TEXT`, or give a template with --chat-template"
        );
    };
    let context = usize::try_from(folder.config().max_position_embeddings).unwrap_or(usize::MAX);
    let mut end_tokens = companions.end_tokens().to_vec();
    end_tokens.extend(turn_end(&template, &tokenizer).filter(|end| !companions.end_tokens().contains(end)));
    let mut session = Session::new(tokenizer, template, arguments.system.as_deref(), context);
    let options = GenerationConfig {
        max_new_tokens: arguments.max_new_tokens,
        sampling: arguments.sampling.get(common.seed()),
        end_tokens,
        ..GenerationConfig::default()
    };
    let llama = load(&folder, arguments, device)?;
    let model = with_adapter(llama, adapter.as_deref())?;
    converse(common, &mut session, model.as_ref(), &options)
}

fn load(folder: &Folder, arguments: &Chat, device: tch::Device) -> anyhow::Result<models::Llama> {
    Ok(folder.load(arguments.dtype.map(|dtype| dtype.kind()), device)?)
}

/// The commands of a conversation.
const HELP: &str = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer";

/// Reads turns from standard input, and answers them.
fn converse(
    common: &Common,
    session: &mut Session,
    model: &dyn models::module::LanguageModel,
    options: &GenerationConfig,
) -> anyhow::Result<()> {
    let is_terminal = std::io::stdin().is_terminal();
    let stop = if is_terminal { interrupt::on_signals()? } else { Arc::new(AtomicBool::new(false)) };
    if is_terminal {
        common.note(HELP);
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if is_terminal {
            let mut err = std::io::stderr().lock();
            let _ = err.write_all(b"> ").and_then(|()| err.flush());
        }
        let Some(line) = lines.next() else {
            // Ctrl-D writes no line break.
            if is_terminal {
                let _ = std::io::stderr().lock().write_all(b"\n");
            }
            return Ok(());
        };
        let line = line.context("standard input")?;
        // A Ctrl-C while nothing was generated.
        stop.store(false, Ordering::Relaxed);
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => return Ok(()),
            "/reset" => {
                session.reset();
                common.note("the conversation begins anew");
                continue;
            }
            "/help" => {
                common.note(HELP);
                continue;
            }
            other if other.starts_with('/') && !other.contains(char::is_whitespace) => {
                common.note(&format!("{other} is no command; there are /help, /reset and /exit"));
                continue;
            }
            text => {
                let shown = |text: &str| common.json || show(text);
                match session.answer(model, options, text, &stop, shown) {
                    Ok(answer) => {
                        if answer.forgotten > 0 {
                            common.note(&format!(
                                "the context is full: the first {} messages were left out",
                                answer.forgotten
                            ));
                        }
                        if common.json {
                            print_line(&json!({
                                "role": "assistant", "content": answer.text, "tokens": answer.tokens,
                                "ended": answer.ended, "prompt_tokens": answer.prompt,
                            }));
                        } else if !show("\n") {
                            return Ok(());
                        }
                    }
                    // One message that is wrong does not end a conversation with a person.
                    Err(error) if is_terminal => common.note(&format!("error: {error:#}")),
                    Err(error) => return Err(error),
                }
            }
        }
    }
}
