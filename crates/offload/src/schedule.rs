//! Which layer is in which slot: decisions, without a device.
//!
//! The order in which a step uses its layers is learned as it happens: what followed the last two uses the last time follows them
//! again. Until then layers are taken to follow each other as they were built, and backward to turn forward around. With the order
//! known, a slot is given to a layer that is needed sooner than what the slot holds, and the victim is the layer that is needed last
//! (Belady, IBM Systems Journal 1966). That rule alone keeps the last layers of forward for backward, and the last of backward
//! for the next forward.

use std::collections::HashMap;

/// Which way a pass goes through a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Inputs to outputs.
    Forward,
    /// Gradients of outputs to those of inputs.
    Backward,
}

/// One use of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Access {
    pub(crate) layer: usize,
    pub(crate) direction: Direction,
}

/// The order of uses.
#[derive(Debug, Default)]
struct Order {
    layers: usize,
    after: HashMap<(Option<Access>, Access), Access>,
    last: Option<Access>,
    before_last: Option<Access>,
}

impl Order {
    fn saw(&mut self, access: Access) {
        if let Some(last) = self.last {
            self.after.insert((self.before_last, last), access);
        }
        (self.before_last, self.last) = (self.last, Some(access));
    }

    /// What comes after `current`, which came after `previous`.
    fn next(&self, previous: Option<Access>, current: Access) -> Option<Access> {
        let known = self.after.get(&(previous, current)).copied();
        known.or_else(|| {
            let Access { layer, direction } = current;
            let next = match direction {
                Direction::Forward if layer + 1 < self.layers => (layer + 1, Direction::Forward),
                Direction::Forward => (layer, Direction::Backward),
                Direction::Backward => (layer.checked_sub(1)?, Direction::Backward),
            };
            Some(Access { layer: next.0, direction: next.1 })
        })
    }

    /// What comes next, as far as it is worth knowing: two whole steps.
    fn ahead(&self) -> Vec<Access> {
        let Some(mut current) = self.last else { return Vec::new() };
        let (mut previous, mut ahead) = (self.before_last, Vec::new());
        while ahead.len() < 4 * self.layers
            && let Some(next) = self.next(previous, current)
        {
            ahead.push(next);
            (previous, current) = (Some(current), next);
        }
        ahead
    }
}

/// A slot of the ring.
#[derive(Debug, Clone, Default)]
struct Slot {
    holds: Option<usize>,
    /// Uses that have not ended.
    leases: usize,
}

/// A layer is to be brought into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) slot: usize,
    pub(crate) layer: usize,
}

/// The ring: what each slot holds, and what comes next.
#[derive(Debug)]
pub(crate) struct Ring {
    slots: Vec<Slot>,
    order: Order,
}

impl Ring {
    pub(crate) fn new(slots: usize, layers: usize) -> Self {
        Self { slots: vec![Slot::default(); slots], order: Order { layers, ..Order::default() } }
    }

    /// Begins a use. The slot that the layer is in, and whether it has to be brought there first. `None` where every slot is in use.
    /// `is_current` says whether what a slot holds is what the layer is now.
    pub(crate) fn acquire(
        &mut self,
        access: Access,
        is_current: &dyn Fn(usize, usize) -> bool,
    ) -> Option<(usize, bool)> {
        self.order.saw(access);
        let holder = self.slots.iter().position(|slot| slot.holds == Some(access.layer));
        let (slot, load) = match holder {
            Some(slot) if is_current(slot, access.layer) => (slot, false),
            Some(slot) if self.slots[slot].leases == 0 => (slot, true),
            // Where it is there, someone still computes with what it was.
            _ => (self.victim(None)?, true),
        };
        self.slots[slot].leases += 1;
        if load {
            self.forget(access.layer);
            self.slots[slot].holds = Some(access.layer);
        }
        Some((slot, load))
    }

    /// Ends a use.
    pub(crate) fn release(&mut self, slot: usize) {
        self.slots[slot].leases = self.slots[slot].leases.saturating_sub(1);
    }

    /// What to bring meanwhile, in the order of need. `may_load` says of a coming use whether its layer may be read now.
    pub(crate) fn prefetch(
        &mut self,
        is_current: &dyn Fn(usize, usize) -> bool,
        may_load: &dyn Fn(Access, Access) -> bool,
    ) -> Vec<Load> {
        let Some(now) = self.order.last else { return Vec::new() };
        let (mut loads, mut wanted) = (Vec::new(), vec![now.layer]);
        for access in self.order.ahead() {
            if wanted.contains(&access.layer) {
                continue;
            }
            if wanted.len() >= self.slots.len() {
                break;
            }
            wanted.push(access.layer);
            let holder = self.slots.iter().position(|slot| slot.holds == Some(access.layer));
            if holder.is_some_and(|slot| is_current(slot, access.layer)) {
                continue;
            }
            if !may_load(now, access) {
                break;
            }
            let slot = match holder {
                Some(slot) if self.slots[slot].leases == 0 => Some(slot),
                Some(_) => None,
                None => self.victim(Some(&wanted)),
            };
            let Some(slot) = slot else { break };
            self.slots[slot].holds = Some(access.layer);
            loads.push(Load { slot, layer: access.layer });
        }
        loads
    }

    /// Forgets what the slots hold, as after a failure.
    pub(crate) fn clear(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.holds = None);
        (self.order.last, self.order.before_last) = (None, None);
    }

    /// Whether any use has not ended.
    pub(crate) fn in_use(&self) -> bool {
        self.slots.iter().any(|slot| slot.leases > 0)
    }

    /// No slot holds `layer` for anyone who comes.
    fn forget(&mut self, layer: usize) {
        self.slots.iter_mut().filter(|slot| slot.holds == Some(layer)).for_each(|slot| slot.holds = None);
    }

    /// The slot to give away: an empty one, else that whose layer is needed last; never one in use, nor one of the `kept` layers.
    fn victim(&self, kept: Option<&[usize]>) -> Option<usize> {
        let ahead = self.order.ahead();
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.leases == 0);
        let free = free.filter(|(_, slot)| {
            slot.holds.is_none_or(|layer| kept.is_none_or(|kept| !kept.contains(&layer)))
        });
        free.max_by_key(|(index, slot)| {
            let needed = match slot.holds {
                None => usize::MAX,
                Some(layer) => {
                    ahead.iter().position(|access| access.layer == layer).unwrap_or(usize::MAX - 1)
                }
            };
            // The first of equals.
            (needed, usize::MAX - index)
        })
        .map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests;
