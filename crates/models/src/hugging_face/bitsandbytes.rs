//! Weights in NF4, in the files that bitsandbytes writes and reads.
//!
//! A quantized `X.weight` `[out, in]` of n weights, b = ⌈n/64⌉ blocks, is
//!
//! | tensor | contents |
//! |---|---|
//! | `X.weight` | codes, u8 `[n/2, 1]`; other dtypes of the same bytes are read too |
//! | `X.weight.absmax` | scales: fp32 `[b]`, or u8 `[b]` if they are nested |
//! | `X.weight.quant_map` | the 16 values, fp32 |
//! | `X.weight.nested_absmax`, `.nested_quant_map` | factors of nested scales `[⌈b/256⌉]`, and their 256 values, fp32 |
//! | `X.weight.quant_state.bitsandbytes__nf4` | JSON as bytes: the shape, the block sizes, the mean of nested scales |

use std::collections::BTreeMap;

use kernels::nf4::{self, BLOCK, NESTED_BLOCK, Scales, TABLE, nested_map, sections};
use kernels::quantized;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::weights::Weights;
use crate::error::{Error, Result};
use crate::strict_json;
use crate::tensors_file::TensorsFile;

/// The end of the name of the JSON.
pub(super) const STATE: &str = ".quant_state.bitsandbytes__nf4";
/// The ends of the names of the tensors beside a weight.
const BESIDE: [&str; 5] = [STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"];
/// The field of `config.json`.
pub(super) const CONFIG_FIELD: &str = "quantization_config";

/// Returns the weight's name if `name` is that of a tensor beside a quantized weight.
pub(super) fn of_weight(name: &str) -> Option<&str> {
    BESIDE.into_iter().find_map(|end| name.strip_suffix(end)).filter(|weight| weight.ends_with("weight"))
}

/// A quantized weight in files.
#[derive(Debug)]
pub(super) struct Quantized {
    pub(super) shape: [i64; 2],
    pub(super) scales: Scales,
    /// The mean of nested scales.
    offset: f32,
}

#[derive(Debug, Serialize, Deserialize)]
struct State {
    quant_type: String,
    blocksize: i64,
    dtype: String,
    shape: Vec<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nested_blocksize: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nested_dtype: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nested_offset: Option<f64>,
}

/// The places of tensors in files, by name: the index of the file, and of the entry in it.
pub(super) type Locations = BTreeMap<String, (usize, usize)>;

/// Reads the tensors beside a weight, and checks their dtypes and sizes.
pub(super) fn read(
    files: &[TensorsFile],
    beside: &Locations,
    codes: (usize, usize),
    name: &str,
) -> Result<Quantized> {
    let refuse = |reason: String| Err(Error::file(files[codes.0].path(), format!("`{name}`: {reason}")));
    let bytes = |end: &str, kind: Kind| -> Result<Option<&[u8]>> {
        let Some(&(file, entry)) = beside.get(&format!("{name}{end}")) else { return Ok(None) };
        let entry = &files[file].entries()[entry];
        if entry.kind != kind {
            return Err(Error::file(
                files[file].path(),
                format!("`{}` is {:?}; expected {kind:?}", entry.name, entry.kind),
            ));
        }
        Ok(Some(files[file].bytes(entry)))
    };
    let is_map = |stored: &[u8], values: &[f32], tolerance: f32| {
        let is_near = |(bytes, value): (&[u8; 4], &f32)| {
            (f32::from_le_bytes(*bytes) - value).abs() <= tolerance * value.abs()
        };
        stored.len() == 4 * values.len() && stored.as_chunks::<4>().0.iter().zip(values).all(is_near)
    };

    // The state: format and shape.
    let Some(text) = bytes(STATE, Kind::Uint8)? else {
        return refuse(format!("`{name}{STATE}` is missing; copy or download the files again"));
    };
    let state: State = match std::str::from_utf8(text)
        .map_err(|cause| cause.to_string())
        .and_then(|text| strict_json::from_str(text).map_err(|cause| cause.to_string()))
    {
        Ok(state) => state,
        Err(cause) => return refuse(format!("its quantization state: {cause}")),
    };
    let &[out, inner] = &state.shape[..] else {
        return refuse(format!("its shape is {:?}; expected [out, in]", state.shape));
    };
    let elements = match out.checked_mul(inner) {
        Some(elements) if out > 0 && inner > 0 && inner % 2 == 0 && elements < 1 << 50 => elements,
        _ => return refuse(format!("its shape is [{out}, {inner}]; expected an even number of columns")),
    };
    if state.quant_type != "nf4" || state.blocksize != BLOCK {
        let (format, size) = (state.quant_type, state.blocksize);
        return refuse(format!("{format} in blocks of {size}; nf4 in blocks of {BLOCK} is supported"));
    }

    // The codes, and the values that they stand for.
    let blocks = (elements + BLOCK - 1) / BLOCK;
    let sized = |what: &str, bytes: Option<usize>, expected: i64| match bytes {
        Some(bytes) if bytes as i64 == expected => Ok(()),
        bytes => {
            let size = bytes.map_or_else(|| "missing".to_owned(), |bytes| format!("{bytes} bytes"));
            refuse(format!("{what} is {size}; a weight [{out}, {inner}] has {expected} bytes of it"))
                .map(|_: Quantized| ())
        }
    };
    sized("the codes", Some(files[codes.0].bytes(&files[codes.0].entries()[codes.1]).len()), elements / 2)?;
    if !bytes(".quant_map", Kind::Float)?.is_some_and(|map| is_map(map, &TABLE, 0.0)) {
        return refuse("`quant_map` is missing, or has other values than NF4's".to_owned());
    }

    // A scale for each block, in fp32 or nested: in 8 bits with a scale for each block of scales.
    let Some(offset) = state.nested_offset else {
        sized("`absmax`", bytes(".absmax", Kind::Float)?.map(<[u8]>::len), 4 * blocks)?;
        return Ok(Quantized { shape: [out, inner], scales: Scales::Float, offset: 0.0 });
    };
    if state.nested_blocksize != Some(NESTED_BLOCK) {
        return refuse(format!(
            "nested blocks of {:?} scales; expected {NESTED_BLOCK}",
            state.nested_blocksize
        ));
    }
    sized("`absmax`", bytes(".absmax", Kind::Uint8)?.map(<[u8]>::len), blocks)?;
    let factors = bytes(".nested_absmax", Kind::Float)?.map(<[u8]>::len);
    sized("`nested_absmax`", factors, 4 * ((blocks + NESTED_BLOCK - 1) / NESTED_BLOCK))?;
    // Its last bits depend on the processor that torch was built for.
    if !bytes(".nested_quant_map", Kind::Float)?.is_some_and(|map| is_map(map, nested_map(), 1e-6)) {
        return refuse(
            "`nested_quant_map` is missing, or has other values than the dynamic map of 8 bits".to_owned(),
        );
    }
    Ok(Quantized { shape: [out, inner], scales: Scales::Nested, offset: offset as f32 })
}

impl Weights {
    /// Returns a quantized weight of the files as one tensor.
    pub(super) fn packed(&self, name: &str, of: &Quantized) -> Result<Tensor> {
        let packed = nf4::empty(of.shape, of.scales, tch::Device::Cpu)?;
        let parts = sections(&packed)?;
        let copy = |name: &str, target: &Tensor| -> Result<()> {
            let location = self.locations.get(name).or_else(|| self.beside.get(name));
            let Some(&(file, entry)) = location else { return Ok(()) };
            let (file, entry) = (&self.files[file], &self.files[file].entries()[entry]);
            runtime::file::copy_values(file.bytes(entry), Kind::Uint8, target)?;
            file.forget(entry)
        };
        copy(name, &parts.codes)?;
        copy(&format!("{name}.absmax"), &parts.absmax)?;
        if let Some((factors, mean)) = &parts.nested {
            copy(&format!("{name}.nested_absmax"), factors)?;
            runtime::file::copy_values(&of.offset.to_ne_bytes(), Kind::Uint8, mean)?;
        }
        Ok(packed)
    }
}

/// Returns the tensors that a file has for a weight in NF4.
pub(super) fn tensors(name: &str, weight: &Tensor) -> Result<Vec<(String, Tensor)>> {
    let weight = weight.f_detach()?.f_to_device(tch::Device::Cpu)?;
    let shape = quantized::matrix_shape(&weight).ok_or_else(|| {
        Error::invalid("hugging_face::save", format!("`{name}` in {:?} is not NF4", weight.kind()))
    })?;
    let parts = sections(&weight)?;
    let float = |bytes: &Tensor| -> Result<Tensor> {
        let copy = Tensor::f_empty([bytes.numel() as i64 / 4], (Kind::Float, tch::Device::Cpu))?;
        copy.f_view_dtype(Kind::Uint8)?.f_copy_(bytes)?;
        Ok(copy)
    };
    let mut list = vec![
        (String::new(), parts.codes.f_view([-1, 1])?),
        (".quant_map".to_owned(), Tensor::f_from_slice(&TABLE)?),
    ];
    let mut state = State {
        quant_type: "nf4".to_owned(),
        blocksize: BLOCK,
        dtype: "bfloat16".to_owned(),
        shape: shape.to_vec(),
        nested_blocksize: None,
        nested_dtype: None,
        nested_offset: None,
    };
    match &parts.nested {
        None => list.push((".absmax".to_owned(), float(&parts.absmax)?)),
        Some((factors, mean)) => {
            list.push((".absmax".to_owned(), parts.absmax.shallow_clone()));
            list.push((".nested_absmax".to_owned(), float(factors)?));
            list.push((".nested_quant_map".to_owned(), Tensor::f_from_slice(nested_map())?));
            state.nested_blocksize = Some(NESTED_BLOCK);
            state.nested_dtype = Some("float32".to_owned());
            state.nested_offset = Some(float(mean)?.f_double_value(&[0])?);
        }
    }
    let text = serde_json::to_vec(&state).unwrap_or_default();
    list.push((STATE.to_owned(), Tensor::f_from_slice(&text)?));
    Ok(list.into_iter().map(|(end, tensor)| (format!("{name}{end}"), tensor)).collect())
}

/// The field of `config.json` with which transformers reads such weights.
pub(super) fn config(nested: bool) -> Value {
    json!({
        "quant_method": "bitsandbytes",
        "load_in_4bit": true,
        "load_in_8bit": false,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    })
}
