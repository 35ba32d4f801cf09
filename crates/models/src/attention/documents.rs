//! Document boundaries in packed rows.

use runtime::device::graph::operators_only;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, wrong_shape};

/// Document boundaries in packed rows. A document never crosses a row, and the documents cover every position (padding at the
/// end of a row is a document of its own). The constructors check both.
#[derive(Debug)]
pub struct Documents {
    ids: Tensor,
    cu_seqlens: Tensor,
    starts: Vec<i32>,
    longest: i64,
}

const WHAT: &str = "packed documents";

impl Documents {
    /// Creates the boundaries from the lengths of each row's documents, in order.
    ///
    /// ```
    /// use models::Documents;
    /// use tch::Device;
    ///
    /// let documents = Documents::new(&[[2, 2], [3, 1]], Device::Cpu)?;
    /// assert_eq!(documents.starts(), [0, 2, 4, 7, 8]);
    /// assert_eq!(documents.longest(), 3);
    /// assert!(Documents::new(&[&[2, 2][..], &[3]], Device::Cpu).is_err());
    /// # Ok::<(), models::Error>(())
    /// ```
    ///
    /// # Errors
    /// No row; rows of different lengths, or empty; 2³¹ positions or more; a device that does not exist.
    pub fn new(rows: &[impl AsRef<[usize]>], device: Device) -> Result<Self> {
        let widths: Vec<usize> = rows.iter().map(|row| row.as_ref().iter().sum()).collect();
        let length = widths.first().copied().unwrap_or(0);
        if length == 0 || widths.iter().any(|width| *width != length) {
            let reason = format!(
                "rows of {widths:?} positions; expected at least one row, all of the same length of at least 1"
            );
            return Err(Error::invalid(WHAT, reason));
        }
        let (mut starts, mut ids) = (vec![0i32], Vec::with_capacity(length * rows.len()));
        for (id, documents) in rows.iter().flat_map(|row| row.as_ref()).enumerate() {
            ids.extend(std::iter::repeat_n(id as i64, *documents));
            starts.push(i32::try_from(ids.len()).map_err(|_| too_many(ids.len()))?);
        }
        let longest = longest(&starts);
        let ids = Tensor::f_from_slice(&ids)?.f_reshape([rows.len() as i64, length as i64])?;
        let (ids, cu_seqlens) =
            (ids.f_to_device(device)?, Tensor::f_from_slice(&starts)?.f_to_device(device)?);
        Ok(Self { ids, cu_seqlens, starts, longest })
    }

    /// Creates the boundaries from a loader's tensors. `ids`, `[rows, length]`, int64: each position's document within the
    /// batch, from 0. `cu_seqlens`, `[documents + 1]`, int32, on the same device: the offset of each document among all
    /// positions. `starts`: the same on the host.
    ///
    /// On the CPU every position is compared. On another device only shapes and dtypes are: reading the values would
    /// synchronise with the device in each step.
    ///
    /// # Errors
    /// Another shape or dtype; starts that do not rise from 0 to the number of positions; a document that crosses a row;
    /// tensors that contradict the starts.
    pub fn from_parts(ids: Tensor, cu_seqlens: Tensor, starts: Vec<i32>) -> Result<Self> {
        let shape = |name, tensor: &Tensor, expected: &str| wrong_shape(WHAT, name, tensor.size(), expected);
        let refuse = |reason: String| Err(Error::invalid(WHAT, reason));
        let &[rows, length] = ids.size().as_slice() else { return Err(shape("ids", &ids, "[rows, length]")) };
        let number = starts.len() as i64;
        if cu_seqlens.size() != [number] {
            return Err(shape("cu_seqlens", &cu_seqlens, &format!("[{number}], one per start")));
        }
        if (ids.kind(), cu_seqlens.kind()) != (Kind::Int64, Kind::Int) || ids.device() != cu_seqlens.device()
        {
            return refuse(format!(
                "ids are {:?} on {:?} and cu_seqlens {:?} on {:?}; expected Int64 and Int on one device",
                ids.kind(),
                ids.device(),
                cu_seqlens.kind(),
                cu_seqlens.device()
            ));
        }
        let positions = rows * length;
        let covered =
            starts.first() == Some(&0) && starts.last().map(|&end| i64::from(end)) == Some(positions);
        if !covered || starts.windows(2).any(|pair| pair[0] > pair[1]) {
            return refuse(format!(
                "the documents start at {starts:?}; expected rising numbers from 0 to {positions}, the number of positions"
            ));
        }
        let crosses = |pair: &&[i32]| {
            let (start, end) = (i64::from(pair[0]), i64::from(pair[1]));
            start < end && start / length != (end - 1) / length
        };
        if let Some(pair) = starts.windows(2).find(crosses) {
            return refuse(format!(
                "the document at positions {} to {} crosses the end of a row of {length}; divide it, or end the row before it",
                pair[0],
                pair[1] - 1
            ));
        }
        if ids.device() == Device::Cpu && !operators_only() {
            let documents = starts.windows(2).zip(0i64..);
            let expected_ids =
                documents.flat_map(|(pair, id)| std::iter::repeat_n(id, (pair[1] - pair[0]) as usize));
            if Vec::<i32>::try_from(&cu_seqlens)? != starts
                || !Vec::<i64>::try_from(ids.f_reshape([-1])?)?.into_iter().eq(expected_ids)
            {
                return refuse(format!("ids or cu_seqlens contradict the starts {starts:?}"));
            }
        }
        let longest = longest(&starts);
        Ok(Self { ids, cu_seqlens, starts, longest })
    }

    /// Creates the boundaries that only the device knows, for a step that a graph repeats with other documents: as
    /// [`Documents::from_parts`], unchecked, with `longest` as a bound on the length of a document. Documents may be empty.
    pub fn on_device(ids: Tensor, cu_seqlens: Tensor, longest: i64) -> Self {
        Self { ids, cu_seqlens, starts: Vec::new(), longest }
    }

    /// Returns whether the host knows where documents start.
    pub fn are_on_host(&self) -> bool {
        !self.starts.is_empty()
    }

    /// Returns the same documents, sharing their tensors.
    #[must_use]
    pub fn shallow_clone(&self) -> Self {
        Self {
            ids: self.ids.shallow_clone(),
            cu_seqlens: self.cu_seqlens.shallow_clone(),
            starts: self.starts.clone(),
            longest: self.longest,
        }
    }

    /// `[rows, length]`, int64: each position's document within the batch.
    pub fn ids(&self) -> &Tensor {
        &self.ids
    }

    /// `[documents + 1]`, int32, on the device of the ids: the offset of each document among all positions.
    pub fn cu_seqlens(&self) -> &Tensor {
        &self.cu_seqlens
    }

    /// Returns the same on the host; nothing if it does not know ([`Documents::are_on_host`]).
    pub fn starts(&self) -> &[i32] {
        &self.starts
    }

    /// Returns the number of positions of the longest document.
    pub fn longest(&self) -> i64 {
        self.longest
    }
}

fn longest(starts: &[i32]) -> i64 {
    starts.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0])).max().unwrap_or(0)
}

fn too_many(positions: usize) -> Error {
    Error::invalid(WHAT, format!("{positions} positions; expected fewer than 2^31, as int32 counts them"))
}
