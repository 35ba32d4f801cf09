//! Decides which layer is in which slot; independent of devices.
//!
//! The order in which a step uses its layers is learned while it runs: what followed the last two uses before will follow them
//! again. At first, layers are assumed to follow each other as they were built, and backward to reverse forward. A slot is
//! given to a layer that is needed sooner than its current one; the victim is the layer that is needed last (Belady, IBM
//! Systems Journal 1966). This rule alone keeps the last layers of forward for backward, and the last of backward for the next
//! forward.

use std::collections::HashMap;

/// The direction of a pass through a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// From inputs to outputs.
    Forward,
    /// From gradients of outputs to gradients of inputs.
    Backward,
}

/// One use of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Access {
    pub(crate) layer: usize,
    pub(crate) direction: Direction,
}

/// The learned order of uses.
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

    /// Returns the use after `current`, which came after `previous`.
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

    /// Returns the coming uses, up to two whole steps.
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
    /// Uses in progress.
    leases: usize,
}

/// A layer to load into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) slot: usize,
    pub(crate) layer: usize,
}

/// The ring: the contents of each slot, and the learned order.
#[derive(Debug)]
pub(crate) struct Ring {
    slots: Vec<Slot>,
    order: Order,
}

impl Ring {
    pub(crate) fn new(slots: usize, layers: usize) -> Self {
        Self { slots: vec![Slot::default(); slots], order: Order { layers, ..Order::default() } }
    }

    /// Starts a use. Returns the layer's slot, and whether the layer must be loaded first; `None` if every slot is in use.
    /// `is_current` tells whether a slot's contents are the layer's current values.
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
            // If the slot has stale contents, they are still in use.
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

    /// Returns the loads to start now, in the order of need. `may_load` tells whether the layer of a coming use may be read
    /// now.
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

    /// Clears the contents of the slots, as after a failure.
    pub(crate) fn clear(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.holds = None);
        (self.order.last, self.order.before_last) = (None, None);
    }

    /// Whether any use is in progress.
    pub(crate) fn in_use(&self) -> bool {
        self.slots.iter().any(|slot| slot.leases > 0)
    }

    /// Removes `layer` from all slots.
    fn forget(&mut self, layer: usize) {
        self.slots.iter_mut().filter(|slot| slot.holds == Some(layer)).for_each(|slot| slot.holds = None);
    }

    /// Returns the slot to reuse: an empty one, else that of the layer needed last; never one in use or with one of the `kept`
    /// layers.
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
