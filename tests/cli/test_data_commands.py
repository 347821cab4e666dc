"""Given a person at the keyboard, the data commands do what they say, and say what is wrong in one sentence."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from data.lookalikes import leftovers, pack, unpack
from PIL import Image
from typer.testing import CliRunner

from fastweights.cli.data import data as app
from fastweights.data import omniglot, ptb
from fastweights.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("nothing_outside")


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_from_nothing_to_a_contact_sheet(tmp_path, small_omniglot, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "root"))
    assert run("list").count("missing") == 5  # four datasets, and how to get them
    pack(tmp_path / "mine.zip", {**small_omniglot["background"], **small_omniglot["evaluation"]})
    said = run("get", "omniglot", "--from", tmp_path / "mine.zip")
    assert "12 characters, 240 drawings; an unknown variant" in said
    assert "checking it" in run("get", "omniglot")
    assert "there" in run("list")
    assert run("list").count("missing") == 3  # drawings are made of omniglot
    said = run("prepare", "omniglot", "--variant", "vinyals")
    assert "omniglot:vinyals" in said
    assert "content hash" in said
    assert "prepared form intact" in run("verify", "omniglot")
    run("show", "omniglot", "--variant", "vinyals", "-o", tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (3 * (6 * 29 + 1), 3 * (10 * 29 + 1))
    assert sheet.max() == 255
    run("show", "omniglot", "--variant", "vinyals", "-o", tmp_path / "sheet.jpeg")
    with Image.open(tmp_path / "sheet.jpeg") as other:
        assert (other.format, other.size) == ("JPEG", sheet.shape[::-1])
    with pytest.raises(UserError, match=r"sheet.svg cannot be written: .* has to end in .png or .jpg"):
        run("show", "omniglot", "--variant", "vinyals", "-o", tmp_path / "sheet.svg")
    with pytest.raises(UserError, match=r"called 'tset' \(did you mean test"):
        run("show", "omniglot", "--variant", "vinyals", "--split", "tset")


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """The address under which the folder `served` is."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served"))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_get_downloads_what_passes_the_check(tmp_path, server, small_ptb, monkeypatch):
    for file in ptb.FILES:
        finding = ptb._check(small_ptb[f"ptb.{file}.txt"], "", file)
        monkeypatch.setitem(ptb.KNOWN, file, {finding.content_hash: "the look-alike"})
    unpack(tmp_path / "served", small_ptb)
    monkeypatch.setattr(ptb, "MIRRORS", (f"{server}/no/{{file}}", f"{server}/ptb.{{file}}.txt"))
    said = run("get", "ptb", "--data-root", tmp_path / "root")
    assert "801 lines" in said
    assert "known: the look-alike" in said
    with pytest.raises(UserError, match="go to the terminal; leave out -o"):
        run("show", "ptb", "--data-root", tmp_path / "root", "-o", tmp_path / "sheet.png")
    shown = run("show", "ptb", "--data-root", tmp_path / "root", "--shot", 2)
    assert "____" in shown
    assert "query" in shown


def test_one_class_is_no_task_to_show(tmp_path):
    texts = tmp_path / "texts.csv"
    texts.write_text("text,label,split\n" + 2 * "hello,a,train\nhello,b,val\nhello,c,test\n")
    with pytest.raises(UserError, match=r"2 classes of 2 texts, but .*texts\.csv test has 1; ask for another --split"):
        run("show", texts, "--data-root", tmp_path)


def test_a_download_with_unknown_contents_is_not_kept(tmp_path, server, small_omniglot, monkeypatch):
    for half, contents in small_omniglot.items():
        pack(tmp_path / "served" / f"images_{half}.zip", contents)
    monkeypatch.setattr(omniglot, "MIRRORS", (f"{server}/images_{{half}}.zip",))
    with pytest.raises(UserError, match="unknown hash"):
        run("get", "omniglot", "--data-root", tmp_path / "root")
    assert leftovers(tmp_path / "root") == []


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(UserError, match="no public download"):
        run("get", "mini-imagenet", "--data-root", tmp_path)
    with pytest.raises(UserError, match="none of the benchmarks"):
        run("get", "strokes", "--data-root", tmp_path)
    with pytest.raises(UserError, match="fastweights data get ptb"):
        run("verify", "ptb", "--data-root", tmp_path)
    (tmp_path / "ro").mkdir(mode=0o555)
    with pytest.raises(UserError, match="is read-only"):
        run("get", "ptb", "--data-root", tmp_path / "ro")


def test_damage_to_the_prepared_form_is_found(ptb_root):
    run("prepare", "ptb", "--data-root", ptb_root)
    file = ptb_root / "prepared" / "ptb-standard" / "test_values.npy"
    file.write_bytes(file.read_bytes()[:-4] + b"\1\1\1\1")
    with pytest.raises(UserError, match="damaged"):
        run("verify", "ptb", "--data-root", ptb_root)


def test_what_was_prepared_from_other_files_is_not_used_any_more(ptb_root, small_ptb, tmp_path):
    run("prepare", "ptb", "--data-root", ptb_root)
    other = {name: data.replace(b" w1 ", b" w2 ") for name, data in small_ptb.items()}
    unpack(ptb_root / "ptb", other)
    with pytest.raises(UserError, match="prepared from other files"):
        run("verify", "ptb", "--data-root", ptb_root)
    said = run("get", "ptb", "--data-root", ptb_root, "--from", unpack(tmp_path / "mine", other))
    assert "made from other files" in said
    run("prepare", "ptb", "--data-root", ptb_root)
    assert "intact" in run("verify", "ptb", "--data-root", ptb_root)
