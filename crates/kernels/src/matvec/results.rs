//! Where the sums of products go.

use half::bf16;
use runtime::Result;
use runtime::tensor_memory::address;
use tch::{Device, Kind, Tensor};

use crate::simd::Element;

/// The results `[vectors, rows]` of products: each sum plus the bias of its row, in fp32, rounded once to fp32 or bf16.
pub(crate) struct Results {
    tensor: Tensor,
    at: usize,
    rounds: bool,
    vectors: usize,
    rows: usize,
    /// Contiguous, in fp32 or bf16.
    bias: Option<Tensor>,
    bias_at: usize,
    bias_is_narrow: bool,
}

impl Results {
    /// Results in `kind` if that is bf16, else in fp32.
    pub(crate) fn new([vectors, rows]: [usize; 2], kind: Kind, bias: Option<&Tensor>) -> Result<Self> {
        let rounds = kind == Kind::BFloat16;
        let kind = if rounds { Kind::BFloat16 } else { Kind::Float };
        let tensor = Tensor::f_empty([vectors as i64, rows as i64], (kind, Device::Cpu))?;
        let readable = |bias: &Tensor| {
            // It may be a lazily negated view.
            let bias = bias.f_resolve_neg()?;
            let bias =
                if bias.kind() == Kind::BFloat16 { bias.f_detach()? } else { bias.f_to_kind(Kind::Float)? };
            bias.f_contiguous()
        };
        let bias = bias.map(readable).transpose()?;
        Ok(Self {
            at: tensor.data_ptr() as usize,
            tensor,
            rounds,
            vectors,
            rows,
            bias_at: bias.as_ref().map_or(Ok(0), address)?,
            bias_is_narrow: bias.as_ref().is_some_and(|bias| bias.kind() == Kind::BFloat16),
            bias,
        })
    }

    /// Returns the numbers of vectors and of rows.
    pub(crate) fn size(&self) -> [usize; 2] {
        [self.vectors, self.rows]
    }

    /// Writes the results of a vector with the rows from `first` on.
    ///
    /// # Safety
    /// They are among the results, the bias has as many elements as there are rows, and nothing else uses these elements meanwhile.
    pub(crate) unsafe fn put(&self, vector: usize, first: usize, sums: &[f32]) {
        let place = vector * self.rows + first;
        for (number, sum) in sums.iter().enumerate() {
            let bias = match (&self.bias, self.bias_is_narrow) {
                (None, _) => 0.0,
                // SAFETY: by this function's contract.
                (Some(_), true) => unsafe { (*(self.bias_at as *const bf16).add(first + number)).widen() },
                // SAFETY: likewise.
                (Some(_), false) => unsafe { *(self.bias_at as *const f32).add(first + number) },
            };
            // SAFETY: likewise.
            unsafe {
                match self.rounds {
                    true => (self.at as *mut bf16).add(place + number).write(bf16::round(sum + bias)),
                    false => (self.at as *mut f32).add(place + number).write(sum + bias),
                }
            }
        }
    }

    pub(crate) fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

// SAFETY: threads use the addresses, by the contract of `put`; the tensors only keep them alive.
unsafe impl Sync for Results {}
