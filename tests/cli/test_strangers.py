"""Names and files of strangers: whatever they hold, what is said is one line that the terminal shows as it is."""

import errno
import json
import warnings

import numpy as np
import pytest

from fastweights.classifier.adapter import Adapter
from fastweights.cli import main
from fastweights.data.own import rows_of
from fastweights.experiments.search import read_candidates
from fastweights.learners.outside import find, make
from fastweights.utils.errors import UserError


def failed(capsys, sentence: str) -> str:
    with pytest.raises(SystemExit) as end:
        main._fail(sentence, 2)
    assert end.value.code == 2
    return str(capsys.readouterr().err)


def test_names_neither_break_the_line_nor_speak_to_the_terminal(capsys):
    assert failed(capsys, "a\nb\x1b[31m\x07 \ud800 is no file.") == "error: a\\nb\\x1b[31m\\x07 \\ud800 is no file.\n"
    assert failed(capsys, "Ägypten, 日本 is no file.") == "error: Ägypten, 日本 is no file.\n"


def test_names_are_shown_as_they_are(capsys):
    assert failed(capsys, "a:b:c [bold]d[/bold] :smile: is no file.") == (
        "error: a:b:c [bold]d[/bold] :smile: is no file.\n"
    )
    main.say("a:b:c")
    assert capsys.readouterr().out == "a:b:c\n"


def test_what_we_warn_of_is_a_sentence_and_what_others_warn_of_is_shown_as_ever(capsys):
    others = []
    ours = main.__file__
    main._noted("it is old.", UserWarning, ours, 3, show=lambda *told: others.append(told))
    main._noted("it is old.", DeprecationWarning, ours, 3, show=lambda *told: others.append(told))
    main._noted("it is old.", UserWarning, warnings.__file__, 3, show=lambda *told: others.append(told))
    assert capsys.readouterr().err == "Note: it is old.\n"
    assert [told[1] for told in others] == [DeprecationWarning, UserWarning]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_of_in_words(code):
    assert "no space left" in main._in_words(OSError(code, "whatever"))


@pytest.mark.parametrize("ending", ["sys.exit()", "sys.exit(7)", "raise SystemExit('done')"])
def test_a_script_that_ends_does_not_end_us(tmp_path, ending):
    (tmp_path / "mine.py").write_text(f"import sys\n{ending}\n")
    with pytest.raises(UserError, match=r"mine\.py cannot be imported \(SystemExit"):
        find(f"{tmp_path / 'mine.py'}:Mine")


def test_what_is_no_learner_is_told_of(tmp_path):
    (tmp_path / "mine.py").write_text("NUMBER = 3\nclass Text(str): pass\n")
    with pytest.raises(UserError, match=r"called 'NUMBER'; there are Text\.$"):
        find(f"{tmp_path / 'mine.py'}:NUMBER")
    with pytest.raises(UserError, match=r"Text is no fastweights\.Learner"):
        make(find(f"{tmp_path / 'mine.py'}:Text"), item_shape=(8, 8, 1), vocabulary=0, way=5)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{}", "it is none"), ('"a"', "it is none"), ('[{"name": "a", "name": "b"}]', "twice"), ("[" * 10**5, "deeply")],
)
def test_candidates_are_a_list_that_says_each_thing_once(tmp_path, text, says):
    (tmp_path / "candidates.json").write_text(text)
    with pytest.raises(UserError, match=rf"candidates\.json is not a list of configurations \(.*{says}"):
        read_candidates(tmp_path / "candidates.json")
    (tmp_path / "candidates.json").write_text(json.dumps([]))
    assert read_candidates(tmp_path / "candidates.json") == []


@pytest.mark.parametrize("name", ["text", "label", "split"])
def test_a_table_with_one_column_twice_is_refused(tmp_path, name):
    (tmp_path / "two.csv").write_text(f"text,label,split,{name}\na,b,train,c\n")
    with pytest.raises(UserError, match=rf"two\.csv has two columns called {name}; remove or rename one"):
        list(rows_of(tmp_path / "two.csv", ("text", "label")))


def test_an_adapter_alone_does_not_see_pictures(tmp_path, monkeypatch, capsys):
    from PIL import Image

    Adapter(None, np.zeros(4, np.float32)).save(tmp_path / "a.safetensors")
    for name in ("ring", "bar"):
        (tmp_path / "shown" / name).mkdir(parents=True)
        Image.new("L", (9, 9), len(name)).save(tmp_path / "shown" / name / "1.png")
    words = ["learn", str(tmp_path / "shown"), "--model", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "x.fw")]
    monkeypatch.setattr("sys.argv", ["fastweights", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert "is an adapter, which goes above an encoder" in " ".join(capsys.readouterr().err.split())
