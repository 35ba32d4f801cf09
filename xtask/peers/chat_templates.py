"""Renders conversations with chat templates as transformers' apply_chat_template does, for the tests of `dataloading::chat`.

    python chat_templates.py OUT TEMPLATE.jinja…

needs jinja2. The environment has the settings of transformers (utils/chat_template_utils.py): a sandbox, trim_blocks, lstrip_blocks, loop
controls, the tag `generation`, `tojson` without escapes, `raise_exception` and `strftime_now`, here with a fixed date. OUT becomes
{"templates": {name: source}, "cases": [{"template", "conversation", "add_generation_prompt", "text" or null for an error, "spans"}]};
spans are of `generation`, in characters.
"""

import datetime
import json
import pathlib
import sys

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

OPEN, CLOSE = "\ufdd0", "\ufdd1"


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller):
        return OPEN + caller() + CLOSE


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compiled(source):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime(2026, 1, 2).strftime
    return environment.from_string(source)


def spans_of(text):
    """The text without marks, and the spans between them; spans that touch are one."""
    plain, spans, start = "", [], None
    for c in text:
        if c == OPEN:
            start = len(plain)
        elif c == CLOSE:
            if spans and spans[-1][1] == start:
                spans[-1][1] = len(plain)
            elif start < len(plain):
                spans.append([start, len(plain)])
        else:
            plain += c
    return plain, spans


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wéather <b> & 'x' \"y\" \\ \u2028",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where", "enum": ["Zürich", "Oslo"]},
                "days": {"type": "integer", "default": 3, "minimum": -1},
                "scale": {"type": "number", "default": 1e-05, "maximum": 1e16},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def call(name, **arguments):
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


CALL = assistant("", tool_calls=[call("get_weather", city="Zürich", days=2, scale=0.5, exact=True, none=None)])
TWO = assistant("I look.", tool_calls=[call("get_weather", city="Oslo"), call("get_weather", city="Zürich")])
RESULT = {"role": "tool", "content": '{"t": 3}', "name": "get_weather", "tool_call_id": "abcdefghi"}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = assistant("<think>\nhm\n</think>\n\nYo")

CONVERSATIONS = {
    "single": {"messages": [user("Hi there"), assistant("Hello!")]},
    "multi": {"messages": [user("Hi there"), assistant("Hello!"), user("2+2?"), assistant(" 4 \n")]},
    "system": {"messages": [SYSTEM, user('Hi <b>"q"</b> & ä 日本'), THOUGHT]},
    "thinking": {"messages": [user("a"), THOUGHT, user("b"), assistant("c", reasoning_content="why")]},
    "prompt": {"messages": [user("Hi"), assistant("a"), user("b")], "add_generation_prompt": True},
    "tools": {"messages": [user("w?"), CALL, RESULT, assistant("3 degrees")], "tools": [TOOL]},
    "two-calls": {"messages": [SYSTEM, user("w?"), TWO, RESULT, RESULT, assistant("done")], "tools": [TOOL, TOOL]},
    "no-thinking": {"messages": [user("Hi")], "add_generation_prompt": True, "arguments": {"enable_thinking": False}},
    "thinking-on": {"messages": [user("Hi")], "add_generation_prompt": True, "arguments": {"enable_thinking": True}},
    "wrong-order": {"messages": [assistant("a"), assistant("b"), user("c"), user("d")]},
    "blank": {"messages": [user("  \n"), assistant("")]},
}


def main(out, paths):
    templates, cases = {}, []
    for path in map(pathlib.Path, sorted(paths)):
        source = path.read_text(encoding="utf-8")
        templates[path.stem] = source
        template = compiled(source)
        for name, conversation in CONVERSATIONS.items():
            context = {
                "bos_token": "<s>",
                "eos_token": "</s>",
                "messages": conversation["messages"],
                "tools": conversation.get("tools"),
                "documents": None,
                "add_generation_prompt": conversation.get("add_generation_prompt", False),
                **conversation.get("arguments", {}),
            }
            try:
                text, spans = spans_of(template.render(**context))
            except Exception:
                text, spans = None, []
            case = {"template": path.stem, "conversation": name, "text": text, "spans": spans}
            cases.append(case)
    lines = ["{", '"templates": {']
    lines.append(",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in templates.items()))
    lines += ["},", '"conversations": {']
    lines.append(
        ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in CONVERSATIONS.items())
    )
    lines += ["},", '"cases": [']
    lines.append(",\n".join(json.dumps(case, ensure_ascii=False) for case in cases))
    lines += ["]", "}"]
    text = "\n".join(lines) + "\n"
    json.loads(text)
    pathlib.Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
