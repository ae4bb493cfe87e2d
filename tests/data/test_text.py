"""Tokens of text files against the tokenizer called on whole documents."""

import json

import pytest

from fla_jax.data import open_binidx, text
from fla_jax.data.text import tokenize

TEXTS = ["Hello, world.\n", "Grüße\r\nvon hier — 你好!", "line\n" * 40, "a\rb"]


def wanted(texts):
    return [[*t.encode(), 0] for t in texts]


def lists(data):
    return [document.tolist() for document in data]


@pytest.fixture
def files(tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_bytes(TEXTS[2].encode())
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"id": i, "body": t}) for i, t in enumerate(TEXTS)) + "\n\n")
    (tmp_path / "empty").write_text("")
    return [plain, tmp_path / "empty", lines]


def test_documents(files, tmp_path):
    seen = []
    data = tokenize(
        files, tmp_path / "out", vocab_size=256, text_field="body", progress=lambda *x: seen.append(x)
    )
    assert lists(data) == wanted([TEXTS[2], *TEXTS]) and data.tokens.dtype == "uint16"
    total = sum(path.stat().st_size for path in files)
    assert seen[-1] == (total, total) and seen == sorted(seen)
    assert tokenize(files[:1], tmp_path / "wide", "bytes", vocab_size=70_000).tokens.dtype == "uint32"


def test_blocks_change_nothing(files, tmp_path, monkeypatch):
    whole = lists(tokenize(files, tmp_path / "out", vocab_size=256, text_field="body"))
    monkeypatch.setattr(text, "_BLOCK", 13)
    assert lists(tokenize(files, tmp_path / "out", vocab_size=256, text_field="body")) == whole


@pytest.mark.slow
def test_processes_change_nothing(files, tmp_path, monkeypatch):
    whole = lists(tokenize(files, tmp_path / "out", vocab_size=256, text_field="body"))
    monkeypatch.setattr(text, "_BLOCK", 100)
    monkeypatch.setattr(text, "_SMALL", 0)
    options = {"vocab_size": 256, "text_field": "body", "processes": 2}
    assert lists(tokenize(files, tmp_path / "out", **options)) == whole
    (tmp_path / "wrong.jsonl").write_text('{"body": "a"}\nx\n')
    with pytest.raises(ValueError, match=r"wrong\.jsonl: the line at offset 14 is not JSON"):
        tokenize([files[0], tmp_path / "wrong.jsonl"], tmp_path / "new", **options)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"a\.jsonl: the line at offset 14 must be .* 'text'"),
        ("a.jsonl", b'{"text": "a"}\n\n["text"]\n', r"a\.jsonl: the line at offset 15 must be .* 'text'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl: the line at offset 14 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl is not UTF-8 at offset 24"),
        ("a.txt", b"abc\n\xffd", r"a\.txt is not UTF-8 at offset 4"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"n": ' + b"9" * 5000 + b"}\n",
            r"a\.jsonl: the line at offset 14 is not JSON",
        ),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 200_000, r"a\.jsonl: the line at offset 14 is not JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b\\ud83d"}\n',
            r"a\.jsonl: the line at offset 14 .* surrogate at character 1",
        ),
        ("a.jsonl", b" \n\n", "paths must contain text, got 1 files"),
        ("a.txt", b"", "paths must contain text, got 1 files"),
    ],
)
def test_files_that_are_not_right(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tokenize([tmp_path / name], tmp_path / "out", vocab_size=256)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_without_text_earlier_tokens_stay(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    tokenize([tmp_path / "a.txt"], tmp_path / "out", vocab_size=256)
    with pytest.raises(ValueError, match="paths must contain text, got 1 files without any"):
        tokenize([tmp_path / "empty.jsonl"], tmp_path / "out", vocab_size=256)
    assert lists(open_binidx(tmp_path / "out")) == wanted(["abc"])


def test_a_vocabulary_that_is_too_small(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"a\.txt: the tokenizer makes token 99 .* vocabulary has 99"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", "bytes", vocab_size=99)
    with pytest.raises(ValueError, match="a vocabulary of 300 tokens does not say"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", vocab_size=300)
