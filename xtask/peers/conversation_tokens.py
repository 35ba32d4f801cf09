"""Tokenizes conversations as transformers' apply_chat_template does, for the tests of frugal's rows.

    python conversation_tokens.py OUT [FOLDER…]

needs transformers 5 and tokenizers. OUT becomes {"tokenizers": {name: tokenizer.json}, "templates": {name: source}, "conversations",
"cases": [{"tokenizer", "template", "conversation", "text", "ids", "mask"}], "real": {name: {"sha256", "end", "cases"}}}. The tokenizers are
tiny and made here, one for each way in which a text begins and in which special tokens take blanks; FOLDERs hold real ones; only
their ids are kept, of the templates with the tokenizer's own `end`. `mask` is return_assistant_tokens_mask of the template, which marks answers with `generation`; null where no
token has the first or the last character of an answer, since transformers then leaves out that answer and all after it.
"""

import hashlib
import json
import pathlib
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

WORDS = ["Hi", "there", "Yes", "It", "is", "INST", "user", "assistant", "system", "four", "ok", "system", "the", "Be", "kind", "you"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]

TEMPLATES = {
    # Phi-3's, Zephyr's, ChatML's, Llama 2's and Gemma's ways of writing turns.
    "lines": "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "ends": "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}\n{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "instructions": "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]{% elif m.role == 'system' %}{{ m.content }}{% else %}{% generation %} {{ m.content | trim }} </s>{% endgeneration %}{% endif %}{% endfor %}",
    "bare": "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}[{{ m.role }}]{{ m.content }}<|end|>{% endif %}{% endfor %}",
}

CONVERSATIONS = {
    "two": [["user", "Hi there"], ["assistant", "Yes"], ["user", "2+2?"], ["assistant", "It is 4."]],
    "system": [["system", "Be kind"], ["user", "Hi"], ["assistant", "  ok  you"], ["user", "the"], ["assistant", "four\n\nYes "]],
    "marks": [["user", "Zoë 🦀\r\nis"], ["assistant", "🦀"], ["user", " \n ok"], ["assistant", "日本\r\nok 👩‍👧"]],
    "specials": [["user", "is </s> ok <|end|> Hi"], ["assistant", "Yes  <|end|>  there\t<s> you"]],
}


def bpe():
    """A small BPE over `▁` and characters, with bytes for the others."""
    characters = sorted(set("▁" + "".join(WORDS) + "[]/|<>?+.0123456789\n"))
    vocabulary = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + characters
    merges = []

    def add(word):
        whole = word[0]
        for character in word[1:]:
            pair = (whole, character)
            whole += character
            if pair not in merges:
                merges.append(pair)
            if whole not in vocabulary:
                vocabulary.append(whole)

    for word in WORDS:
        add(word)
        add("▁" + word)
    add("▁[")
    add("▁▁▁▁")
    return models.BPE(
        vocab={token: number for number, token in enumerate(vocabulary)}, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )


def unigram():
    characters = sorted(set("".join(WORDS) + "[]/|<>?+.0123456789\n日本ë"))
    pieces = [(token, 0.0) for token in SPECIAL] + [("▁", -3.0)] + [(f"▁{word}", -4.0) for word in dict.fromkeys(WORDS)]
    pieces += [(word, -5.0) for word in dict.fromkeys(WORDS)] + [(c, -8.0) for c in characters if len(c) == 1]
    return models.Unigram(list(dict.fromkeys(pieces)), 0, False)


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = SPECIAL + alphabet
    merges = []
    for word in WORDS:
        for text in (word, "Ġ" + word):
            whole = text[0]
            for character in text[1:]:
                if (whole, character) not in merges:
                    merges.append((whole, character))
                whole += character
                if whole not in vocabulary:
                    vocabulary.append(whole)
    return models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=merges)


def made(model, normalizer=None, pre_tokenizer=None, post_processor=None, decoder=None, **token):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    if decoder is not None:
        tokenizer.decoder = decoder
    for text in SPECIAL:
        blanks = token if text not in ("<unk>", "<s>") else {}
        tokenizer.add_special_tokens([AddedToken(text, **{"normalized": False, "special": True, **blanks})])
    return tokenizer


def tokenizers():
    prepend = lambda: normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = lambda: decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    metaspace = lambda scheme: pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    begins = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return {
        "prepend": made(bpe(), prepend(), decoder=pieces(), post_processor=begins),
        "prepend_rstrip": made(bpe(), prepend(), decoder=pieces(), post_processor=begins, rstrip=True),
        "prepend_lstrip_normalized": made(bpe(), prepend(), decoder=pieces(), lstrip=True, normalized=True),
        "metaspace_first": made(bpe(), pre_tokenizer=metaspace("first"), decoder=pieces(), rstrip=True),
        "metaspace_always": made(bpe(), pre_tokenizer=metaspace("always"), decoder=pieces()),
        "metaspace_never": made(bpe(), pre_tokenizer=metaspace("never"), decoder=pieces()),
        "unigram": made(
            unigram(), normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\r", "")]), metaspace("always"), decoder=decoders.Metaspace()
        ),
        "byte_level": made(byte_level(), normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel()),
        "byte_level_trimmed": made(
            byte_level(),
            None,
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            processors.ByteLevel(trim_offsets=True),
            decoders.ByteLevel(),
            rstrip=True,
        ),
    }


def cases(tokenizer, names, end=None):
    found = []
    for template in names:
        for name, turns in CONVERSATIONS.items():
            messages = [{"role": role, "content": content} for role, content in turns]
            source = TEMPLATES[template]
            if end is not None:
                source = source.replace("</s>", end).replace("<|end|>", end)
            setting = {"chat_template": source, "bos_token": "<s>", "eos_token": "</s>"}
            text = tokenizer.apply_chat_template(messages, tokenize=False, **setting)
            out = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **setting)
            mask = out["assistant_masks"]
            spans = render_jinja_template([messages], return_assistant_tokens_mask=True, **setting)[1][0]
            if any(out.char_to_token(0, at) is None for start, end in spans for at in (start, end - 1)):
                mask = None
            found.append({"template": template, "conversation": name, "text": text, "ids": out["input_ids"], "mask": mask})
    return found


def main(out, folders):
    made_here, all_cases = tokenizers(), []
    for name, tokenizer in made_here.items():
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
        all_cases += [{"tokenizer": name, **case} for case in cases(wrapped, TEMPLATES)]
    real = {}
    for folder in map(pathlib.Path, folders):
        name = folder.parent.name if folder.name == "models" else folder.name
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        real[name] = {"sha256": digest, "end": tokenizer.eos_token, "cases": cases(tokenizer, ["lines", "instructions"], tokenizer.eos_token)}
        for case in real[name]["cases"]:
            del case["text"]
    content = {
        "tokenizers": {name: json.loads(tokenizer.to_str()) for name, tokenizer in made_here.items()},
        "templates": TEMPLATES,
        "conversations": CONVERSATIONS,
        "cases": all_cases,
        "real": real,
    }
    pathlib.Path(out).write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
