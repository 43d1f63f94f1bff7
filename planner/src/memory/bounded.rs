//! A map with a bound: where it is full, what was added first goes.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

#[derive(Debug, Clone)]
pub(super) struct Bounded<K, V, const MAX: usize> {
    values: HashMap<K, (u64, V)>,
    /// Additions in their order; one whose number is not that of the value was taken back since.
    order: VecDeque<(u64, K)>,
    next: u64,
}

impl<K, V, const MAX: usize> Default for Bounded<K, V, MAX> {
    fn default() -> Self {
        Self {
            values: HashMap::new(),
            order: VecDeque::new(),
            next: 0,
        }
    }
}

impl<K: Eq + Hash + Clone, V, const MAX: usize> Bounded<K, V, MAX> {
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    pub(super) fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.values.get(key).map(|(_, value)| value)
    }

    /// Adds a value, or puts it in the place of the one that is there.
    pub(super) fn insert(&mut self, key: K, value: V) {
        if let Some((_, own)) = self.values.get_mut(&key) {
            *own = value;
            return;
        }
        self.next += 1;
        self.order.push_back((self.next, key.clone()));
        self.values.insert(key, (self.next, value));
        while self.values.len() > MAX {
            self.drop_first();
        }
        // Taken back values leave their place in the order; it stays within twice the bound.
        if self.order.len() > MAX * 2 {
            let values = &self.values;
            self.order
                .retain(|(number, key)| values.get(key).is_some_and(|(own, _)| own == number));
        }
    }

    pub(super) fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        self.values.remove(key);
    }

    fn drop_first(&mut self) {
        if let Some((number, key)) = self.order.pop_front()
            && self.values.get(&key).is_some_and(|(own, _)| *own == number)
        {
            self.values.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_first_goes() {
        let mut map = Bounded::<u32, u32, 3>::default();
        for key in 0..3 {
            map.insert(key, key);
        }
        map.insert(0, 10);
        map.insert(3, 3);
        assert_eq!(
            (map.get(&0), map.get(&1), map.get(&3)),
            (None, Some(&1), Some(&3)),
            "a change is no addition"
        );
        map.remove(&1);
        map.insert(1, 11);
        map.insert(4, 4);
        assert_eq!(
            (map.get(&2), map.get(&1), map.get(&4)),
            (None, Some(&11), Some(&4)),
            "added again is added last"
        );
    }

    #[test]
    fn it_stays_small_whatever_comes_and_goes() {
        let mut map = Bounded::<u32, u32, 3>::default();
        for key in 0..10_000 {
            map.insert(key, key);
            if key % 3 == 0 {
                map.remove(&key);
            }
        }
        assert!(
            map.len() <= 3 && map.order.len() <= 7,
            "{} {}",
            map.len(),
            map.order.len()
        );
    }
}
