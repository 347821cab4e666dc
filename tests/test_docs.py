"""The Python of the documentation runs as it stands, on data and steps of a test's size."""

import json
import os
import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from classifier.drawn import drawing

import fastweights
from fastweights import build_learner, preset

ROOT = Path(__file__).parents[1]
DRAWN = {"sun": "ring", "tree": "tee", "house": "step", "umbrella": "wave"}
"""What is drawn for each thing in the documentation."""


def code_in(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S))


@pytest.fixture(autouse=True)
def small_data(monkeypatch, dataset):
    monkeypatch.setattr(fastweights, "load", lambda name: dataset)


@pytest.fixture
def drawings(tmp_path, monkeypatch):
    """The pictures that the documentation names; which.png is another umbrella."""
    for name, shape in DRAWN.items():
        drawing(shape).save(tmp_path / f"{name}.png")
    drawing("tee", 7).save(tmp_path / "tree2.png")
    drawing("wave", 6).save(tmp_path / "which.png")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("drawings")
def test_the_readme_classifies_and_describes_asks_extends_and_forgets(monkeypatch, dataset, capsys, tmp_path):
    settings = preset("fwcnn-hebb", dataset="strokes", item_shape=dataset.item_shape, vocabulary=0, way=5, shot=1)
    learner = build_learner(settings).eval()
    monkeypatch.setattr(fastweights, "load_learner", lambda path: (learner, SimpleNamespace(learner=settings)))
    names = {}
    exec(code_in("README.md"), names)
    label, example, accuracy = capsys.readouterr().out.splitlines()
    assert label == "['umbrella']"
    assert example.startswith("(('umbrella.png', 0.")
    assert re.fullmatch(r"tensor\((0|1)\.\d*\)", accuracy)
    assert fastweights.Classifier.load(tmp_path / "signs.fw").classes_.tolist() == ["house", "sun", "tree", "umbrella"]
    assert names["logits"].shape == (100, 15, 5)
    assert names["tasks"].support_x.shape == (100, 5, *dataset.item_shape)
    sums = names["state"]["hidden.sums"]
    assert [bool(sums[:, label].any()) for label in range(5)] == [True, True, False, True, True]


@pytest.mark.usefixtures("drawings")
def test_the_page_on_classifiers_runs():
    code, names = code_in("docs/classifier.md"), {}
    exec(code, names)
    assert names["clf"].classes_.tolist() == ["house", "tree", "umbrella"]
    assert names["clf"].memory_.names == ["house.png", "tree.png", "umbrella.png"]
    for what in re.findall(r"^clf\.(?:predict|explain).*", code, re.M):
        assert len(eval(what.partition("  #")[0], names))


def test_methods_are_compared_as_the_page_says(capsys):
    code = code_in("docs/python.md")
    assert code.count("steps=300") == 1
    exec(code.replace("steps=300", "steps=2"), {})
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["fwcnn-hebb", "fwcnn-normalised", "prototypical-cnn"]
    assert len(said) == 4
    assert all(re.search(r"\d\d\.\d\d ± \d\.\d\d %$", line) for line in said)


def test_how_it_works_in_numbers(capsys):
    exec(code_in("docs/how-it-works.md"), {})
    assert capsys.readouterr().out == "tensor(2)\n"


RUN_BY = {
    "README.md": "test_docs.py",
    "CONTRIBUTING.md": "learners/test_outside.py",
    "docs/at-scale.md": "experiments/test_fan_out.py",
    "docs/classifier.md": "test_docs.py",
    "docs/encoders.md": "classifier/test_encoders.py",
    "docs/how-it-works.md": "test_docs.py",
    "docs/python.md": "test_docs.py",
    "docs/texts.md": "classifier/test_texts.py",
}
"""Pages with Python, and the tests that run it."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "results/*.md",
        "benchmarks/*.md",
        "src/**/shipped/*.md",
        "notebooks/*.ipynb",
    )
    for path in ROOT.glob(pattern)
)


def test_all_python_of_the_documentation_is_run():
    assert {page for page in PAGES if page.endswith(".md") and code_in(page)} == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8"), f"{test} does not run {page}"


def text_of(page: str) -> str:
    """A page without its code, in which brackets are no links."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        if ":" in path:
            assert path.startswith("https://"), f"{page}: {link}"
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: there is no {link}"
        if anchor and target.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{page}: {path} has no heading #{anchor}"


