//! Sends the first failure of any rank to all ranks.

use tch::{Device, Kind, Tensor};

use super::group::Group;
use super::{ReduceConfig, ReduceOp};
use crate::error::Result;
use crate::ops::TryScalar;

impl Group {
    /// Tells all ranks of a failure that has nothing to do with the group, such as that of a disk: returns the first rank that gives a
    /// text, and the text; `None` if no rank gives one. The group stays usable. `label` names the operation in errors.
    ///
    /// # Errors
    /// A rank that does not come; a dead group.
    ///
    /// ```
    /// use runtime::collectives::Group;
    ///
    /// let ranks = Group::alone();
    /// assert_eq!(ranks.first_failure(None, "save")?, None);
    /// assert_eq!(ranks.first_failure(Some("disk full"), "save")?, Some((0, "disk full".to_owned())));
    /// # Ok::<(), runtime::Error>(())
    /// ```
    pub fn first_failure(&self, own: Option<&str>, label: &str) -> Result<Option<(usize, String)>> {
        // The first rank has the largest number, and 0 is none.
        let number = own.map_or(0, |_| self.size() - self.rank());
        let device = self.device();
        let largest = Tensor::try_full([1], number as i64, (Kind::Int64, device))?;
        self.all_reduce(&largest, ReduceConfig { op: ReduceOp::Max, ..ReduceConfig::default() }, label)?;
        let Ok(number @ 1..) = usize::try_from(largest.f_int64_value(&[0])?) else { return Ok(None) };
        let rank = self.size().saturating_sub(number);
        Ok(Some((rank, self.broadcast_text(own.unwrap_or_default(), rank, label)?)))
    }

    /// Returns the text that rank `root` gives, on every rank. `label` names the operation in errors.
    ///
    /// # Errors
    /// A rank that does not come; a dead group.
    pub fn broadcast_text(&self, own: &str, root: usize, label: &str) -> Result<String> {
        let device = self.device();
        let own = if root == self.rank() { own.as_bytes() } else { &[] };
        let length = Tensor::try_full([1], own.len() as i64, (Kind::Int64, device))?;
        self.broadcast(&length, root, label)?;
        let length = length.f_int64_value(&[0])?;
        let text = match own {
            [] => Tensor::f_zeros([length], (Kind::Uint8, device))?,
            own => Tensor::f_from_slice(own)?.f_to_device(device)?,
        };
        self.broadcast(&text, root, label)?;
        let bytes = Vec::<u8>::try_from(text.f_to_device(Device::Cpu)?)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}
