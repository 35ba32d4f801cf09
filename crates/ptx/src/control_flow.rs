//! Where the lanes of a warp meet again after a branch on which they disagree: at the branch's immediate post-dominator, the first
//! instruction that every path from it to the end has in common.

use crate::instruction::{Instruction, Operation};

/// Returns where the paths after each instruction meet; the number of instructions stands for the end of the kernel.
pub(crate) fn reconvergences(instructions: &[Instruction]) -> Vec<usize> {
    let end = instructions.len();
    let successors: Vec<Vec<usize>> = (0..end).map(|at| successors(instructions, at)).collect();
    post_dominators(&successors)
}

fn successors(instructions: &[Instruction], at: usize) -> Vec<usize> {
    let end = instructions.len();
    let Instruction { guard, operation, .. } = &instructions[at];
    let next = (at + 1).min(end);
    match operation {
        Operation::Branch { target, .. } if guard.is_some() => vec![next, *target],
        Operation::Branch { target, .. } => vec![*target],
        Operation::Exit | Operation::Trap if guard.is_some() => vec![next, end],
        Operation::Exit | Operation::Trap => vec![end],
        _ => vec![next],
    }
}

/// Cooper, Harvey and Kennedy's algorithm on the reversed graph. What never reaches the end has the end.
fn post_dominators(successors: &[Vec<usize>]) -> Vec<usize> {
    let end = successors.len();
    let mut predecessors = vec![Vec::new(); end + 1];
    for (at, next) in successors.iter().enumerate() {
        for next in next {
            predecessors[*next].push(at);
        }
    }
    // Numbered so that the end has the highest number, and each one a lower number than what it is reached from backwards.
    let mut order = Vec::new();
    let mut seen = vec![false; end + 1];
    let mut stack = vec![(end, 0)];
    seen[end] = true;
    while let Some((at, next)) = stack.pop() {
        match predecessors[at].get(next) {
            Some(&predecessor) => {
                stack.push((at, next + 1));
                if !seen[predecessor] {
                    seen[predecessor] = true;
                    stack.push((predecessor, 0));
                }
            }
            None => order.push(at),
        }
    }
    let mut number = vec![0; end + 1];
    for (index, at) in order.iter().enumerate() {
        number[*at] = index;
    }
    const UNKNOWN: usize = usize::MAX;
    let mut dominators = vec![UNKNOWN; end + 1];
    dominators[end] = end;
    let mut changed = true;
    while changed {
        changed = false;
        for &at in order.iter().rev().skip(1) {
            let mut common = UNKNOWN;
            for &next in &successors[at] {
                if dominators[next] == UNKNOWN {
                    continue;
                }
                common = if common == UNKNOWN { next } else { meet(common, next, &dominators, &number) };
            }
            if dominators[at] != common {
                dominators[at] = common;
                changed = true;
            }
        }
    }
    dominators.truncate(end);
    dominators.into_iter().map(|at| if at == UNKNOWN { end } else { at }).collect()
}

fn meet(mut a: usize, mut b: usize, dominators: &[usize], number: &[usize]) -> usize {
    while a != b {
        while number[a] < number[b] {
            a = dominators[a];
        }
        while number[b] < number[a] {
            b = dominators[b];
        }
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_meet_behind_a_choice_and_behind_a_loop() {
        // 0: branch to 3; 1; 2: branch to 4; 3; 4: loop, back to 1 or on; 5: the end is 6.
        let graph = [vec![1, 3], vec![2], vec![4], vec![4], vec![1, 5], vec![6]].map(|next| next.to_vec());
        assert_eq!(post_dominators(&graph), [4, 2, 4, 4, 5, 6]);
    }

    #[test]
    fn an_early_end_leaves_only_the_end_in_common() {
        let graph = [vec![1, 2], vec![3], vec![3]].map(|next| next.to_vec());
        assert_eq!(post_dominators(&graph), [3, 3, 3]);
        // A loop without a way out.
        assert_eq!(post_dominators(&[vec![1], vec![0]]), [2, 2]);
    }
}
