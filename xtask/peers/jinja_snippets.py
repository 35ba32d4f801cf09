"""Renders snippets of Jinja2 under transformers' settings, for the tests of `dataloading::chat`.

    python jinja_snippets.py OUT

needs jinja2. OUT becomes {"arguments": {name: value}, "snippets": [[source, text or null for an error]]}.
"""

import json
import pathlib
import sys

from chat_templates import compiled

ARGUMENTS = {
    "text": "o'neil isn't  HERE\tnow",
    "name": "Ünï çode_x2",
    "lines": "one\ntwo\r\n\nthree\n",
    "n": 42,
    "negative": -7,
    "f": 2.5,
    "whole": 3.0,
    "yes": True,
    "nothing": None,
    "xs": [1, 2.0, "three", None, True],
    "names": ["b", "a", "C"],
    "d": {"k": 1, "it's": [1, "two"], "n": None},
    "path": "a.b.c",
    "query": "a b&c=d/é~-_.!*'()",
}

SNIPPETS = r"""
{{ '%s and %d' % ('a', 3) }}
{{ '%d items' % n }}
{{ '%05.1f|%-6s|%+d|%x|%%' % (f, 'ab', n, 255) }}
{{ '%s' % nothing }}{{ '%s' % yes }}{{ '%s' % whole }}
{{ '%s' % xs }}
{{ '%r' % text }}
{{ '%(k)s' % d }}
{{ '%s' % text|upper }}
{{ '%s' % d.k + 'x' }}
{{ ('%s-%s' % (n, name)) | length }}
{{ 'a' ~ '%02d' % 7 ~ 'b' }}
{% set x = '%s:%s' % (name, xs[0]) %}{{ x }}
{% if '%d' % n == '42' %}yes{% endif %}
{{ n % 5 }} {{ negative % 5 }} {{ f % 2 }}
{{ '%s %s'|format('a', n) }}
{{ '%c%c' % ('a', 98) }}
{{ '%e %g %G' % (f, f, 1e20) }}
{{ '%10s|%-10s|' % ('é', 'é') }}
{{ '%.2s' % 'abc' }}
{{ '{} {}'.format('a', n) }}
{{ '{0}{1}{0}'.format('a', 'b') }}
{{ '{:>8}|{:<8}|{:^8}|'.format('ab', 'cd', 'ef') }}
{{ '{:*^9}'.format('mid') }}
{{ '{:05d} {:,} {:.3f} {:x} {:b} {:e}'.format(n, 1234567, f, 255, 5, f) }}
{{ '{name}!'.format(name=name) }}
{{ '{!r}'.format(text) }}
{{ '{{}}'.format() }}
{{ text.removeprefix("o'") }}|{{ text.removeprefix('x') }}
{{ text.removesuffix('now') }}|{{ text.removesuffix('x') }}
{{ path.partition('.') }}
{{ path.partition('.')[2] }}|{{ path.partition('-')[0] }}
{{ path.rpartition('.') }}
{{ path.rpartition('-')[2] }}
{{ path.rindex('.') }} {{ path.index('.') }} {{ path.rfind('.') }} {{ path.find('x') }}
{{ path.index('x') }}
{{ path.find('.', 2) }} {{ path.rfind('.', 0, 3) }} {{ path.index('.', 2) }} {{ path.count('.', 2) }}
{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ '+7'.zfill(4) }} {{ 'abcd'.zfill(2) }}
{{ 'ab'.ljust(5) }}|{{ 'ab'.rjust(5) }}|{{ 'ab'.center(5) }}|{{ 'abc'.center(6) }}|
{{ 'ab'.ljust(5, '*') }}|{{ 'ab'.rjust(5, '*') }}|{{ 'ab'.center(7, '*') }}|
{{ 'a\tbc\td'.expandtabs(4) }}|{{ 'a\tb'.expandtabs() }}|
{{ text|wordcount }} {{ ''|wordcount }}
{{ query|urlencode }}
{{ {'a b': 'c&d', 'x': 1}|urlencode }}
{{ 'ab'|center(7) }}|{{ 'abc'|center(8) }}|{{ 'x'|center|length }}
{{ 'f' is callable }} {{ raise_exception is callable }} {{ range is callable }} {{ n is callable }}
{{ 'x'|int }} {{ '12'|int }} {{ '12.7'|int }} {{ 'x'|int(5) }} {{ '0x1f'|int(0, 16) }} {{ 3.9|int }} {{ nothing|int }}
{{ 'x'|float }} {{ '1.5'|float }} {{ 'x'|float(2.5) }} {{ n|float }}
{{ text.title() }}
{{ text|title }}
{{ 'they’re bill_s a-b 3rd x2y'.title() }}
{{ 'they’re bill_s a-b (x) [y] {z} <w> 3rd x2y'|title }}
{{ text.capitalize() }} {{ 'HELLO wORLD'|capitalize }}
{{ text.swapcase() }}
{{ text.casefold() }} {{ 'Straße'.casefold() }}
{{ text.upper() }} {{ name.lower() }} {{ 'ß'.upper() }}
{{ text.split() }} {{ text.split(' ') }} {{ path.split('.', 1) }}
{{ path.rsplit('.', 1) }} {{ ' a  b c '.rsplit() }} {{ ' a  b c '.rsplit(none, 1) }}
{{ ' a  b c '.split(none, 1) }} {{ ' a b '.split() }}
{{ lines.splitlines() }} {{ lines.splitlines(true) }}
{{ 'a\x0bb\x1cc\u2028d\x85e'.splitlines()|length }}
{{ '  x '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xya'.lstrip('yx') }}|{{ 'axy'.rstrip('yx') }}|
{{ 'abc'.startswith('bc', 1) }} {{ 'abc'.endswith('b', 0, 2) }} {{ 'abc'.startswith(('x', 'a')) }}
{{ 'a-b-c'.replace('-', '+') }} {{ 'a-b-c'.replace('-', '+', 1) }} {{ 'ab'.replace('', '.') }}
{{ '-'.join(names) }} {{ names|join(', ') }} {{ xs|join('|') }}
{{ 'ab12'.isalnum() }} {{ 'ab'.isalpha() }} {{ '12'.isdigit() }} {{ '½'.isnumeric() }} {{ '½'.isdigit() }} {{ '²'.isdigit() }} {{ '²'.isdecimal() }} {{ '12'.isdecimal() }}
{{ 'Ab Cd'.istitle() }} {{ 'ab'.istitle() }} {{ 'a_1'.isidentifier() }} {{ '1a'.isidentifier() }} {{ 'a b'.isprintable() }} {{ ' \t'.isspace() }} {{ 'ab'.islower() }} {{ 'AB'.isupper() }} {{ 'é'.isascii() }}
{{ 'abc'[::-1] }} {{ 'abcdef'[1:4] }} {{ xs[-1] }} {{ xs[1:3] }}
{{ xs }} {{ d }} {{ yes }} {{ nothing }} {{ whole }} {{ f }}
{{ d.items()|list }} {{ d.keys()|list }} {{ d.values()|list }}
{{ d.get('k') }} {{ d.get('x') }} {{ d.get('x', 5) }} {{ d['it\'s'][1] }}
{{ 'k' in d }} {{ 'three' in xs }} {{ 'ne' in text }} {{ 4 in xs }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{{ d|dictsort }}
{{ d|items|list }}
{{ names|sort }} {{ names|sort(case_sensitive=true) }} {{ names|sort(reverse=true) }}
{{ names|first }}{{ names|last }}{{ names|length }}{{ names|count }}
{{ [3, 1, 2]|sum }} {{ [3, 1, 2]|max }} {{ [3, 1, 2]|min }}
{{ [1, 1, 2]|unique|list }} {{ [1, 2, 3]|reverse|list }} {{ 'abc'|reverse }}
{{ [1, 2, 3, 4, 5]|batch(2)|list }} {{ [1, 2, 3, 4, 5]|slice(2)|list }}
{{ [{'a': 1}, {'a': 2}]|map(attribute='a')|list }} {{ names|map('upper')|list }}
{{ [1, 2, 3]|select('odd')|list }} {{ [1, 2, 3]|reject('odd')|list }} {{ [{'a': 1}, {'a': 0}]|selectattr('a')|list }}
{{ [{'r': 'x'}, {'r': 'y'}]|selectattr('r', 'equalto', 'x')|list }} {{ [{'r': 'x'}]|rejectattr('r', 'equalto', 'x')|list }}
{{ [{'r': 'x', 'v': 1}, {'r': 'x', 'v': 2}]|groupby('r')|length }}
{{ 3.7|round }} {{ 3.14159|round(2) }} {{ 2.5|round }} {{ 7|round(method='floor') }} {{ 3.2|round(0, 'ceil') }}
{{ -5|abs }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 6 / 2 }}
{{ 'a\nb'|indent(2) }} {{ 'a\nb'|indent(2, true) }} {{ 'a\n\nb'|indent(2, false, true) }}
{{ '<a href="x">&</a>'|escape }} {{ '<b>'|e }} {{ '<b>x</b> y'|striptags }}
{{ text|truncate(10) }} {{ 'abcdefghijklmnop'|truncate(8, true) }} {{ 'abcdefghijklmnop'|truncate(8, true, '!') }}
{{ 'hello world this is'|wordwrap(7) }}
{{ text|replace('n', 'N') }} {{ text|replace('n', 'N', 1) }} {{ ' x '|trim }} {{ 'xax'|trim('x') }}
{{ nothing|default('d') }} {{ missing|default('d') }} {{ ''|default('d', true) }}
{{ 'abc'|list }} {{ 'abc'|string }} {{ n|string ~ 'x' }}
{{ d|tojson }} {{ xs|tojson }} {{ text|tojson }} {{ d|tojson(indent=2) }}
{{ d|pprint }}
{{ n is number }} {{ text is string }} {{ d is mapping }} {{ xs is sequence }} {{ xs is iterable }} {{ n is integer }} {{ f is float }} {{ yes is boolean }} {{ nothing is none }} {{ missing is defined }} {{ missing is undefined }} {{ n is even }} {{ n is odd }} {{ n is divisibleby 7 }} {{ yes is true }} {{ yes is false }} {{ n is eq 42 }} {{ n is gt 4 }} {{ 1 is in [1] }} {{ 'a' is lower }} {{ 'A' is upper }} {{ nothing is sameas none }} {{ 'x' is filter }} {{ 'upper' is filter }} {{ 'odd' is test }}
{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}
{% for i in range(1, 10, 3) %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.length }}{{ i }} {% endfor %}
{% for x in names %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('o', 'e') }}{% endfor %}
{% for x in [] %}a{% else %}empty{% endfor %}
{% for x in [1, 2, 3] if x > 1 %}{{ x }}{% endfor %}
{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% if x == 3 %}{% break %}{% endif %}{% endfor %}
{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller is defined }}{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}
{% macro wrap() %}<{{ caller() }}>{% endmacro %}{% call wrap() %}x{% endcall %}
{% filter upper %}abc{{ n }}{% endfilter %}
{% set block %}a{{ n }}b{% endset %}{{ block|length }}{{ block }}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}
{{ 'a' if n > 5 else 'b' }}{{ 'a' if n > 50 }}
{{ not yes }} {{ yes and n }} {{ nothing or 'x' }} {{ n > 5 and n < 50 }} {{ 1 < 2 < 3 }}
{{ [1, 2] + [3] }} {{ (1, 2) }} {{ (1,) }} {{ {'a': [1]} }} {{ 'a' * 3 }} {{ [0] * 2 }}
{{ "it's" }} {{ ["it's", 'a"b', 'a\nb', 'é'] }} {{ ["\\"] }}
{{ 1e20 }} {{ 1e-7 }} {{ 0.1 + 0.2 }} {{ 1.0 }} {{ 100000000000000000000.0 }} {{ 123456789012 * 1000 }}
{{ xs|length > 2 }} {{ dict(a=1, b=2) }} {{ joiner is defined }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}
{% set j = joiner(', ') %}{{ j() }}a{{ j() }}b
{{ names.index('a') }} {{ [1, 2, 1].count(1) }}
{{ names.append('x') }}
{{ d.update({'x': 1}) }}
{{ d.pop('k') }}
{{ names.copy() }} {{ d.copy() }}
{{ text.encode('utf-8') }}
{{ n.bit_length() }}
{{ '%5s|%-5s' % ('ab', 'cd') }} {{ '{:>5}'.format('ab') }} {{ '%s %02d' % ('é', 5) }}
{{ '{:>5}'.format('é') }}
{{ 'abc'.translate({97: 'x'}) }}
{{ 'x'.__class__ }}
{{ ''.join(['a', 'b']) }}{{ ' '.join(names|sort) }}
{{ messages[0]['role'] }} {{ messages[0].content }} {{ messages[1:]|length }} {{ messages[-1].role }}
{{ messages|length }} {{ messages|map(attribute='role')|join(',') }}
{{ missing }}|{{ missing.x is defined }}
{{ d.missing }}|{{ d['missing'] }}|{{ xs[10] }}
{{ '\u00e9\x41\n' }} {{ 'a\'b' }} {{ 'a' 'b' }}
{% raw %}{{ x }}{% endraw %}
{# comment #}{{ 1 -}}   x   {{- 2 }}
{%- if true -%}  a  {%- endif -%}
{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%B %A %j') }}
{{ 'A'|lower }}{{ 'ab'|upper }}{{ 'äb'|capitalize }}{{ 'a b'|title }}
{{ 'abc'|first }}{{ 'abc'|last }}
{{ 'abc'|random in 'abc' }}
{{ 1234567|filesizeformat }} {{ 'http://a.b'|urlize }}
{{ d|xmlattr }}
{{ 'x'|safe }} {{ 'a<'|forceescape }}
{{ n|string|int + 1 }} {{ '%.3f'|format(3.14159) }} {{ 'a,b'.split(',')|last }}
{{ ('a', 'b')|join }} {{ range(3)|list }} {{ range(5)[1] }} {{ 'b' ~ 1 ~ 2.0 ~ none ~ true }}
{{ d|attr('k') }}|{{ d|attr('k') is defined }}
{{ [[1, 2], [3]]|sum(start=[]) }} {{ [{'a': 1}]|sum(attribute='a') }}
{{ 'x'.ljust(3) ~ '|' }}{{ '日本'.center(6, '・') }}{{ 'é'.zfill(3) }}
{{ 'a b c'.replace(' ', '').title().center(9, '-') }}
{{ 'one two'.split()|map('capitalize')|join(' ') }}
{{ 'aXbX'.rstrip('X').partition('X')|list }}
""".strip().splitlines()


def rendered(source):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "4"}]
    try:
        return compiled(source).render(messages=messages, tools=None, documents=None, add_generation_prompt=False, **ARGUMENTS)
    except Exception:
        return None


if __name__ == "__main__":
    content = {"arguments": ARGUMENTS, "snippets": [[source, rendered(source)] for source in SNIPPETS]}
    text = json.dumps(content, ensure_ascii=False, indent=0)
    pathlib.Path(sys.argv[1]).write_text(text + "\n")