def test_sizes_of_the_shipped_models_are_as_said():
    page, shipped = (
        (ROOT / "docs/classifier.md").read_text(encoding="utf-8"),
        ROOT / "src/fastweights/classifier/shipped",
    )
    for name in ("drawings", "photos"):
        said = re.search(rf"\| `{name}` \|[^|]*\| ([\d.]+) MB \|", page)
        assert said is not None
        assert said[1] == f"{(shipped / f'{name}.safetensors').stat().st_size / 1e6:.1f}"


def test_the_citation_is_of_this_version():
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.M)[1] == facts["version"]
    assert re.search(r'^repository-code: "(.*)"$', citation, re.M)[1] == facts["urls"]["Repository"]
    assert f"version = {{{facts['version']}}}" in (ROOT / "docs/cite.md").read_text(encoding="utf-8")
    for key in ("cff-version: 1.2.0", "message: ", "title: ", "authors:"):
        assert re.search(rf"^{key}", citation, re.M), key


def test_the_changelog_has_the_usual_form():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.*?)\](.*)$", text, re.M)
    assert versions[0] == ("Unreleased", "")
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in versions[1:])
    assert all(f"\n[{version}]: https://" in text for version, _ in versions)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= kinds


def test_github_runs_what_we_run():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in workflow
    assert os.access(ROOT / ".ci/run", os.X_OK)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for script in (workflow, (ROOT / ".ci/run").read_text(encoding="utf-8")):
        assert set(re.findall(r"\bmake ([\w-]+)", script)) <= targets


# The pictures and the numbers of how-it-works.md


@pytest.fixture(scope="module")
def explained():
    return runpy.run_path(str(ROOT / "docs/how_it_works.py"))


def test_numbers_of_how_it_works_are_those_of_the_record(explained):
    page = explained["PAGE"].read_text(encoding="utf-8")
    record = explained["read"](explained["RECORD"])
    assert explained["with_tables"](page, explained["tables"](record)) == page
    assert page.count(" ± ") > 50
    changed = [{**line, "accuracy": line["accuracy"] + 0.01} for line in record]
    assert explained["with_tables"](page, explained["tables"](changed)) != page
    with pytest.raises(SystemExit, match="lacks the lines"):
        explained["with_tables"]("no markers", explained["tables"](record))


def test_how_it_works_is_measured_and_drawn(explained, tmp_path):
    lines = explained["measure"](tasks=12, classes=(5, 20))
    found = {(line["part"], line.get("factor", line.get("shots", line["way"])), line["answered_by"]): line["accuracy"]
             for line in lines}  # fmt: skip
    assert found["lengths", 4.0, "sum"] < found["lengths", 1.0, "sum"]
    assert found["lengths", 4.0, "unit"] == found["lengths", 1.0, "unit"]
    assert found["shots", 9, "sum"] < 85 < found["shots", 9, "balanced"]
    assert found["capacity", 20, "keys 8"] < found["capacity", 20, "rows"]
    assert {(line["part"], line["answered_by"]) for line in lines} == {
        (line["part"], line["answered_by"]) for line in explained["read"](explained["RECORD"])
    }
    drawn = {**explained["pictures"](), **explained["figures"](lines)}
    explained["save"](drawn, tmp_path)
    shown = re.findall(r"\]\(images/(.*?)\)", explained["PAGE"].read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())
    assert sorted(shown) == sorted(path.name for path in explained["IMAGES"].iterdir())
