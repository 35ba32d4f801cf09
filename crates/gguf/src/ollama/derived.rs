//! The format of a chat template that nobody knows by name.
//!
//! Most templates write a turn as a text before its content and one after it, which depend on the role alone. These texts are what lies
//! between the contents of a rendered conversation. Where one text ends and the next begins is a choice that no conversation shows, but for
//! the first turn of the user; each choice is tried until the format renders the probing conversations as the template does.

use super::format::{ChatFormat, Role, System};
use super::{NAME, Renderer};

const SYSTEM: &str = "instruction-text";
const FIRST: &str = "first-text";
const REPLY: &str = "reply-text";
const SECOND: &str = "second-text";

/// Returns the format of a template, and the system message that it writes by itself; `None` if it has none.
pub(super) fn format(begin: Option<&str>, render: Renderer<'_>) -> Option<(ChatFormat, Option<String>)> {
    use Role::{Assistant, System as Instruction, User};

    let render_plain = |conversation: &[(Role, &str)]| {
        let text = render(conversation)?;
        let begin = begin.filter(|begin| text.starts_with(begin)).map_or(0, str::len);
        Some(text[begin..].to_owned())
    };
    let several = render_plain(&[(User, FIRST), (Assistant, REPLY), (User, SECOND)])?;
    let [before_first, after_first, after_reply, end] = between(&several, [FIRST, REPLY, SECOND])?;
    // What follows a user's turn is the same whether the model's is there or asked for.
    let after_user = common(after_first.chars(), end.chars());
    let (user_end, assistant_begin) = after_first.split_at(after_user);
    let prompt = &end[after_user..];
    let with_system = render_plain(&[(Instruction, SYSTEM), (User, FIRST)]);
    let with_system = with_system.as_deref().map(|text| between(text, [SYSTEM, FIRST]));
    let common_end = common(before_first.chars().rev(), after_reply.chars().rev());
    let starts = after_reply.char_indices().map(|(at, _)| at).chain([after_reply.len()]);
    starts.filter(|at| *at >= after_reply.len() - common_end).find_map(|at| {
        let (assistant_end, user_begin) = after_reply.split_at(at);
        let system = match with_system {
            None => System::Turn(String::new(), String::new()),
            Some(parts) => {
                let [before, after, _] = parts?;
                match (after.strip_suffix(user_begin), before.strip_prefix(user_begin)) {
                    (Some(after), _) => System::Turn(before.to_owned(), after.to_owned()),
                    (None, Some(before)) => System::InUser(before.to_owned(), after.to_owned()),
                    (None, None) => return None,
                }
            }
        };
        let format = ChatFormat {
            name: NAME.to_owned(),
            marks: &[],
            system,
            user: [user_begin, user_end].map(str::to_owned),
            assistant: [assistant_begin, assistant_end].map(str::to_owned),
            prompt: prompt.to_owned(),
        };
        let default_system = format.compare(begin, render).ok()?;
        Some((format, default_system))
    })
}

/// The bytes that two texts have in common from their start.
fn common(one: impl Iterator<Item = char>, other: impl Iterator<Item = char>) -> usize {
    one.zip(other).take_while(|(one, other)| one == other).map(|(c, _)| c.len_utf8()).sum()
}

/// The texts before, between and after contents; each content occurs once.
fn between<'t, const CONTENTS: usize, const PARTS: usize>(
    text: &'t str,
    contents: [&str; CONTENTS],
) -> Option<[&'t str; PARTS]> {
    let (mut parts, mut rest) = (Vec::new(), text);
    for content in contents {
        let (part, after) = rest.split_once(content)?;
        parts.push(part);
        rest = after;
    }
    parts.push(rest);
    let is_once = contents.iter().all(|content| text.matches(content).count() == 1);
    parts.try_into().ok().filter(|_| is_once)
}
