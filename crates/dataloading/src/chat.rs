//! Conversations as training rows: chat templates, and which tokens are learned.
//!
//! A model's chat template is a Jinja program that writes a conversation as one text. [`ChatTemplate`] renders it as transformers'
//! `apply_chat_template` does, and [`ChatTemplate::rows`] divides the text into [`Segment`]s: prompts, which the model reads, and
//! answers, which it learns to write.
//!
//! ```
//! use dataloading::chat::{ChatTemplate, Conversation, EndTokens, Mask, Message, TemplateConfig};
//!
//! let source = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
//!               {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
//! let template = ChatTemplate::new("chat_template.jinja", source, TemplateConfig::default())?;
//! let conversation = Conversation::new([Message::new("user", "2+2?"), Message::new("assistant", "4")]);
//! let ends = EndTokens { added: vec!["<|im_end|>".to_owned()], ..EndTokens::default() };
//!
//! let rows = template.rows(&conversation, Mask::Answers, &ends)?;
//! let segments: Vec<(&str, bool)> =
//!     rows[0].iter().map(|segment| (segment.text.as_str(), segment.is_trained)).collect();
//! assert_eq!(
//!     segments,
//!     [
//!         ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", false),
//!         ("4<|im_end|>\n", true)
//!     ]
//! );
//! # Ok::<(), dataloading::Error>(())
//! ```
//!
//! # Templates are programs of others
//!
//! A rendering executes a bounded number of instructions, makes a bounded number of bytes, and has no access to files or to the network.
//! Tokenize with `add_special_tokens = false` after a template, because templates write the special tokens themselves.
//!
//! # Compared with transformers
//!
//! The same settings (`trim_blocks`, `lstrip_blocks`, loop controls), the same functions (`raise_exception`, `strftime_now`, `tojson`
//! as `json.dumps` writes) and Python's methods of texts, lists and dictionaries. Different: the date is given, so that rows do not
//! depend on the day, and integers beyond 64 bits become floats. transformers' mask is what `{% generation %}` marks, so templates
//! without this tag have none; here prefixes are rendered then.

mod conversation;
mod generation_tag;
mod python_date;
mod python_filters;
mod python_format;
mod python_json;
mod python_methods;
mod reasoning;
mod template;
mod template_files;
mod turns;
mod unused;

pub use conversation::{Conversation, Message};
pub use python_date::Date;
pub use reasoning::TrainingVariant;
pub use template::{ChatTemplate, Rendered, TemplateConfig};
pub use template_files::{DEFAULT_TEMPLATE, TemplateSources, template_sources};
pub use turns::{EndTokens, Mask, Segment};
