//! Hugging Face model folders and PEFT adapters as GGUF files, which llama.cpp and Ollama run.
//!
//! A [`Model`] is a folder with `config.json`, `tokenizer.json` and weights in safetensors. [`Model::convert`] plans a file,
//! [`Conversion::write`] writes it, and [`Conversion::check`] reads it again and compares every value with the expected one. No tensor is
//! ever whole in memory: values are converted in parts of about 1 MiB. Nothing here links libtorch.
//!
//! ```no_run
//! use std::fs::File;
//! use std::io::{BufWriter, Write};
//! use std::path::Path;
//!
//! use gguf::{FileType, Model};
//!
//! let model = Model::open(Path::new("Qwen2.5-0.5B"))?;
//! let conversion = model.convert(FileType::Q4KM)?;
//! for note in conversion.notes() {
//!     eprintln!("note: {note}");
//! }
//! let path = Path::new("qwen.gguf");
//! let mut out = BufWriter::new(File::create(path)?);
//! conversion.write(&mut out)?;
//! out.flush()?;
//! conversion.check(path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | subject |
//! |---|---|
//! | [`ModelFile`] | a file read as a folder of Hugging Face: configuration, names, the order of rows |
//! | [`folder`] | a folder whose weights stay in a GGUF file |
//! | [`Model`] | families by `model_type`: names of tensors, metadata, the rotary embedding |
//! | [`Tokenizer`] | tokens, merges, special tokens, chat template, and llama.cpp's name of the pre-tokenizer |
//! | [`Adapter`] | LoRA adapters |
//! | [`Conversion`] | a planned file |
//! | [`ollama`] | Modelfiles, and the store of models |
//! | [`Writer`], [`Reader`] | the container, version 3 |
//! | [`FileType`] | the types of a file's matrices: one for all, or llama.cpp's mixtures such as q4_k_m |
//! | [`TensorType`], [`block`] | how values are stored: f32, f16, bf16, and ggml's blocks |
//!
//! # What is supported
//! Llama, Mistral, SmolLM3, Granite, Qwen2, Qwen3, Qwen3.5, OLMo 2, Phi-3, Gemma 2, 3 and 4 (text). An option that llama.cpp would read
//! silently differently (another pattern of layers, another scale of attention) is refused by name; what it leaves out, such as a
//! sliding window, is a note of the conversion.

mod adapter;
pub mod block;
mod conversion;
mod error;
mod experts;
mod file_type;
pub mod folder;
mod json;
mod model;
mod model_file;
pub mod ollama;
mod reader;
mod rounding;
mod safetensors;
mod tensor_type;
mod tokenizer;
mod value;
mod value_heads;
mod writer;

pub use adapter::{Adapter, Scale};
pub use conversion::Conversion;
pub use error::{Error, Result};
pub use file_type::FileType;
pub use model::Model;
pub use model_file::{FileTensor, ModelFile, ReadOptions};
pub use reader::Reader;
pub use tensor_type::TensorType;
pub use tokenizer::Tokenizer;
pub use value::{Array, Value};
pub use writer::{Header, TensorInfo, Writer};
